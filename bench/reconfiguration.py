"""What reconfiguration costs on this machine: the source's table, from a live run.

    python -m bench.reconfiguration [--joins 10] [--borrows 10] [--config examples/elastic.yaml] [--json] [--out FILE]

One run of real engines and a real trainer. A preemptible slot joins, is admitted, is killed and joins again; the
training GPU is borrowed and returned between steps. Rows, medians in seconds: expanding = preparation (until the engine
is up) and finalisation (weights, verification, admission); borrowing = activation and deactivation. Changes of roles
have a study of their own, `bench/role_switch.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.live.driver import Driver
from pearl.live.preflight import preflight
from pearl.live.train import train
from pearl.observe.elastic import ElasticCounts

SLOT = "preemptible-0"
SERVES_S = 1.0
"""A joiner serves this long before it is killed."""
ROWS = {
    "preparation": "prep_s",
    "finalisation": "finalise_s",
    "activation": "activate_s",
    "deactivation": "deactivate_s",
}


class Taker(ElasticCounts):
    """Observer that takes the slot away after each admission, and ends the run when there is enough."""

    driver: Driver | None = None

    def __init__(self, joins: int, borrows: int, return_deadline_s: float) -> None:
        super().__init__(return_deadline_s)
        self.wanted = {"finalise_s": joins, "activate_s": borrows, "deactivate_s": borrows}

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        super().saw(now, entry)
        if isinstance(entry, ev.RecordOperation) and (entry.kind, entry.phase) == ("expand", "admitted"):
            asyncio.get_running_loop().call_later(SERVES_S, self._take)
        if all(len(self.seconds[name]) >= count for name, count in self.wanted.items()) and self.driver is not None:
            self.wanted = {"finalise_s": 1 << 30}
            self.driver.post(ev.StopRequested("enough was measured"))

    def _take(self) -> None:
        assert self.driver is not None
        worker = self.driver.cluster.workers.get(SLOT)
        if (
            worker is not None
            and not self.driver.closing
            and len(self.seconds["finalise_s"]) < self.wanted["finalise_s"]
        ):
            os.killpg(worker.process.pid, signal.SIGKILL)


async def measure(config: RunConfig, joins: int, borrows: int) -> dict[str, Any]:
    taker = Taker(joins, borrows, config.elastic.return_deadline_s)
    ready = await preflight(config)
    result = await train(config, ready, Console(stderr=True), watch=taker)
    if result.failure is not None:
        raise SystemExit(result.failure)
    seconds = {row: taker.seconds[name] for row, name in ROWS.items()}
    return {
        "config": config.model.path,
        "median_s": {row: round(median(values), 3) for row, values in seconds.items() if values},
        "seconds": {row: [round(value, 3) for value in values] for row, values in seconds.items()},
        "steps": result.summary["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--borrows", type=int, default=10)
    parser.add_argument("--config", type=Path, default=Path("examples/elastic.yaml"))
    parser.add_argument("--model", help="instead of the configuration's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        # Borrowing whatever it brings, and a slot that only this study takes away.
        overrides = [
            f"run_dir={folder}/run", "pipeline.steps=100000", "elastic.policy=elastic-borrow",
            "elastic.preemptible_slots=1", "elastic.overlap_slots=1", "elastic.availability.file=null",
            "pipeline.worker_restarts=100000", "environment.family=letters", "environment.max_turns=1",
        ]  # fmt: skip
        overrides += [f"model.path={args.model}"] if args.model else []
        outcome = asyncio.run(measure(load_config(args.config, overrides), args.joins, args.borrows))
    if args.out:
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    if args.json:
        print(json.dumps(outcome))
    else:
        for row, values in outcome["seconds"].items():
            print(f"{row:<14} {outcome['median_s'].get(row, float('nan')):>8.2f} s   (median of {len(values)})")


if __name__ == "__main__":
    main()
