"""Whole simulated runs, with the schedulers' own checks on, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pearl.cli import app
from pearl.core import events as ev
from pearl.core.policies import POLICIES
from pearl.core.trajectory import FinishReason
from pearl.errors import UserError
from pearl.sim.plot import check
from pearl.sim.scenario import Scenario, simulate
from pearl.sim.simulator import Simulator
from pearl.sim.timeline import Doing, Timeline

SMALL = Scenario(
    training_gpus=4, reserved_gpus=4, preemptible_gpus=6, trace="moderate-volatile", workload="tools", hours=0.2,
    batch=16, group_size=8, seed=5,
)  # fmt: skip
KEYS = {
    "wall_s", "simulated_s", "events", "steps", "throughput_tokens_s", "makespan_s_mean", "borrowed_gpu_s",
    "preemptible_gpu_s", "role_switches", "mode_switches", "trajectories_lost",
}  # fmt: skip


class Log:
    def __init__(self) -> None:
        self.entries: list[tuple[float, Any]] = []

    def saw(self, now: float, entry: Any) -> None:
        self.entries.append((now, entry))

    def of(self, kind: type) -> list[Any]:
        return [entry for _, entry in self.entries if isinstance(entry, kind)]


def play(scenario: Scenario, **options: Any) -> tuple[dict[str, Any], Simulator, Log]:
    log = Log()
    summary, simulator = simulate(scenario, [log], **options)
    return summary, simulator, log


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_plays_to_the_end_of_time_and_loses_nothing(policy: str) -> None:
    summary, _, log = play(replace(SMALL, policy=policy), validate=True)
    assert summary["ended"] == "time is over"
    assert summary["steps"] >= 3
    assert summary["trajectories_lost"] == 0
    assert summary["throughput_tokens_s"] > 0
    assert [event.step for event in log.of(ev.BatchTrained)] == list(range(1, summary["steps"] + 1))


@pytest.mark.parametrize("notice_s", [None, 30.0])
def test_generated_tokens_are_delivered_or_counted_as_lost(notice_s: float | None) -> None:
    scenario = replace(SMALL, policy="elastic", trace="moderate-volatile", notice_s=notice_s, hours=0.5)
    summary, simulator, log = play(scenario)
    totals = simulator.totals
    assert totals.tokens_generated == totals.tokens_delivered + totals.tokens_lost
    assert totals.tokens_delivered >= sum(event.tokens for event in log.of(ev.TurnGenerated))
    lost = [event for event in log.of(ev.TurnGenerated) if event.finish is FinishReason.LOST]
    assert summary["preemptions"] > 0
    if notice_s is None:
        assert lost and summary["tokens_lost"] > 0
    else:
        assert not lost and summary["tokens_lost"] == 0


def test_every_request_is_answered_once() -> None:
    _, simulator, log = play(replace(SMALL, policy="static-pd"))
    asked = [(g.trajectory, g.worker, g.incarnation) for g in log.of(ev.Generate)]
    answered = [(t.trajectory, t.worker, t.incarnation) for t in log.of(ev.TurnGenerated)]
    assert set(answered) <= set(asked)
    in_flight = {trajectory for w in simulator.workers.values() if w.engine for trajectory in w.engine.requests}
    assert len(asked) == len(answered) + len(in_flight)


def test_a_seed_gives_the_same_run_and_another_seed_another() -> None:
    runs = (play(replace(SMALL, seed=seed, hours=0.1)) for seed in (1, 1, 2))
    (_, _, first), (_, _, second), (_, _, other) = runs
    assert first.entries == second.entries
    assert first.entries != other.entries


def test_borrowed_gpus_and_preemptible_ones_are_counted() -> None:
    borrowing = play(replace(SMALL, policy="elastic-borrow"))[0]
    fixed = play(replace(SMALL, policy="colocated"))[0]
    assert borrowing["borrowed_gpu_s"] > 0 and borrowing["borrowings"] > 0 and borrowing["preemptible_gpu_s"] > 0
    assert fixed["borrowed_gpu_s"] == fixed["preemptible_gpu_s"] == 0
    assert borrowing["preemptible_gpu_s"] <= 6 * borrowing["simulated_s"]


def test_engines_of_training_gpus_start_before_the_trainer_and_the_first_borrowing_costs_what_the_others_do() -> None:
    entries = play(replace(SMALL, policy="elastic-borrow"))[2].entries
    kinds = [(type(entry), getattr(entry, "worker", "").partition("-")[0]) for _, entry in entries]
    ready = kinds.index((ev.TrainerReady, ""))
    assert (ev.EngineAsleep, "overlap") in kinds[:ready] and (ev.EngineAsleep, "overlap") not in kinds[ready:]
    assert (ev.ResumeEngine, "overlap") in kinds and (ev.StartEngine, "overlap") not in kinds
    lasted = [
        e.seconds
        for _, e in entries
        if isinstance(e, ev.RecordOperation) and (e.kind, e.phase) == ("borrow", "admitted")
    ]
    assert len(lasted) > 2 and lasted[0] < 2 * min(lasted)


def test_without_borrowing_no_engine_of_training_gpus_starts() -> None:
    entries = play(replace(SMALL, policy="elastic"))[2].entries
    assert not [entry for _, entry in entries if isinstance(entry, ev.EngineAsleep)]


def test_the_timeline_tells_of_borrowed_training_gpus() -> None:
    timeline = Timeline()
    simulate(replace(SMALL, policy="elastic-borrow"), [timeline])
    doing = {d for name, lane in timeline.lanes.items() if name.startswith("overlap") for _, d in lane.changes}
    assert {Doing.TRAINING, Doing.COLOCATED, Doing.STARTING, Doing.MOVING} <= doing
    for lane in timeline.lanes.values():
        spans = lane.spans(timeline.now)
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    arguments = ["simulate", "--workload", "tools", "--hours", "0.1", "--batch", "16", "--json", "--plot", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert summary.keys() >= KEYS
    assert summary["simulated_s"] == 360.0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "best"}, "no policy 'best'"),
        ({"workload": "chess"}, "no workload 'chess'"),
        ({"trace": "/no/such/file"}, "cannot read the trace"),
        ({"model": "gpt-7"}, "no profile of model"),
        ({"batch": 20}, "not made of groups of 8"),
        ({"hours": 0.0}, "nothing happens"),
        ({"training_gpus": 5}, "does not divide"),
    ],
)
def test_bad_input_is_named_before_anything_starts(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        simulate(replace(SMALL, **changes))


@pytest.mark.parametrize("name", ["no/folder/run.png", "run.txt"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_simulation(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot draw"):
        check(tmp_path / name)


def test_a_cluster_of_any_size_keeps_the_proportions() -> None:
    large = Scenario.of_size(10_000)
    assert (large.training_gpus, large.reserved_gpus, large.preemptible_gpus) == (5000, 1250, 3750)
    assert large.batch == 20_000
    assert Scenario.of_size(32) == Scenario()
    with pytest.raises(UserError, match="too few"):
        Scenario.of_size(8)
