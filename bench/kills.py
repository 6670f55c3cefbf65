"""SIGKILL engines and rollout workers (their Dask processes) of a live run; nothing may be lost.

    python -m bench.kills [--engines 3] [--workers 3] [--config examples/tiny.yaml] [--json]

A kill falls while its victim generates, the next one after the victim serves again or another worker does. The run must
end by itself with every sample ended once, and leave no process behind. Prints the time from each kill to the slot's
next dispatch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.live.driver import Driver
from pearl.live.preflight import preflight
from pearl.live.train import train


class Killer:
    """Observer that kills: `victims` lists "engine" or "worker", one per dispatch that it waits for."""

    def __init__(self, victims: list[str]) -> None:
        self.victims = list(victims)
        self.driver: Driver | None = None
        self.dispatched: dict[str, int] = {}
        self.killed: dict[str, tuple[int, float, str]] = {}
        """By slot: (incarnation, time, what) of a kill that the slot has not recovered from."""
        self.recoveries: list[dict[str, Any]] = []
        self.trained: dict[str, int] = {}
        self.ends: dict[str, int] = {}

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        if isinstance(entry, ev.Generate):
            if (last := self.killed.get(entry.worker)) and entry.incarnation > last[0]:
                del self.killed[entry.worker]
                self.recoveries.append({"what": last[2], "slot": entry.worker, "seconds": round(now - last[1], 1)})
            if self.victims and entry.worker not in self.killed:
                what = self.victims.pop(0)
                self.killed[entry.worker] = (entry.incarnation, now, what)
                asyncio.get_running_loop().call_later(0.1, self._kill, what, entry.worker)
        elif isinstance(entry, ev.TrainBatch):
            for trajectory in (t for group in entry.groups for t in group):
                self.trained[str(trajectory.sample)] = self.trained.get(str(trajectory.sample), 0) + 1

    def _kill(self, what: str, slot: str) -> None:
        assert self.driver is not None
        worker = self.driver.cluster.workers.get(slot)
        pid = self.driver.rollout.info[slot]["pid"] if what == "engine" else worker and worker.process.pid
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)

    def ended(self, now: float, end: ev.EndSample, trajectory: object) -> None:
        self.ends[str(end.sample)] = self.ends.get(str(end.sample), 0) + 1

    def stepped(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def run_with_kills(config: RunConfig, victims: list[str], console: Console) -> dict[str, Any]:
    """Run to the end under `victims`; what happened. Raises AssertionError where something was lost or left."""
    killer = Killer(victims)
    before = {process.pid for process in children()}
    ready = await preflight(config)
    began = time.monotonic()
    result = await train(config, ready, console, validate=True, watch=killer)
    assert result.failure is None, result.failure
    assert not killer.victims, f"the run ended before {killer.victims} were killed; give it more steps"
    assert result.summary["trajectories_lost"] == 0, "a sample is lost"
    assert set(killer.ends.values()) == {1}, "a sample ended twice"
    assert set(killer.trained.values()) == {1}, "a sample was trained twice"
    left = [process for process in children() if process.pid not in before]
    assert not left, f"left behind: {left}"
    return {
        "kills": len(victims),
        "recoveries": killer.recoveries,
        "seconds": round(time.monotonic() - began, 1),
        "summary": result.summary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    config = load_config(args.config, [f"pipeline.steps={2 * (args.engines + args.workers)}"])
    victims = ["engine", "worker"] * max(args.engines, args.workers)
    for what, count in (("engine", args.engines), ("worker", args.workers)):
        while victims.count(what) > count:
            victims.remove(what)
    outcome = asyncio.run(run_with_kills(config, victims, Console(stderr=True)))
    if args.json:
        print(json.dumps(outcome))
    else:
        for recovery in outcome["recoveries"]:
            print(f"{recovery['what']:>7} of {recovery['slot']} killed, serving again after {recovery['seconds']} s")
        print(f"{outcome['kills']} kills in {outcome['seconds']} s, nothing lost")


if __name__ == "__main__":
    main()
