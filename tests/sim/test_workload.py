"""Made-up trajectories, and those of a run played again."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import msgpack
import pytest

from pearl.core.trajectory import (
    Segment,
    SegmentKind,
    StopReason,
    Trajectory,
    TrajectoryId,
    trajectory_to_wire,
)
from pearl.errors import UserError
from pearl.sim.replay import Replay
from pearl.sim.trainer import ModelShape, TrainerModel
from pearl.sim.workload import AgentWorkload, Plan


def values(plan: Plan) -> tuple:
    return list(plan.new), list(plan.response), list(plan.seconds), plan.reward, plan.open_s, plan.score_s


def test_a_plan_depends_on_seed_task_and_member_only() -> None:
    workload = AgentWorkload()
    plans = {(t, m): values(workload.plan(t, TrajectoryId(9, m, 0))) for t in range(3) for m in range(3)}
    again = {(t, m): values(AgentWorkload().plan(t, TrajectoryId(4, m, 2))) for t in (2, 0, 1) for m in (2, 1, 0)}
    assert plans == again
    assert len({str(plan) for plan in plans.values()}) == 9
    assert values(AgentWorkload(seed=1).plan(0, TrajectoryId(9, 0, 0))) != plans[0, 0]


def test_members_of_a_group_share_the_prompt_and_means_are_those_asked_for() -> None:
    workload = AgentWorkload()
    plans = [[workload.plan(t, TrajectoryId(t, m, 0)) for m in range(4)] for t in range(400)]
    assert all(len({plan.new[0] for plan in group}) == 1 for group in plans)
    flat = [plan for group in plans for plan in group]
    assert fmean(plan.turns for plan in flat) == pytest.approx(workload.turns.mean, rel=0.1)
    assert fmean(n for plan in flat for n in plan.response) == pytest.approx(workload.response_tokens.mean, rel=0.05)
    assert fmean(s for plan in flat for s in plan.seconds) == pytest.approx(workload.environment_s.mean, rel=0.1)
    assert fmean(plan.reward for plan in flat) == pytest.approx(workload.solved, abs=0.05)


def segment(kind: SegmentKind, tokens: int) -> Segment:
    ids = tuple(range(tokens))
    return Segment(kind, ids, (0.0,) * tokens, 0) if kind is SegmentKind.RESPONSE else Segment(kind, ids)


def test_a_run_is_replayed_turn_by_turn(tmp_path: Path) -> None:
    P, R, O = SegmentKind.PROMPT, SegmentKind.RESPONSE, SegmentKind.OBSERVATION  # noqa: E741
    parts = (segment(P, 50), segment(R, 7), segment(R, 4), segment(O, 9), segment(R, 5))
    trajectory = Trajectory(TrajectoryId(3, 1, 0), "task", parts, 2, StopReason.SUBMITTED, 0.75)
    records = [
        {"sample": [3, 0], "outcome": "failed", "reason": "", "trajectory": None},
        {"sample": [3, 1], "outcome": "trained", "reason": "", "trajectory": trajectory_to_wire(trajectory)},
    ]
    (tmp_path / "trajectories.msgpack").write_bytes(b"".join(msgpack.packb(record) for record in records))
    lines = [
        {"time": 10.0, "kind": "OpenEnvironment", "trajectory": "g3.1.0"},
        {"time": 12.5, "kind": "EnvironmentOpened", "trajectory": "g3.1.0"},
        {"time": 13.0, "kind": "StepEnvironment", "trajectory": "g3.1.0"},
        {"time": 14.0, "kind": "EnvironmentStepped", "trajectory": "g3.1.0", "seconds": 0.25},
        {"time": 15.0, "kind": "StepEnvironment", "trajectory": "g3.1.0"},
        {"time": 17.0, "kind": "EnvironmentStepped", "trajectory": "g3.1.0", "seconds": -1.0},
        {"time": 17.0, "kind": "ScoreTrajectory", "trajectory": "g3.1.0"},
        {"time": 17.5, "kind": "TrajectoryScored", "trajectory": "g3.1.0"},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"torn')
    replay = Replay(tmp_path)
    for group, member in ((0, 0), (5, 3)):
        plan = replay.plan(0, TrajectoryId(group, member, 0))
        assert values(plan) == ([50, 9], [11, 5], [0.25, 2.0], 0.75, 2.5, 0.5)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run_dir"):
        Replay(tmp_path)


def test_a_training_step_counts_the_operations_of_its_batch() -> None:
    model = TrainerModel(ModelShape("m", 2e9, 1e9, 10, 1000), gpus=4, flops_per_gpu=1e14, utilisation=0.5, fixed_s=3)
    forward = 2 * (2e9 * 1000) + 2 * (2 * 10 * 1000 * 1000**2)
    assert model.step_s([1000, 1000]) == pytest.approx(3 + 4 * forward / (4 * 1e14 * 0.5))
