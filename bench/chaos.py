"""SIGKILL parts of live runs at random moments; nothing may be lost, trained twice or left behind.

    python -m bench.chaos [--engine 3] [--worker 3] [--environment 0] [--trainer 0] [--driver 0] [--seed 0] [--json]
                          [--preemptible 0] [--notice 0] [--overlap 0] [--frozen 0]
                          [--config examples/tiny.yaml] [--out bench/results/chaos.json]

Engines, rollout workers, environment workers and trainer ranks are killed inside one run (`--config`), in an order and
after waits drawn from the seed; the next kill waits until the victim of the last one is back. Drivers (each with its
Dask scheduler, which lives in its process) are killed as whole processes and resumed. With a configuration that has
them (`examples/elastic.yaml`, whose trace is left out) preemptible slots are killed (`preemptible`), stopped (`frozen`)
or told to go, and offered again when they have gone (`notice`); overlap workers are killed (`overlap`; recovered when
the next step is trained). Checked: every sample ended once in the surviving line of checkpoints, no group was trained
twice, no version was used twice, no wait outlived its deadline, no return of training GPUs missed its own, each cause
was printed once, no process is left. Prints each recovery. `--out` adds this seed's outcome to a file, so that kills
accumulate over seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.core.restore import Replay
from pearl.live.driver import Driver
from pearl.live.journal import read_journal
from pearl.live.preflight import preflight
from pearl.live.train import train

KINDS = ("engine", "worker", "environment", "trainer", "preemptible", "notice", "overlap", "frozen")
PREFIXES = {
    "engine": "rollout-", "worker": "rollout-", "environment": "environment-", "trainer": "trainer-",
    "preemptible": "preemptible-", "notice": "preemptible-", "frozen": "preemptible-", "overlap": "overlap-",
}  # fmt: skip
SLOT_KINDS = ("preemptible", "notice", "frozen")
"""Their slot leaves, which is told in other words than the loss of a worker."""
OVERDUE_MARGIN_S = 2.0
"""A wait may outlive its deadline by this much: the event loop shares its core with what it waits for."""
LONGEST_WAIT_S = 3.0
"""A kill comes at most this long after the last victim is back."""


class Killer:
    """Observer that kills `victims`, one after the other."""

    def __init__(self, victims: list[str], seed: int) -> None:
        self.victims = list(victims)
        self.random = random.Random(seed)
        self.driver: Driver | None = None
        self.killed: tuple[str, str, float] | None = None
        """(what, slot, time) of the kill that is being recovered from."""
        self.recoveries: list[dict[str, Any]] = []
        self.waiting = False
        self.overdue: set[str] = set()

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        if self.driver is not None:
            self.overdue.update(self.driver.waits.overdue(OVERDUE_MARGIN_S))
        if self.killed is not None and self._is_back(entry, self.killed):
            what, slot, at = self.killed
            self.recoveries.append({"what": what, "slot": slot, "seconds": round(now - at, 1)})
            self.killed = None
            if what == "notice" and self.driver is not None:
                asyncio.get_running_loop().call_soon(self.driver.slots.adapter.offer, slot)
        if self.victims and self.killed is None and not self.waiting and isinstance(entry, ev.Generate):
            self.waiting = True
            asyncio.get_running_loop().call_later(self.random.uniform(0.05, LONGEST_WAIT_S), self._kill)

    def _is_back(self, entry: ev.Event | ev.Instruction, killed: tuple[str, str, float]) -> bool:
        what, slot, _ = killed
        match entry:
            case ev.WeightsSynced():
                return entry.worker == slot
            case ev.SlotLost():
                return what == "notice" and entry.worker == slot
            case ev.BatchTrained():
                return what == "overlap"
            case ev.EnvironmentWorkerReady():
                return entry.worker == slot
            case ev.TrainerReady():
                return what == "trainer"
        return False

    def _kill(self) -> None:
        assert self.driver is not None
        self.waiting = False
        what = self.victims[0]
        slots = [s for s, w in self.driver.cluster.workers.items() if s.startswith(PREFIXES[what]) and w.address]
        if what not in ("environment", "trainer", "overlap"):
            slots = [s for s in slots if s in self.driver.rollout.checksums and s in self.driver.rollout.refs]
        if not slots or self.driver.closing:
            return  # it is asked again at the next dispatch
        slot = self.random.choice(sorted(slots))
        worker = self.driver.cluster.workers[slot]
        pid = self.driver.rollout.info[slot]["pid"] if what == "engine" else worker.process.pid
        self.victims.pop(0)
        self.killed = (what, slot, time.monotonic())
        number = {"notice": signal.SIGTERM, "frozen": signal.SIGSTOP}.get(what, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def ended(self, *_: Any) -> None:
        pass

    def stepped(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


def check_journal(run_dir: Path, steps: int) -> dict[str, int]:
    """Counts of the surviving line. Raises AssertionError where a sample is lost or a group was trained twice."""
    records = read_journal(run_dir / "journal.bin")
    replay = Replay().read(records)
    members = [m for g in replay.groups.values() for m in g.members]
    assert all(m.ended for m in members), "a sample is lost"
    assert sorted(replay.trained) == list(range(1, steps + 1)), "a step is missing"
    numbers = [number for groups in replay.trained.values() for number in groups]
    assert len(numbers) == len(set(numbers)), "a group was trained twice"
    versions = [r["version"] for r in records if r["kind"] == "published"]
    assert versions == sorted(set(versions)), "a version was used twice"
    return {
        "samples": len(members),
        "rollbacks": sum(r["kind"] == "rollback" for r in records),
        "restarted_trajectories": sum(r["kind"] == "discard" for r in records),
    }


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def run_with_kills(config: RunConfig, victims: list[str], seed: int = 0) -> dict[str, Any]:
    """Run to the end under `victims`; what happened. Raises AssertionError where something was lost or left."""
    console = Console(stderr=True, record=True)
    killer = Killer(victims, seed)
    before = {process.pid for process in children()}
    ready = await preflight(config)
    began = time.monotonic()
    result = await train(config, ready, console, validate=True, watch=killer)
    assert result.failure is None, result.failure
    assert not killer.victims, f"the run ended before {killer.victims} were killed; give it more steps"
    assert result.summary["trajectories_lost"] == 0, "a sample is lost"
    left = [process for process in children() if process.pid not in before]
    assert not left, f"left behind: {left}"
    assert not killer.overdue, f"beyond its deadline: {sorted(killer.overdue)}"
    lines = console.export_text().splitlines()
    for words, count in (
        (" is lost: ", sum(victim not in SLOT_KINDS for victim in victims)),
        (" left: ", sum(victim in SLOT_KINDS for victim in victims)),
    ):
        causes = [line for line in lines if words in line]
        assert len(causes) == count, f"{count} kills, {len(causes)} causes printed: {causes}"
    misses = result.summary["elastic"]["return_deadline_misses"]
    assert not misses, f"{misses} returns missed their deadline"
    return {
        "kills": len(victims),
        "recoveries": killer.recoveries,
        "seconds": round(time.monotonic() - began, 1),
        **check_journal(Path(result.summary["run_dir"]), config.pipeline.steps),
        "summary": result.summary,
    }


def kill_drivers(config: Path, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Start a run, kill its driver `count` times at random moments, resume it each time, let it finish.

    A recovery lasts from the command to the end of the next optimizer step.
    """
    rng = random.Random(seed)
    steps = count + 3
    command = [sys.executable, "-m", "pearl.cli", "train", str(config), f"run_dir={folder / 'run'}"]
    command += [f"pipeline.steps={steps}", "checkpoint.every_steps=1", "--json"]
    recoveries: list[dict[str, Any]] = []
    for kill in range(count + 1):
        began = time.monotonic()
        resume = ["--resume"] if kill else []
        process = subprocess.Popen([*command, *resume], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        wait_for = kill + 1  # a step further each time, so that every life does something
        for line in process.stderr:
            if line.lstrip().startswith(f"{wait_for}/"):
                if resume:
                    recoveries.append({"what": "driver", "slot": "-", "seconds": round(time.monotonic() - began, 1)})
                break
            if "resuming" in line and kill < count and rng.random() < 0.3:
                break  # killed again before it has done a step
        if kill == count:
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, err
            break
        time.sleep(rng.uniform(0.0, LONGEST_WAIT_S))
        processes = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive, f"left behind by a killed driver: {alive}"
    summary = json.loads(out.splitlines()[-1])
    return {"kills": count, "recoveries": recoveries, **check_journal(folder / "run", steps), "summary": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, default in {"engine": 3, "worker": 3, **dict.fromkeys((*KINDS[2:], "driver"), 0)}.items():
        parser.add_argument(f"--{kind}", type=int, default=default, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    quiet_libraries()
    victims = [kind for kind in KINDS for _ in range(getattr(args, kind))]
    random.Random(args.seed).shuffle(victims)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        if victims:
            # Steps enough that the run outlasts its kills; a lost trainer repeats some.
            overrides = [
                f"pipeline.steps={8 * len(victims) + 6}",
                "checkpoint.every_steps=2",
                f"run_dir={folder}/inside",
            ]
            overrides += ["pipeline.worker_restarts=100", f"seed={args.seed}", "elastic.availability.file=null"]
            overrides += ["cluster.silent_loss_s=15"] if "frozen" in victims else []
            config = load_config(args.config, overrides)
            outcomes.append(asyncio.run(run_with_kills(config, victims, args.seed)))
        if args.driver:
            outcomes.append(kill_drivers(args.config, args.driver, args.seed, Path(folder)))
    for outcome in outcomes:
        outcome.pop("summary")
    if args.out:
        runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        runs.append({"seed": args.seed, "config": str(args.config), "outcomes": outcomes})
        args.out.write_text(json.dumps({"totals": totals(runs), "runs": runs}, indent=1) + "\n")
    if args.json:
        print(json.dumps({"seed": args.seed, "outcomes": outcomes}))
    else:
        for recovery in (recovery for outcome in outcomes for recovery in outcome["recoveries"]):
            print(f"{recovery['what']:>11} {recovery['slot']:<14} killed, back after {recovery['seconds']} s")
        print(f"{sum(o['kills'] for o in outcomes)} kills, nothing lost, nothing trained twice, nothing left behind")


def totals(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Recovery times per kind over all seeds (a driver that was killed again while it resumed has none)."""
    seconds: dict[str, list[float]] = {}
    for recovery in (r for run in runs for outcome in run["outcomes"] for r in outcome["recoveries"]):
        seconds.setdefault(recovery["what"], []).append(recovery["seconds"])
    return {
        what: {"recovered": len(s), "median_s": round(median(s), 1), "max_s": max(s)} for what, s in seconds.items()
    }


if __name__ == "__main__":
    main()
