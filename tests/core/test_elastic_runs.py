"""Whole elastic runs in virtual time: whatever comes and goes, the run ends and nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core import events as ev
from pearl.core.layout import Role
from pearl.core.settings import Borrowing, ElasticSettings, OnCancel, Roles
from pearl.sim.search.deadlines import TIMER_LATE_S, TYPICAL_AND_DEADLINE_S
from tests.core.test_pipeline import surviving_ends
from tests.core.virtual import play
from tests.core.virtual_elastic import play_elastic

POLICIES = st.builds(
    ElasticSettings,
    inter_scale=st.booleans(),
    intra_scale=st.sampled_from(list(Borrowing)),
    roles=st.sampled_from(list(Roles)),
    fixed_ratio=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    on_cancel=st.sampled_from(list(OnCancel)),
    join_window_s=st.sampled_from([0.0, 5.0]),
    preparation_prior_s=st.just(6.0),
    return_deadline_s=st.sampled_from([0.5, 5.0, 50.0]),
    borrow_prior_s=st.just(0.1),
    return_prior_s=st.just(0.1),
)
RUNS = st.fixed_dictionaries(
    {
        "elastic": POLICIES,
        "seed": st.integers(0, 2**32),
        "fault_rate": st.sampled_from([0.0, 0.02, 0.1]),
        "spot": st.integers(0, 4),
        "overlap": st.integers(0, 3),
        "reserved": st.integers(1, 3),
        "checkpoints": st.booleans(),
        "abort_on_update": st.booleans(),
        "in_drawn_order": st.booleans(),
    }
)


@hypothesis_settings(max_examples=100, deadline=None)
@given(RUNS)
def test_every_elastic_run_ends_and_no_sample_is_lost(run: dict) -> None:
    virtual = play_elastic(**run)
    assert not virtual.end.failed, virtual.end.reason
    assert virtual.pipeline.samples_unfinished == 0, "a sample is lost"
    ended = Counter(e.sample for e in surviving_ends(virtual.log))
    assert all(count == 1 for count in ended.values()), "a sample ended twice in one lineage"
    assert sum(ended.values()) == virtual.pipeline.samples_drawn


@hypothesis_settings(max_examples=60, deadline=None)
@given(RUNS)
def test_nothing_serves_before_its_weights_are_verified_nor_after_it_was_told_to_leave(run: dict) -> None:
    synced: dict[tuple[str, int], int] = {}
    roles: dict[tuple[str, int], Role] = {}
    busy: dict[tuple[str, int], str] = {}
    noticed: set[str] = set()
    for _, entry in play_elastic(**run).log:
        match entry:
            case ev.StartEngine() | ev.SwitchRole():
                roles[entry.worker, entry.incarnation] = entry.role
                busy[entry.worker, entry.incarnation] = type(entry).__name__
            case ev.AbortRequests() | ev.SyncWeights() | ev.ReleaseEngine() | ev.ResumeEngine() | ev.StopEngine():
                busy[entry.worker, entry.incarnation] = type(entry).__name__
                if isinstance(entry, ev.ReleaseEngine):
                    synced.pop((entry.worker, entry.incarnation), None)
            case ev.WeightsSynced():
                key = (entry.worker, entry.incarnation)
                if busy.get(key) == "SyncWeights":
                    assert entry.version >= synced.get(key, 0), "weights went backwards"
                    synced[key] = entry.version
                    del busy[key]
            case ev.RoleSwitched():
                if busy.get((entry.worker, entry.incarnation)) == "SwitchRole":
                    del busy[entry.worker, entry.incarnation]
            case ev.AbortAcknowledged():
                if busy.get((entry.worker, entry.incarnation)) == "AbortRequests":
                    del busy[entry.worker, entry.incarnation]
            case ev.SlotNotice():
                noticed.add(entry.worker)
            case ev.SlotJoined():
                noticed.discard(entry.slot.name)
            case ev.Generate():
                halves = [(entry.worker, entry.incarnation), (entry.prefill_worker, entry.prefill_incarnation)]
                for key in halves if entry.prefill_worker else halves[:1]:
                    assert key not in busy, f"dispatched to {key}, which is busy with {busy[key]}"
                    assert synced[key] == entry.version
                    assert key[0] not in noticed, "dispatched to a worker that is to leave"
                expected = (Role.DECODE, Role.PREFILL) if entry.prefill_worker else (Role.COLOCATED,)
                assert tuple(roles[key] for key in halves[: len(expected)]) == expected


@hypothesis_settings(max_examples=40, deadline=None)
@given(RUNS)
def test_members_of_an_expansion_serve_together_or_not_at_all(run: dict) -> None:
    waiting: dict[int, set[str]] = {}
    for _, entry in play_elastic(**run).log:
        if isinstance(entry, ev.RecordOperation) and entry.kind == "expand":
            if entry.phase in ("began", "prepared"):
                waiting[entry.number] = set(entry.workers)
            else:
                members = waiting.pop(entry.number, set())
                assert members <= set(entry.workers) or entry.phase == "declined"
        elif isinstance(entry, ev.Generate):
            assert not any(entry.worker in members for members in waiting.values()), "a member served alone"


@hypothesis_settings(max_examples=40, deadline=None)
@given(RUNS)
def test_lent_gpus_are_free_at_the_return_deadline(run: dict) -> None:
    """But for the time that the interpreter takes to fire a timer and to end an engine."""
    virtual = play_elastic(**{**run, "overlap": 2, "fault_rate": 0.0})
    limit_s = run["elastic"].return_deadline_s + TIMER_LATE_S + TYPICAL_AND_DEADLINE_S["StopEngine"][1]
    began, leaving = None, False
    for now, entry in virtual.log:
        match entry:
            case ev.RecordOperation(kind="return", phase="began"):
                began = None if leaving else now
            case ev.OffloadTrainer():
                leaving = True
            case ev.TrainerOffloaded():
                leaving = False
            case ev.ReloadTrainer() if began is not None:
                assert now - began <= limit_s + 1e-9


def test_the_runs_above_do_borrow_cancel_switch_force_and_release() -> None:
    """What the rules are tested on has to happen in the tests."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        elastic = ElasticSettings(
            inter_scale=True, intra_scale=Borrowing.ALWAYS, roles=list(Roles)[seed % 3], preparation_prior_s=6.0,
            return_deadline_s=[0.5, 50.0][seed % 2], on_cancel=list(OnCancel)[seed // 2 % 2],
        )  # fmt: skip
        virtual = play_elastic(elastic, seed, 0.05, spot=3, overlap=2, checkpoints=True)
        seen.update(type(entry).__name__ for _, entry in virtual.log)
        seen.update(f"{i.kind} {i.phase}" for i in virtual.of(ev.RecordOperation))
    for rare in (
        "SwitchRole", "ReleaseSlot", "ResumeEngine", "ReleaseEngine", "RestartTrainer", "PrefillDone",
        "expand cancelled", "expand declined", "expand admitted", "shrink done",
        "borrow admitted", "borrow cancelled", "return done", "return forced", "roles done",
    ):  # fmt: skip
        assert seen[rare] >= 3, f"{rare}: {seen[rare]}"


@pytest.mark.parametrize("seed", range(5))
def test_with_everything_off_both_schedulers_do_what_the_pipeline_does_alone(seed: int) -> None:
    alone = play(seed, 0.05)
    both = play_elastic(ElasticSettings(), seed, 0.05)
    assert [len(b.groups) for b in alone.of(ev.TrainBatch)] == [len(b.groups) for b in both.of(ev.TrainBatch)]
    assert not both.of(ev.SwitchRole) and not both.of(ev.ReleaseEngine) and not both.of(ev.OffloadTrainer)
