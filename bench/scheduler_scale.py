"""What an event costs both schedulers with many workers and trajectories, and what one minimal-change plan costs.

    python -m bench.scheduler_scale [--workers N] [--trajectories T] [--pairs] [--json]

The machines are fed the answers at once: no actors, no clock. One optimizer step on half of the trajectories and the
next on the other half, three turns each; `--pairs` splits the workers into prefill and decode ones, two to three.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from typing import Any

from pearl.core import events as ev
from pearl.core.elastic import Elastic
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout, Role
from pearl.core.pipeline import Pipeline
from pearl.core.plan import minimal_change
from pearl.core.scheduler import Scheduler
from pearl.core.settings import ElasticSettings, PipelineSettings, Roles
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId

GROUP_SIZE, TURNS = 16, 3
SANDBOXES = 128
"""Environments that one environment worker holds."""


def settings(trajectories: int) -> PipelineSettings:
    return PipelineSettings(
        steps=2, groups_per_batch=trajectories // GROUP_SIZE // 2, group_size=GROUP_SIZE, max_staleness_steps=1,
        in_drawn_order=True, abort_on_update=True, max_response_tokens=8192, max_trajectory_tokens=32768,
        max_concurrent_trajectories=trajectories, requests_per_worker=64, sample_attempts=3, min_group_size=2,
        quarantine_after=3, worker_restarts=3,
    )  # fmt: skip


class Answers:
    """Every instruction is answered at once, as well as can be."""

    def __init__(self) -> None:
        self.turns: dict[TrajectoryId, int] = {}

    def to(self, i: Instruction) -> Event | None:
        match i:
            case ev.Generate():
                return ev.TurnGenerated(i.trajectory, i.worker, i.incarnation, 4, i.version, FinishReason.STOP)
            case ev.StepEnvironment():
                turn = self.turns[i.trajectory] = self.turns.get(i.trajectory, 0) + 1
                return ev.EnvironmentStepped(i.trajectory, 4, StopReason.SUBMITTED if turn == TURNS else None)
            case ev.OpenEnvironment():
                return ev.EnvironmentOpened(i.trajectory, 16)
            case ev.ScoreTrajectory():
                return ev.TrajectoryScored(i.trajectory, 1.0)
            case ev.StartEngine():
                return ev.EngineLoaded(i.worker, i.incarnation)
            case ev.SyncWeights():
                return ev.WeightsSynced(i.worker, i.incarnation, i.version)
            case ev.AbortRequests():
                return ev.AbortAcknowledged(i.worker, i.incarnation)
            case ev.StartEnvironmentWorker():
                return ev.EnvironmentWorkerReady(i.worker, i.incarnation, SANDBOXES)
            case ev.TrainBatch():
                return ev.BatchTrained(i.step)
            case ev.PublishSnapshot():
                return ev.SnapshotPublished(i.version)
        return None


def play(workers: int, trajectories: int, pairs: bool) -> dict[str, Any]:
    """CPU in `handle` per event, and of the kinds that come with every turn."""
    pipeline = Pipeline(settings(trajectories), TaskCursor(1000, 0))
    elastic = ElasticSettings(roles=Roles.FIXED if pairs else Roles.COLOCATED, fixed_ratio=(2, 3))
    machine = Scheduler(pipeline, Elastic(pipeline, elastic))
    names = tuple(f"rollout-{i}" for i in range(workers))
    environments = tuple(f"environment-{i}" for i in range(-(-trajectories // SANDBOXES)))
    queue: deque[Event] = deque([ev.RunStarted(names, environments), ev.TrainerReady(0)])
    answers, events, total_s = Answers(), 0, 0.0
    while queue:
        event = queue.popleft()
        began = time.process_time()
        out = machine.handle(event, 0.0)
        total_s += time.process_time() - began
        events += 1
        queue.extend(answer for i in out if (answer := answers.to(i)) is not None)
    assert pipeline.finished and pipeline.samples_unfinished == 0
    return {
        "workers": workers, "trajectories": trajectories, "pairs": pairs, "events": events,
        "us_per_event": round(1e6 * total_s / events, 1),
    }  # fmt: skip


def plan_ms(workers: int) -> float:
    """From all three roles to pairs and a few more workers, with every worker busy."""
    roles = list(Role)
    present = {f"w{i}": roles[i % 3] for i in range(workers)}
    more = workers // 20
    target = Layout(prefill=workers // 2, decode=workers - workers // 2 + more)
    cost = {name: (i % 7, i) for i, name in enumerate(present)}
    began = time.process_time()
    minimal_change(present, target, [f"j{i}" for i in range(more)], cost=cost)
    return round(1e3 * (time.process_time() - began), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=5000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    small = play(10, 640, args.pairs)
    large = play(args.workers, args.trajectories, args.pairs)
    result = {"small": small, "large": large, "plan_10000_workers_ms": plan_ms(10_000)}
    if args.json:
        print(json.dumps(result))
        return
    for row in (small, large):
        print(f"{row['workers']:6} workers {row['trajectories']:7} trajectories {row['us_per_event']:7.1f} us an event")
    print(f"one plan for 10,000 workers: {result['plan_10000_workers_ms']} ms")


if __name__ == "__main__":
    main()
