"""What reconfiguration costs on this machine: the source's table, from a live run.

    python -m bench.reconfiguration [--joins 10] [--borrows 25] [--seconds 540] [--config examples/elastic.yaml]
                                    [--model NAME] [--json] [--out FILE]

One run of real engines and a real trainer, until there are enough of both or `--seconds` have passed since the first
dispatch. A preemptible slot joins, is admitted, is killed and joins again; the training GPU is borrowed and returned
between steps. Rows, medians in seconds: expanding = preparation (until the engine is up) and finalisation (weights,
verification, admission); borrowing = activation and deactivation. Changes of roles have a study of their own,
`bench/role_switch.py`.

After each return the processes of the trainer ranks and of the overlap slot (its worker and its engine) are looked at:
resident memory, open files, number. They are the same processes all the time, or the run counts as failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from bench.provenance import provenance
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
WARM = 5
"""Cycles of borrowing and returning before growth counts: the first ones load libraries and grow pools."""
ROWS = {
    "preparation": "prep_s",
    "finalisation": "finalise_s",
    "activation": "activate_s",
    "deactivation": "deactivate_s",
}


class Taker(ElasticCounts):
    """Observer that takes the slot away after each admission, and ends the run when there is enough."""

    driver: Driver | None = None

    def __init__(self, joins: int, borrows: int, seconds: float, return_deadline_s: float) -> None:
        super().__init__(return_deadline_s)
        self.wanted = {"finalise_s": joins, "activate_s": borrows, "deactivate_s": borrows}
        self.limit_s = seconds
        self.cycles: list[dict[str, dict[str, Any]]] = []
        """After each return: what the processes of the two zones hold."""
        self._began: float | None = None
        self._over = False

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        super().saw(now, entry)
        assert self.driver is not None
        match entry:
            case ev.Generate():
                self._began = self._began or now
            case ev.RecordOperation(kind="expand", phase="admitted"):
                asyncio.get_running_loop().call_later(SERVES_S, self._take)
            case ev.RecordOperation(kind="return", phase="done"):
                zones = ("trainer-", "overlap-")
                self.cycles.append({zone.strip("-"): held(self._roots(zone)) for zone in zones})
        enough = all(len(self.seconds[name]) >= count for name, count in self.wanted.items())
        if not self._over and (enough or (self._began is not None and now - self._began > self.limit_s)):
            self._over = True
            self.driver.post(ev.StopRequested("enough was measured"))

    def _roots(self, prefix: str) -> list[int]:
        assert self.driver is not None
        return [w.process.pid for slot, w in self.driver.cluster.workers.items() if slot.startswith(prefix)]

    def _take(self) -> None:
        assert self.driver is not None
        worker = self.driver.cluster.workers.get(SLOT)
        more = len(self.seconds["finalise_s"]) < self.wanted["finalise_s"]
        if worker is not None and more and not self.driver.closing and not self._over:
            os.killpg(worker.process.pid, signal.SIGKILL)


def held(roots: list[int]) -> dict[str, Any]:
    """What these processes and all that they started hold together."""
    processes = [p for root in roots for p in (psutil.Process(root), *psutil.Process(root).children(recursive=True))]
    return {
        "pids": sorted(p.pid for p in processes),
        "rss_bytes": sum(p.memory_info().rss for p in processes),
        "files": sum(p.num_fds() for p in processes),
    }


def growth(cycles: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """From cycle WARM to the last one. Raises AssertionError where a process ended or another one came."""
    grown: dict[str, Any] = {"cycles": len(cycles)}
    for zone in cycles[0] if len(cycles) > WARM else ():
        warm, last = cycles[WARM - 1][zone], cycles[-1][zone]
        assert all(cycle[zone]["pids"] == warm["pids"] for cycle in cycles[WARM - 1 :]), f"{zone}: other processes"
        grown[zone] = {
            "processes": len(last["pids"]),
            "rss_bytes": last["rss_bytes"],
            **{f"{name}_grown": last[name] - warm[name] for name in ("rss_bytes", "files")},
        }
    return grown


async def measure(config: RunConfig, joins: int, borrows: int, seconds: float) -> dict[str, Any]:
    taker = Taker(joins, borrows, seconds, config.elastic.return_deadline_s)
    ready = await preflight(config)
    result = await train(config, ready, Console(stderr=True), watch=taker)
    if result.failure is not None:
        raise SystemExit(result.failure)
    taken = {row: taker.seconds[name] for row, name in ROWS.items()}
    return {
        "model": config.model.path,
        "median_s": {row: round(median(values), 3) for row, values in taken.items() if values},
        "seconds": {row: [round(value, 3) for value in values] for row, values in taken.items()},
        "steps": result.summary["steps"],
        "return_deadline_misses": result.summary["elastic"]["return_deadline_misses"],
        "growth": growth(taker.cycles),
        "rss_mb": {
            zone: [round(cycle[zone]["rss_bytes"] / 1e6, 1) for cycle in taker.cycles]
            for zone in ("trainer", "overlap")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--borrows", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=540.0)
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
        config = load_config(args.config, overrides)
        outcome = asyncio.run(measure(config, args.joins, args.borrows, args.seconds))
    command = "python -m bench.reconfiguration " + " ".join(sys.argv[1:])
    outcome = (
        provenance("bench.reconfiguration", "torch", "deepspeed", "transformers")
        | {"command": command, "load_average": os.getloadavg()[0]}
        | outcome
    )
    if args.out:
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome) if args.json else table(outcome))


def table(outcome: dict[str, Any]) -> str:
    lines = [
        f"{row:<14} {outcome['median_s'].get(row, float('nan')):>8.2f} s   (median of {len(values)})"
        for row, values in outcome["seconds"].items()
    ]
    grown = outcome["growth"]
    for zone, held_by in ((zone, grown[zone]) for zone in ("trainer", "overlap") if zone in grown):
        lines.append(
            f"{zone}: {held_by['processes']} processes, {held_by['rss_bytes'] / 1e6:.0f} MB; from cycle {WARM} to "
            f"{grown['cycles']} grown by {held_by['rss_bytes_grown'] / 1e6:.1f} MB, {held_by['files_grown']} files"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
