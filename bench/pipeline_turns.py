"""Turns per second: the Pipeline machine alone on one core, and through the live driver with actors that do nothing.

    python -m bench.pipeline_turns [--turns N] [--json]

The machine alone is fed the answers at once (no actors, no clock). The live run is the real driver, Dask cluster and
actor calls; only the engine, the environment and the trainer are replaced by ones that answer at once. A turn is one
Generate and one StepEnvironment with their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from pearl.cluster.binding import bind
from pearl.config import RunConfig
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.pipeline import Pipeline
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, StopReason
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.machine import pipeline_settings
from pearl.live.run_directory import RunDirectory

TURNS_PER_TRAJECTORY = 10
GROUP_SIZE, GROUPS = 8, 16


def config(turns: int, workers: int, environments: int) -> RunConfig:
    batch = GROUP_SIZE * GROUPS * TURNS_PER_TRAJECTORY
    tree: dict[str, Any] = {
        "pipeline": {
            "steps": max(1, turns // batch), "groups_per_batch": GROUPS, "group_size": GROUP_SIZE,
            "max_trajectory_tokens": 1000, "max_concurrent_trajectories": 128,
        },
        "environment": {"workers": environments, "sandboxes_per_worker": 128, "max_turns": TURNS_PER_TRAJECTORY},
        "cluster": {"rollout_workers": workers},
        "checkpoint": {"keep_weights": False},
        "engine": {"device": "cpu", "max_running_requests": 64},
    }  # fmt: skip
    return make_config(tree, "bench")


def machine_alone(turns: int, workers: int) -> tuple[int, float]:
    """Turns played and seconds of CPU in `handle` and in making the answers."""
    run = config(turns, workers, 1)
    pipeline = Pipeline(pipeline_settings(run), TaskCursor(64, 0))
    queue: deque[ev.Event] = deque(
        [ev.RunStarted(tuple(f"rollout-{i}" for i in range(workers)), ("environment-0",)), ev.TrainerReady(0)]
    )
    taken: dict[Any, int] = {}
    played = 0
    began = time.process_time()
    while queue:
        for i in pipeline.handle(queue.popleft(), 0.0):
            match i:
                case ev.Generate():
                    answer: ev.Event = ev.TurnGenerated(
                        i.trajectory, i.worker, i.incarnation, 4, i.version, FinishReason.STOP
                    )
                    queue.append(answer)
                case ev.StepEnvironment():
                    played += 1
                    taken[i.trajectory] = turn = taken.get(i.trajectory, 0) + 1
                    stop = StopReason.SUBMITTED if turn == TURNS_PER_TRAJECTORY else None
                    queue.append(ev.EnvironmentStepped(i.trajectory, 4, stop))
                case ev.OpenEnvironment():
                    queue.append(ev.EnvironmentOpened(i.trajectory, 16))
                case ev.ScoreTrajectory():
                    queue.append(ev.TrajectoryScored(i.trajectory, 1.0))
                case ev.StartEngine():
                    queue.append(ev.EngineLoaded(i.worker, i.incarnation))
                case ev.SyncWeights():
                    queue.append(ev.WeightsSynced(i.worker, i.incarnation, i.version))
                case ev.AbortRequests():
                    queue.append(ev.AbortAcknowledged(i.worker, i.incarnation))
                case ev.StartEnvironmentWorker():
                    queue.append(ev.EnvironmentWorkerReady(i.worker, i.incarnation, 128))
                case ev.TrainBatch():
                    queue.append(ev.BatchTrained(i.step))
                case ev.PublishSnapshot():
                    queue.append(ev.SnapshotPublished(i.version))
    assert pipeline.finished and pipeline.samples_unfinished == 0
    return played, time.process_time() - began


class NoEngine:
    """Four tokens at once, whatever is asked."""

    async def start(self, *_: Any) -> dict[str, Any]:
        return {}

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        logprobs = [-1.0] * 4
        return {
            "token_ids": [1] * 4, "logprobs": logprobs, "versions": [[self.version, 4]], "finish": "stop", "reason": "",
        }  # fmt: skip

    async def sync(self, directory: str, version: int, timeout_s: float) -> dict[str, Any]:
        self.version = version
        return {"checksum": ""}

    async def abort(self, *_: Any) -> dict[str, Any]:
        return {}

    async def stop(self) -> None:
        pass


class NoEnvironment:
    """Ten turns of four tokens, reward 1."""

    async def start(self, *_: Any) -> dict[str, Any]:
        self.turns: dict[tuple[int, ...], int] = {}
        return {}

    async def open(self, trajectory: list[int], *_: Any) -> dict[str, Any]:
        return {"prompt_ids": [1] * 16, "task": "none"}

    async def advance(self, trajectory: list[int], *_: Any) -> dict[str, Any]:
        key = tuple(trajectory)
        self.turns[key] = turn = self.turns.get(key, 0) + 1
        stop = "submitted" if turn == TURNS_PER_TRAJECTORY else None
        return {"observation_ids": [2] * 4, "stop": stop, "state": ""}

    async def score(self, *_: Any) -> dict[str, Any]:
        return {"reward": 1.0}

    async def close(self, trajectory: list[int]) -> None:
        pass

    async def stop(self) -> None:
        pass


class NoTrainer:
    async def rendezvous(self) -> tuple[str, int]:
        return "", 0

    async def start(self, *_: Any) -> dict[str, Any]:
        return {}

    async def train(self, *_: Any) -> dict[str, float]:
        return {}

    async def export(self, *_: Any) -> dict[str, Any]:
        return {"checksum": ""}

    async def stop(self) -> None:
        pass


class Clock:
    """Observer: from the first dispatched turn to the end."""

    began = 0.0
    turns = 0

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        if isinstance(entry, ev.Generate):
            self.began = self.began or now
        elif isinstance(entry, ev.EnvironmentStepped):
            self.turns += 1
            self.last = now

    def stepped(self, *_: Any) -> None:
        pass

    def ended(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        print(text)


async def through_live(turns: int, workers: int, environments: int) -> tuple[int, float]:
    """Turns played and wall seconds of the real driver over actors that do nothing."""
    with tempfile.TemporaryDirectory() as folder:
        run = config(turns, workers, environments).model_copy(update={"run_dir": f"{folder}/run"})
        directory = RunDirectory.create(run)
        clock = Clock()
        classes = ActorClasses(NoEngine, NoEnvironment, NoTrainer)
        driver = Driver(run, Path(folder), 64, bind(run, 0), directory, [clock], classes=classes)
        try:
            end = await driver.run()
        finally:
            await driver.close(finish_writing=True)
            directory.close()
        assert not end.failed, end.reason
        return clock.turns, clock.last - clock.began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200_000, help="turns of the machine; the live run plays a tenth")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for workers in (2, 16):
        turns, seconds = machine_alone(args.turns, workers)
        rows.append({"what": f"machine alone, {workers} workers", "turns": turns, "turns_per_s": turns / seconds})
    turns, seconds = asyncio.run(through_live(args.turns // 10, 2, 1))
    rows.append({"what": "live, 2 engine actors that do nothing", "turns": turns, "turns_per_s": turns / seconds})
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['what']:<40} {row['turns']:>8} turns  {row['turns_per_s']:>9,.0f} turns/s")


if __name__ == "__main__":
    main()
