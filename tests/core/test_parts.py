"""Routing, staleness, the task cursor, the worker table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.gpus import IllegalOwner, Owner, TrainingGpus
from pearl.core.layout import Role
from pearl.core.routing import AFFINITY_SLACK, LoadIndex, Prefix, Router
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


def router(*loads: int, capacity: int = 8, kv_tokens: int = 0, roles: tuple[Role, ...] = ()) -> Router:
    """Serving workers w0, w1 ... with so many requests of ten tokens each."""
    made = Router(capacity, kv_tokens)
    for i, load in enumerate(loads):
        role = roles[i] if roles else Role.COLOCATED
        requests = {TrajectoryId(i, j, 0): 10 for j in range(load)}
        worker = WorkerSlot(f"w{i}", activity=Activity.ACTIVE, version=0, role=role)
        if role is Role.PREFILL:
            worker.prefilling = requests
        else:
            worker.in_flight, worker.kv_tokens = requests, 10 * load
        made.join(worker)
    return made


def chosen(made: Router, *prefixes: Prefix | None, tokens: int = 10) -> tuple[str, str] | None:
    choice = made.choose(tokens, *prefixes)
    return choice and (choice.worker.name, choice.prefill.name if choice.prefill else "")


def test_the_least_loaded_worker_serves_a_new_trajectory() -> None:
    assert chosen(router(3, 1, 2)) == ("w1", "")


def test_the_worker_with_the_prefix_is_kept_within_the_slack() -> None:
    assert chosen(router(AFFINITY_SLACK, 0), Prefix("w0", 0)) == ("w0", "")
    assert chosen(router(AFFINITY_SLACK + 1, 0), Prefix("w0", 0)) == ("w1", "")


def test_a_prefix_in_a_cache_that_is_gone_counts_for_nothing() -> None:
    made = router(AFFINITY_SLACK, 0)
    made.workers["w0"].flushed()
    assert chosen(made, Prefix("w0", 0)) == ("w1", "")


def test_a_pair_is_the_least_loaded_of_both_halves_unless_a_half_holds_the_prefix() -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    assert chosen(router(2, 1, 1, 0, roles=roles)) == ("w3", "w1")
    assert chosen(router(2, 1, 1, 0, roles=roles), Prefix("w2", 0), Prefix("w0", 0)) == ("w2", "w0")


def test_half_of_a_pair_serves_nothing() -> None:
    assert chosen(router(0, 0, roles=(Role.DECODE, Role.DECODE))) is None
    assert chosen(router(0, 0, roles=(Role.PREFILL, Role.PREFILL))) is None


def test_in_a_mixed_layout_both_kinds_serve() -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
    assert chosen(router(0, 1, 2, roles=roles)) == ("w1", "w0")
    assert chosen(router(0, 2, 1, roles=roles)) == ("w2", "")


def test_a_worker_without_kv_room_is_passed_over_and_an_idle_one_takes_anything() -> None:
    assert chosen(router(1, 2, kv_tokens=25)) == ("w0", "")
    assert chosen(router(1, 2, kv_tokens=15)) is None
    assert chosen(router(1, 0, kv_tokens=15), tokens=1000) == ("w1", "")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(Role))), max_size=6),
    st.sampled_from([None, Prefix("w0", 0), Prefix("w3", 0)]),
)
def test_routing_never_overloads_and_never_refuses_while_there_is_room(
    workers: list[tuple[int, Role]], prefix: Prefix | None
) -> None:
    made = router(*(load for load, _ in workers), capacity=4, roles=tuple(role for _, role in workers))
    choice = made.choose(10, prefix)
    room = {role for load, role in workers if load < 4}
    pairs = Role.PREFILL in {role for _, role in workers} and Role.DECODE in room
    assert (choice is not None) == (Role.COLOCATED in room or pairs)
    if choice is not None:
        assert len(choice.worker.in_flight) < 4
        assert (choice.prefill is not None) == (choice.worker.role is Role.DECODE)


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 6))), max_size=40))
def test_the_load_index_always_knows_the_least(changes: list[tuple[int, int | None]]) -> None:
    index, loads = LoadIndex(), dict[str, int]()
    for number, load in changes:
        name = f"w{number}"
        if load is None:
            index.drop(name)
            loads.pop(name, None)
        else:
            index.put(name, load)
            loads[name] = load
        least = index.least()
        assert (least is None) == (not loads) and index.load == loads
        assert least is None or loads[least] == min(loads.values())
        assert [loads[n] for n in index] == sorted(loads.values())


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


def test_a_sleeping_worker_has_forgotten_its_weights() -> None:
    slot = WorkerSlot("w", activity=Activity.SYNCED, version=3)
    slot.forget()
    slot.to(Activity.INACTIVE, 0.0)
    slot.to(Activity.LOADED, 1.0, "resumed")
    assert slot.version is None
    with pytest.raises(IllegalTransition):
        slot.to(Activity.ACTIVE, 2.0)


@given(st.lists(st.tuples(st.sampled_from(["leave", "left", "take", "give", "return", "returned"]), st.booleans())))
def test_gpus_never_pass_between_trainer_and_worker_directly(moves: list[tuple[str, bool]]) -> None:
    gpus = TrainingGpus()
    for slot in ("o0", "o1"):
        gpus.add(slot)
    assert gpus.trainer_home
    for move, second in moves:
        slot = "o1" if second else "o0"
        before = dict(gpus.owner)
        calls = {
            "leave": lambda s: gpus.trainer_leaves((s,)),
            "left": lambda s: gpus.trainer_left((s,)),
            "take": gpus.worker_takes,
            "give": gpus.worker_left,
            "return": lambda s: gpus.trainer_returns((s,)),
            "returned": lambda s: gpus.trainer_returned((s,)),
        }
        try:
            calls[move](slot)
        except IllegalOwner:
            assert gpus.owner == before
        for name, owner in gpus.owner.items():
            assert {before[name], owner} != {Owner.TRAINER, Owner.WORKER}
            assert not gpus.trainer_home or owner is Owner.TRAINER


def test_a_trainer_does_not_restart_while_a_worker_owns_its_gpus() -> None:
    gpus = TrainingGpus()
    gpus.add("o0")
    gpus.trainer_leaves(("o0",))
    gpus.trainer_left(("o0",))
    gpus.worker_takes("o0")
    gpus.trainer_lost()
    with pytest.raises(IllegalOwner):
        gpus.trainer_restarts()
    gpus.worker_left("o0")
    gpus.trainer_restarts()
    assert gpus.trainer_home
