"""How fast is the simulator, and how much memory does it take? One table.

    python -m bench.simulate [--json] [--small-only]

Two virtual hours of 32 GPUs under four policies, and ten virtual minutes of 10,000 GPUs; each in a process of its own,
whose peak memory is that of the case. Limits: 5 s of CPU time each for 32 GPUs, 300 s for 10,000; the exit code is 1 if
one is missed. Writes `bench/results/simulate.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "simulate.json"
REPOSITORY = Path(__file__).parent.parent
SMALL = [(32, 2.0, policy) for policy in ("colocated", "elastic", "static-pd", "pearl")]
LARGE = [(10_000, 1 / 6, "pearl")]
LIMIT_S = {32: 5.0, 10_000: 300.0}


def play(gpus: int, hours: float, policy: str) -> dict[str, Any]:
    from pearl.sim.scenario import Scenario, simulate

    began_s = time.process_time()
    summary, simulator = simulate(Scenario.of_size(gpus, policy=policy, hours=hours))
    cpu_s = time.process_time() - began_s
    return {
        "gpus": gpus,
        "policy": policy,
        "simulated_s": summary["simulated_s"],
        "cpu_s": round(cpu_s, 2),
        "wall_s": summary["wall_s"],
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "events": summary["events"],
        "clock_entries": simulator.clock.count,
        "turns": summary["turns"],
        "us_per_turn": round(1e6 * cpu_s / max(1, summary["turns"]), 1),
        "steps": summary["steps"],
        "trajectories_lost": summary["trajectories_lost"],
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--small-only", action="store_true", help="leave 10,000 GPUs out, and write nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        gpus, hours, policy = arguments.case.split(",")
        print(json.dumps(play(int(gpus), float(hours), policy)))
        return 0
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    cases = []
    for case in SMALL if arguments.small_only else SMALL + LARGE:
        command = [sys.executable, "-m", "bench.simulate", "--case", ",".join(map(str, case))]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        cases.append(json.loads(done.stdout))
    result = {
        "command": "python -m bench.simulate",
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared, no GPU",
        "python": platform.python_version(),
        "limits_cpu_s": {str(gpus): limit for gpus, limit in LIMIT_S.items()},
        "cases": cases,
    }
    if not arguments.small_only:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        columns = (
            "gpus",
            "policy",
            "simulated_s",
            "cpu_s",
            "wall_s",
            "peak_memory_mib",
            "events",
            "turns",
            "us_per_turn",
        )
        print("  ".join(f"{name:>15}" for name in columns))
        for case in cases:
            print("  ".join(f"{case[name]:>15}" for name in columns))
    return int(any(case["cpu_s"] > LIMIT_S[case["gpus"]] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
