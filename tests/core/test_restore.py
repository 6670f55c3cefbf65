"""A run that is interrupted anywhere and restored from its records ends as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core import events as ev
from pearl.core.events import Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.restore import Replay
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.sim.search.case import ANY, Case, Fault, Kind
from pearl.sim.search.world import World
from tests.core.virtual import settings


def machine(changes: dict[str, Any]) -> Pipeline:
    return Pipeline(settings(checkpoints=True, **changes), TaskCursor(8, 0))


def interrupted(seed: int, fault_rate: float, crashes: list[int], changes: dict) -> World:
    """A run whose driver dies at so many events and instructions, each time restored from the records, to its end."""
    faults = tuple(Fault(Kind.DRIVER_DIES, ANY, crash, pick=crash % 2) for crash in crashes)
    world = World(Case(seed, settings(checkpoints=True, **changes), faults=faults, fault_rate=fault_rate))
    end = world.run()
    assert not end.failed, end.reason
    return world


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    fault_rate=st.sampled_from([0.0, 0.03, 0.1]),
    crashes=st.lists(st.integers(1, 800), min_size=1, max_size=4, unique=True),
    changes=st.fixed_dictionaries({"max_staleness_steps": st.integers(0, 2), "in_drawn_order": st.booleans()}),
)
def test_an_interrupted_run_loses_and_repeats_nothing(
    seed: int, fault_rate: float, crashes: list[int], changes: dict
) -> None:
    run = interrupted(seed, fault_rate, crashes, changes)
    records = run.records.list
    assert run.pipeline.samples_unfinished == 0
    final = Replay().read(records)
    outcomes = Counter(m.outcome for g in final.groups.values() for m in g.members)
    assert outcomes[None] == 0, "a sample is lost"
    assert outcomes == {o: n for o, n in run.pipeline.ended.items() if n}, "the journal and the machine disagree"
    assert sorted(final.trained) == [1, 2, 3, 4]
    numbers = [number for groups in final.trained.values() for number in groups]
    assert len(numbers) == len(set(numbers)), "a group was trained twice in the surviving line"
    opened = Counter(tuple(r["trajectory"]) for r in records if r["kind"] == "open")
    assert all(count == 1 for count in opened.values()), "two attempts under one name"
    cursor = TaskCursor(8, 0)
    if not final.quarantined:
        assert [g.task for g in final.groups.values()] == [cursor.draw() for _ in final.groups], "a task was skipped"
    versions = [r["version"] for r in records if r["kind"] == "published"]
    assert versions == sorted(set(versions)), "a weight version was used again"


def test_drawn_order_is_the_same_with_and_without_an_interruption() -> None:
    def batches(crashes: list[int]) -> dict[int, tuple[int, ...]]:
        return Replay().read(interrupted(0, 0.0, crashes, {}).records.list).trained

    assert batches([]) == batches([90]) == batches([55, 140])


def test_a_trajectory_goes_on_from_where_it_was() -> None:
    id = TrajectoryId(0, 0, 0)
    records: list[dict[str, Any]] = [
        {"kind": "published", "version": 0, "step": 0},
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        {"kind": "open", "trajectory": id},
        {"kind": "prompt", "trajectory": id, "token_ids": [0] * 10},
        {
            "kind": "turn",
            "trajectory": id,
            "token_ids": [1] * 4,
            "versions": [[0, 4]],
            "finish": "abort",
            "full": False,
        },
    ]
    for extra, (resume_at, room) in (
        ([], ("queued", 16)),
        ([{**records[4], "finish": FinishReason.STOP}], ("stepping", 12)),
        (
            [{**records[4], "finish": "stop"}, {"kind": "observation", "trajectory": id, "token_ids": [2] * 7}],
            ("queued", 20),
        ),
    ):
        pipeline = machine({})
        Replay().read([*records, *extra]).apply(pipeline, 0)
        (attempt,) = pipeline.suspended
        assert attempt.resume_at == resume_at
        assert pipeline.rollout.room(attempt) == room


@pytest.mark.parametrize("discarded_first", [True, False])
def test_a_score_that_crosses_the_loss_of_its_environment_counts_for_nothing(discarded_first: bool) -> None:
    """Whoever scores writes the record; whether the machine hears of the loss before or behind that is chance."""
    first, second = TrajectoryId(0, 0, 0), TrajectoryId(0, 0, 1)
    discard: dict[str, Any] = {"kind": "discard", "trajectory": first, "infrastructure": True}
    finished: dict[str, Any] = {"kind": "finished", "trajectory": {"id": first, "reward": 1.0}}
    records: list[dict[str, Any]] = [
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        *({"kind": "open", "trajectory": TrajectoryId(0, m, 0)} for m in (0, 1)),
        {"kind": "finished", "trajectory": {"id": TrajectoryId(0, 1, 0), "reward": 1.0}},
        *([discard, finished] if discarded_first else [finished, discard]),
        {"kind": "open", "trajectory": second},
    ]
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert pipeline.groups[0].members[0].finished is None and not pipeline.ready
    records.append({"kind": "finished", "trajectory": {"id": second, "reward": 0.5}})
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert pipeline.groups[0].members[0].finished == second and list(pipeline.ready) == [0]


def restored(*turns: tuple[int, FinishReason], **changes: Any) -> Pipeline:
    """A run that died with one trajectory, a prompt of 10 tokens and these turns of it."""
    id = TrajectoryId(0, 0, 0)
    records: list[dict[str, Any]] = [
        {"kind": "published", "version": 0, "step": 0},
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        {"kind": "open", "trajectory": id},
        {"kind": "prompt", "trajectory": id, "token_ids": [0] * 10},
    ]
    for tokens, finish in turns:
        turn = {"token_ids": [1] * tokens, "versions": [[0, tokens]] if tokens else [], "finish": finish, "full": False}
        records.append({"kind": "turn", "trajectory": id, **turn})
    pipeline = machine(changes)
    Replay().read(records).apply(pipeline, 0)
    return pipeline


@pytest.mark.parametrize("turns", [[(0, FinishReason.STOP)], [(4, FinishReason.ABORT), (0, FinishReason.FAILED)]])
def test_a_turn_that_was_about_to_be_discarded_is_not_stepped(turns: list) -> None:
    """Else an empty or a failed response would become a sample."""
    pipeline = restored(*turns)
    assert not pipeline.suspended and pipeline.waiting[0].sample == (0, 0)
    assert pipeline.waiting[0].own_failures == pipeline.waiting[0].attempts == 1


@pytest.mark.parametrize(
    ("finish", "next_step"), [(FinishReason.LENGTH, ev.ScoreTrajectory), (FinishReason.STOP, ev.StepEnvironment)]
)
def test_a_response_that_the_limit_cut_off_is_scored_as_without_the_interruption(
    finish: FinishReason, next_step: type
) -> None:
    pipeline = restored((20, finish), max_trajectory_tokens=30)
    pipeline.handle(ev.RunStarted(("w0",), ("e0",)), 0.0)
    pipeline.handle(ev.EnvironmentWorkerReady("e0", 1, 4), 0.0)
    out = pipeline.handle(ev.EnvironmentReopened(TrajectoryId(0, 0, 0)), 0.0)
    assert [type(i) for i in out if isinstance(i, ev.ScoreTrajectory | ev.StepEnvironment)] == [next_step]


def test_a_rollback_gives_trained_samples_back() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        *({"kind": "open", "trajectory": TrajectoryId(0, m, 0)} for m in (0, 1)),
        *({"kind": "finished", "trajectory": {"id": TrajectoryId(0, m, 0), "reward": 1.0}} for m in (0, 1)),
        {"kind": "trained", "step": 1, "groups": [0]},
        *({"kind": "end", "sample": (0, m), "outcome": Outcome.TRAINED, "reason": ""} for m in (0, 1)),
    ]
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert list(pipeline.ready) == [0] and pipeline.ended[Outcome.TRAINED] == 0
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 1)
    assert not pipeline.ready and pipeline.ended[Outcome.TRAINED] == 2
