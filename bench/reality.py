"""The simulator against reality: one live run's profile predicts the makespans of runs of other sizes.

    python -m bench.reality [--steps 8] [--config examples/tiny.yaml] [--out bench/results/reality.json] [KEY=VALUE ...]

Live runs of (slots, trajectories of a batch) = (1, 8), (1, 16), (2, 8) and (2, 16), synchronous, so that the trainer
rests while trajectories are rolled out. Everything of a run is confined to as many cores as it has slots: a slot of a
cluster brings its own cores along, and a second one here must not cost the first one what it had. Environments wait
and need no core (`bench/waiting.py`): on one core with the engine they would slow it down, and each other. The first
run gives the profile (`profile.yaml`), the trajectories and the environments' times; the simulator and the
drain-aware model predict the others from these alone. A makespan is from the first request of a batch to its last
answer of an environment; a run's first batch, in which everything is cold, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.core.drain import DrainAware
from pearl.core.layout import Layout
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import Trajectory
from pearl.live.machine import inelastic, pipeline_settings
from pearl.live.preflight import preflight
from pearl.live.train import train
from pearl.profiles import read_profile
from pearl.sim.cluster import make_cluster
from pearl.sim.durations import Durations
from pearl.sim.replay import Replay
from pearl.sim.simulator import Models, Simulator
from pearl.sim.trainer import ModelShape, TrainerModel

RUNS = ((1, 8), (1, 16), (2, 8), (2, 16))
"""(slots, batch); the first one is the profile's."""
GROUP = 4
QUICK = Durations(sync_fixed_s=0.2, publish_fixed_s=0.1, trainer_start_s=0.0, environment_worker_start_s=0.0)
"""Of what is outside of a makespan."""


class Makespans:
    """Observer, live or simulated."""

    driver: Any = None

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        match entry:
            case ev.Generate():
                self._first.setdefault(entry.trajectory.group, now)
            case ev.EnvironmentStepped():
                self._last[entry.trajectory.group] = now
            case ev.TrainBatch():
                groups = [members[0].group for members in entry.groups]
                first = min(self._first[group] for group in groups)
                self.seconds.append(max(self._last[group] for group in groups) - first)

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None: ...
    def stepped(self, *_: Any) -> None: ...
    def notice(self, *_: Any) -> None: ...

    @property
    def mean(self) -> float:
        return fmean(self.seconds[1:])


def configure(arguments: argparse.Namespace, slots: int, batch: int, folder: Path) -> RunConfig:
    overrides = [
        f"run_dir={folder}", f"cluster.rollout_workers={slots}", f"pipeline.steps={arguments.steps}",
        f"pipeline.group_size={GROUP}", f"pipeline.groups_per_batch={batch // GROUP}", "pipeline.max_staleness_steps=0",
        "environment.family=bench.waiting:WaitingFamily", "environment.max_turns=3", "environment.tasks=64",
    ]  # fmt: skip
    return load_config(arguments.config, [*overrides, *arguments.overrides])


def live(config: RunConfig, cores: set[int]) -> Makespans:
    os.sched_setaffinity(0, cores)
    watch = Makespans()
    result = asyncio.run(_train(config, watch))
    if result.failure is not None:
        raise SystemExit(f"{config.run_dir}: {result.failure}")
    return watch


async def _train(config: RunConfig, watch: Makespans) -> Any:
    return await train(config, await preflight(config), Console(stderr=True, quiet=True), watch=watch)


def simulated(config: RunConfig, known: Path) -> Makespans:
    """The same configuration in virtual time, with what the run in `known` left behind."""
    watch = Makespans()
    machine = inelastic(pipeline_settings(config), TaskCursor(config.environment.tasks, config.seed))
    trainer = TrainerModel(ModelShape("live", 1.0, 1.0, 1, 1), 1, 1e30, fixed_s=1.0)
    cluster = make_cluster(training_gpus=0, reserved_gpus=config.cluster.rollout_workers, gpus_per_slot=1)
    models = Models(read_profile(known / "profile.yaml").engine, trainer, QUICK)
    Simulator(machine, cluster, models, Replay(known), seed=config.seed, observers=[watch]).run()
    return watch


def study(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    known = folder / "0"
    for number, (slots, batch) in enumerate(RUNS):
        config = configure(arguments, slots, batch, folder / str(number))
        seen = live(config, set(cores[:slots]))
        played = simulated(config, known)
        predicted_s = DrainAware().makespan(read_profile(known / "profile.yaml"), Layout(colocated=slots), batch)
        rows.append(
            {
                "slots": slots,
                "batch": batch,
                "live_s": round(seen.mean, 3),
                "live_batches_s": [round(s, 2) for s in seen.seconds],
                "simulated_s": round(played.mean, 3),
                "simulated_error": round(played.mean / seen.mean - 1.0, 3),
                "drain_aware_s": round(predicted_s, 3),
                "drain_aware_error": round(predicted_s / seen.mean - 1.0, 3),
                "load": round(os.getloadavg()[0], 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        rows = study(arguments, Path(folder))
    result = {
        "command": " ".join(["python -m bench.reality", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} shared cores ({platform.machine()}), no GPU",
        "runs": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
