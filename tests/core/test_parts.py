"""Routing, staleness, the task cursor, the worker table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.routing import AFFINITY_SLACK, choose_worker
from pearl.core.staleness import groups_admissible, is_stale
from pearl.core.state import LEGAL, Activity, IllegalTransition, WorkerSlot
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import (
    Segment,
    SegmentKind,
    StopReason,
    Trajectory,
    TrajectoryId,
    trajectory_from_wire,
    trajectory_to_wire,
)


def slots(*loads: int) -> list[WorkerSlot]:
    return [WorkerSlot(f"w{i}", in_flight={TrajectoryId(i, j, 0) for j in range(load)}) for i, load in enumerate(loads)]


def test_the_least_loaded_worker_serves_a_new_trajectory() -> None:
    assert choose_worker(slots(3, 1, 2), 8, None).name == "w1"  # type: ignore[union-attr]


def test_the_worker_with_the_prefix_is_kept_within_the_slack() -> None:
    assert choose_worker(slots(AFFINITY_SLACK, 0), 8, "w0").name == "w0"  # type: ignore[union-attr]
    assert choose_worker(slots(AFFINITY_SLACK + 1, 0), 8, "w0").name == "w1"  # type: ignore[union-attr]


@given(st.lists(st.integers(0, 4), max_size=6), st.sampled_from([None, "w0", "w3"]))
def test_routing_never_overloads_and_never_refuses_while_there_is_room(loads: list[int], last: str | None) -> None:
    chosen = choose_worker(slots(*loads), 4, last)
    assert (chosen is None) == all(load >= 4 for load in loads)
    assert chosen is None or len(chosen.in_flight) < 4


@given(st.integers(0, 20), st.integers(0, 5), st.integers(1, 8), st.integers(1, 20))
def test_admission_never_lets_a_group_in_that_would_be_stale_in_its_batch(
    v: int, bound: int, size: int, n: int
) -> None:
    allowed = groups_admissible(v, bound, size, n)
    assert allowed <= n * size
    if allowed:
        step_of_last_group = (allowed - 1) // size + 1
        assert not is_stale(v, step_of_last_group, bound)


def test_the_task_order_is_fixed_by_the_seed_and_covers_each_epoch() -> None:
    first, again, other = (TaskCursor(10, seed) for seed in (1, 1, 2))
    order = [first.draw() for _ in range(30)]
    assert order == [again.draw() for _ in range(30)]
    assert order != [other.draw() for _ in range(30)]
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))  # type: ignore[type-var]


def test_a_cursor_goes_on_from_its_position() -> None:
    whole = TaskCursor(7, 3)
    order = [whole.draw() for _ in range(20)]
    later = TaskCursor(7, 3)
    later.drawn = 12
    assert [later.draw() for _ in range(8)] == order[12:]


def test_quarantined_tasks_are_not_drawn() -> None:
    cursor = TaskCursor(3, 0)
    cursor.quarantined |= {0, 2}
    assert {cursor.draw() for _ in range(6)} == {1}
    cursor.quarantined.add(1)
    assert cursor.draw() is None


@given(st.lists(st.sampled_from(list(Activity)), max_size=8))
def test_only_a_synced_worker_becomes_active(path: list[Activity]) -> None:
    slot = WorkerSlot("w")
    for activity in path:
        before = slot.activity
        if activity in LEGAL[before]:
            slot.to(activity, 0.0)
            assert activity is not Activity.ACTIVE or before is Activity.SYNCED
        else:
            with pytest.raises(IllegalTransition):
                slot.to(activity, 0.0)
            assert slot.activity is before


def test_a_worker_refuses_older_weights() -> None:
    slot = WorkerSlot("w", activity=Activity.LOADED, version=4)
    with pytest.raises(IllegalTransition, match="backwards"):
        slot.synced(3, 0.0)


def test_a_response_segment_needs_its_log_probs_and_version() -> None:
    with pytest.raises(ValueError, match="log-prob"):
        Segment(SegmentKind.RESPONSE, (1, 2), (0.0,), 3)
    with pytest.raises(ValueError, match="neither"):
        Segment(SegmentKind.PROMPT, (1,), None, 3)


def test_a_trajectory_survives_the_wire() -> None:
    trajectory = Trajectory(
        TrajectoryId(1, 2, 0),
        "a-task",
        (Segment(SegmentKind.PROMPT, (1, 2)), Segment(SegmentKind.RESPONSE, (3,), (-0.5,), 4)),
        1,
        StopReason.SUBMITTED,
        0.25,
    )
    assert trajectory_from_wire(trajectory_to_wire(trajectory)) == trajectory
    assert trajectory.token_ids == [1, 2, 3]
    assert (trajectory.generated_tokens, trajectory.versions) == (1, (4,))
