"""SIGKILL parts of live runs at random moments; nothing may be lost, trained twice or left behind.

    python -m bench.chaos [--engine 0] [--worker 0] [--environment 0] [--trainer 0] [--driver 0] [--seed 0] [--json]
                          [--preemptible 0] [--crash 0] [--frozen 0] [--cut 0] [--notice 0] [--overlap 0] [--hung 0]
                          [--together 1] [--seconds S] [--restless]
                          [--config examples/tiny.yaml] [--out bench/results/chaos.json] [KEY=VALUE ...]

Parts are killed inside one run (`--config`) in an order and after waits drawn from the seed (`bench/killer.py` lists
the kinds); at most `--together` are down at the same time. With `--restless` a slot may also be killed while it starts.
The second line of kinds needs a configuration that has such slots (`examples/elastic.yaml`, whose trace is left out).
Drivers (each with its Dask scheduler, which lives in its process) are killed as whole processes and resumed. Checked:
every sample ended once in the surviving line of checkpoints, no group was trained twice, no version was used twice, no
wait outlived its deadline, no return of training GPUs missed its own, each cause was printed once, no process is left.
Prints each recovery. `--out` adds this seed's outcome to a file, so that kills accumulate over seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from bench.killer import KINDS, SLOT_KINDS, TIME_IS_OVER, Killer
from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core.restore import Replay
from pearl.live.journal import read_journal
from pearl.live.preflight import preflight
from pearl.live.train import train

LONGEST_WAIT_S = 3.0
"""A driver is killed at most this long after it has done something."""
MANY = 100_000
"""Steps: the run ends when its kills are over."""


def check_journal(run_dir: Path, steps: int, unfinished: int = 0) -> dict[str, int]:
    """Counts of the surviving line. Raises AssertionError where a sample is lost or a group was trained twice.

    `unfinished`: samples that the run says it had still to train when it was stopped.
    """
    records = read_journal(run_dir / "journal.bin")
    replay = Replay().read(records)
    members = [m for g in replay.groups.values() for m in g.members]
    assert sum(not m.ended for m in members) == unfinished, "a sample is lost"
    trained = [m for groups in replay.trained.values() for number in groups for m in replay.groups[number].members]
    assert all(m.ended for m in trained), "a sample of a trained group is open"
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


async def run_with_kills(
    config: RunConfig,
    victims: list[str],
    seed: int = 0,
    together: int = 1,
    seconds: float = math.inf,
    restless: bool = False,
) -> dict[str, Any]:
    """Run until the kills are over (see `Killer`); what happened. Raises AssertionError where something was lost, left
    behind or late."""
    console = Console(stderr=True, record=True)
    killer = Killer(victims, seed, together, seconds, restless)
    before = {process.pid for process in children()}
    ready = await preflight(config)
    began = time.monotonic()
    result = await train(config, ready, console, validate=True, watch=killer)
    assert result.failure is None, result.failure
    assert not killer.unrecovered, f"not replaced: {killer.unrecovered}"
    steps, struck = result.summary["steps"], [kill.what for kill in killer.kills]
    replaced = [recovery["what"] for recovery in killer.recoveries]
    assert not killer.victims, f"the run ended before {killer.victims} were killed; give it more steps"
    ends = (TIME_IS_OVER,) if killer.stopped else (None, f"{steps} steps done")
    assert result.summary["stopped"] in ends, result.summary["stopped"]
    left = [process for process in children() if process.pid not in before]
    assert not left, f"left behind: {left}"
    assert not killer.overdue, f"beyond its deadline: {sorted(killer.overdue)}"
    lines = console.export_text().splitlines()
    for words, told in (
        (" is lost: ", lambda what: what not in SLOT_KINDS),
        (" left: ", lambda what: what in SLOT_KINDS),
    ):
        # What hangs is lost at a deadline of its own, or ended at that of the return, which is told as an operation.
        fewest = sum(told(what) and what != "hung" for what in replaced)
        most = sum(map(told, struck))
        causes = [line for line in lines if words in line]
        assert fewest <= len(causes) <= most, f"{most} kills, {len(causes)} causes printed: {causes}"
    misses = result.summary["elastic"]["return_deadline_misses"]
    assert not misses, f"{misses} returns missed their deadline"
    return {
        "kills": len(struck),
        "struck": Counter(struck),
        "recoveries": killer.recoveries,
        "seconds": round(time.monotonic() - began, 1),
        "returns": result.summary["elastic"]["returns"],
        "role_switches": result.summary["elastic"]["role_switches"],
        **check_journal(Path(result.summary["run_dir"]), steps, result.summary["trajectories_unfinished"]),
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
    for kind in (*KINDS, "driver"):
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="parts that may be down at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no kill comes later; the rest is left alone")
    parser.add_argument("--restless", action="store_true", help="slots are killed again before they serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `pearl train`")
    args = parser.parse_args()
    quiet_libraries()
    victims = [kind for kind in KINDS for _ in range(getattr(args, kind))]
    random.Random(args.seed).shuffle(victims)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        if victims:
            overrides = [
                f"pipeline.steps={MANY}",
                "checkpoint.every_steps=2",
                f"run_dir={folder}/inside",
            ]
            overrides += ["pipeline.worker_restarts=100", f"seed={args.seed}", "elastic.availability.file=null"]
            overrides += ["cluster.silent_loss_s=15"] if "frozen" in victims else []
            overrides += ["deadlines.generate_s=40"] if "hung" in victims else []
            config = load_config(args.config, [*overrides, *args.overrides])
            run = run_with_kills(config, victims, args.seed, args.together, args.seconds, args.restless)
            outcomes.append(asyncio.run(run))
        if args.driver:
            outcomes.append(kill_drivers(args.config, args.driver, args.seed, Path(folder)))
    for outcome in outcomes:
        outcome.pop("summary")
    if args.out:
        runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        runs.append({"seed": args.seed, "config": str(args.config), "options": sys.argv[1:], "outcomes": outcomes})
        args.out.write_text(json.dumps({"totals": totals(runs), "runs": runs}, indent=1) + "\n")
    if args.json:
        print(json.dumps({"seed": args.seed, "outcomes": outcomes}))
    else:
        for recovery in (recovery for outcome in outcomes for recovery in outcome["recoveries"]):
            back = "killed again" if recovery["seconds"] is None else f"back after {recovery['seconds']} s"
            print(f"{recovery['what']:>11} {recovery['slot']:<14} killed, {back}")
        print(f"{sum(o['kills'] for o in outcomes)} kills, nothing lost, nothing trained twice, nothing left behind")


def totals(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Recovery times per kind over all seeds. They have none whose successor was killed before it served (among them
    drivers that were killed again while they resumed)."""
    seconds: dict[str, list[float | None]] = {}
    for recovery in (r for run in runs for outcome in run["outcomes"] for r in outcome["recoveries"]):
        seconds.setdefault(recovery["what"], []).append(recovery["seconds"])
    result: dict[str, dict[str, float]] = {}
    for what, all_ in seconds.items():
        result[what] = {"recovered": len(all_)}
        if known := [s for s in all_ if s is not None]:
            result[what] |= {"timed": len(known), "median_s": round(median(known), 1), "max_s": max(known)}
    return result


if __name__ == "__main__":
    main()
