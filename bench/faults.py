"""Fault search: small runs of the machines under adversarial timing and faults, every invariant after every event.

    python -m bench.faults --seeds A:B [--jobs 2] [--stop] [--json] [--out bench/results/faults.json]
    python -m bench.faults --replay SEED [--shrink]

A seed is a schedule: sizes, policies, faults and timing follow from it, so it fails again wherever it is played. Of the
first broken seed the report is printed; `--shrink` makes its case smaller first. `--stop` ends the search there. Exit
code 1 if a seed broke. See docs/faults.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pearl.sim.faults import play_seed, report, shrink

CHUNK = 50
"""Seeds that a process plays in one go."""


def chunk(first: int, last: int) -> tuple[int, list[tuple[int, str, str]], Counter[str], Counter[str]]:
    """Number of seeds; (seed, what, where) of the broken ones; faults that happened by kind; entries by kind."""
    broken: list[tuple[int, str, str]] = []
    struck: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    for seed in range(first, last):
        world, found = play_seed(seed)
        struck.update(str(fault.kind) for fault in world.struck)
        entries.update(world.counts)
        if found is not None:
            broken.append((seed, found.what, found.where))
    return last - first, broken, struck, entries


def search(first: int, last: int, jobs: int, stop: bool) -> dict[str, Any]:
    began = time.monotonic()
    starts = range(first, last, CHUNK)
    ends = [min(start + CHUNK, last) for start in starts]
    schedules = 0
    broken: list[tuple[int, str, str]] = []
    struck: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
    pool = ProcessPoolExecutor(jobs)
    try:
        results = map(chunk, starts, ends) if jobs == 1 else pool.map(chunk, starts, ends)
        for count, some, faults, kinds in results:
            schedules += count
            broken += some
            struck += faults
            entries += kinds
            if stop and broken:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    return {
        "command": f"python -m bench.faults --seeds {first}:{last} --jobs {jobs}",
        "machine": f"{platform.machine()}, {jobs} cores, Python {platform.python_version()}",
        "schedules": schedules,
        "broken": len(broken),
        "first_broken_seed": broken[0][0] if broken else None,
        "seconds": round(time.monotonic() - began, 1),
        "faults": dict(struck.most_common()),
        "events_and_instructions": entries.total(),
        "entries": dict(entries.most_common()),
        "broken_seeds": [{"seed": seed, "what": what, "where": where} for seed, what, where in broken],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A:B", default="0:200", help="B is excluded")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="at the first broken seed")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.replay is not None:
        return replay(args.replay, args.shrink)
    first, last = (int(part) for part in args.seeds.split(":"))
    result = search(first, last, args.jobs, args.stop)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return int(result["broken"] > 0)
    for seed in result["broken_seeds"]:
        print(f"seed {seed['seed']}: {seed['what']} ({seed['where']})")
    print(
        f"{result['schedules']} schedules, {sum(result['faults'].values())} faults, "
        f"{result['events_and_instructions']} events and instructions, {result['broken']} broken, {result['seconds']} s"
    )
    return replay(result["first_broken_seed"], args.shrink) if result["broken"] else 0


def replay(seed: int, smaller: bool) -> int:
    world, broken = play_seed(seed)
    if broken is None:
        print(f"seed {seed}: nothing broke in {len(world.log)} entries, {len(world.struck)} faults")
        return 0
    print(report(shrink(broken) if smaller else broken))
    return 1


if __name__ == "__main__":
    sys.exit(main())
