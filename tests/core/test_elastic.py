"""The Elastic Scheduler's rules, event by event."""

from __future__ import annotations

import pytest

from pearl.core import events as ev
from pearl.core.elastic import Elastic
from pearl.core.layout import Layout, Role
from pearl.core.pipeline import Pipeline
from pearl.core.settings import ElasticSettings, OnCancel, Roles
from pearl.core.state import Activity
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, TrajectoryId
from tests.core.elastic_bench import FIRST, SECOND, Bench, Says, kinds
from tests.core.virtual import settings
from tests.core.virtual_elastic import slot

PAIR = {2: Layout(prefill=1, decode=1)}


# --- expand ---------------------------------------------------------------------------------------


def test_joiners_start_in_the_background_while_others_serve() -> None:
    bench = Bench()
    assert {i.worker for i in kinds(bench.join("s0", "s1"), ev.StartEngine)} == {"s0", "s1"}
    assert bench.roles().keys() == {"w0", "w1"}
    assert bench.opened(FIRST).worker in ("w0", "w1")


def test_weights_are_fetched_only_when_every_joiner_is_loaded() -> None:
    bench = Bench()
    bench.join("s0", "s1")
    assert not kinds(bench.answer_all(ev.StartEngine, "s0"), ev.SyncWeights)
    syncs = kinds(bench.answer_all(ev.StartEngine, "s1"), ev.SyncWeights)
    assert {(i.worker, i.version) for i in syncs} == {("s0", 0), ("s1", 0)}
    assert all(set(i.peers) <= {"w0", "w1"} and i.peers for i in syncs)


def test_the_whole_group_is_admitted_at_once() -> None:
    bench = Bench()
    bench.join("s0", "s1")
    bench.answer_all(ev.StartEngine, "s0", "s1")
    bench.answer_all(ev.SyncWeights, "s0")
    assert bench.activity("s0") == [Activity.SYNCED] and "s0" not in bench.roles()
    bench.answer_all(ev.SyncWeights, "s1")
    assert bench.activity("s0", "s1") == [Activity.ACTIVE] * 2
    assert [phase for phase, _, _ in bench.operations("expand")] == ["began", "prepared", "admitted"]


def test_a_group_that_is_overtaken_by_new_weights_fetches_those_before_it_serves() -> None:
    bench = Bench()
    bench.join("s0", "s1")
    bench.answer_all(ev.StartEngine, "s0", "s1")
    bench.answer_all(ev.SyncWeights, "s0")
    bench.finish(FIRST)
    bench.finish(SECOND)
    bench.send(ev.BatchTrained(1))
    bench.send(ev.SnapshotPublished(1))
    bench.answer_all(ev.SyncWeights, "s1")  # version 0
    assert "s1" not in bench.roles()
    bench.answer_all(ev.SyncWeights, "s0", "s1")
    assert {"s0", "s1"} <= bench.roles().keys()
    assert bench.fleet.workers["s0"].version == bench.fleet.workers["s1"].version == 1


def test_roles_are_decided_when_all_are_loaded_with_the_members_of_then() -> None:
    bench = Bench(engine=Says({3: Layout(prefill=1, decode=2)}))
    bench.join("s0", "s1")
    bench.send(ev.SlotLost("w1", 1, "died"))
    bench.answer_all(ev.StartEngine, "s0", "s1")
    decision = kinds(bench.out, ev.RecordDecision)[-1]
    assert (decision.trigger, decision.workers, decision.current) == ("expand", 3, Layout(colocated=1))


def test_members_change_their_roles_when_the_joiners_are_admitted() -> None:
    bench = Bench(engine=Says({3: Layout(prefill=1, decode=2)}))
    bench.join("s0")
    new = bench.answer_all(ev.StartEngine, "s0")
    assert [i.worker for i in kinds(new, ev.SwitchRole)] == ["s0"]
    assert bench.roles().keys() == {"w0", "w1"}
    bench.answer_all(ev.SwitchRole, "s0")
    switches = kinds(bench.answer_all(ev.SyncWeights, "s0"), ev.SwitchRole)
    assert {i.worker for i in switches} == {"w0", "w1"}
    new = bench.answer_all(ev.SwitchRole, "w0", "w1")
    assert not kinds(new, ev.SyncWeights), "the weights are still the verified ones"
    assert sorted(bench.roles().values()) == [Role.DECODE, Role.DECODE, Role.PREFILL]


def test_any_failure_cancels_the_whole_expansion_and_the_healthy_are_regrouped() -> None:
    bench = Bench()
    bench.join("s0", "s1", "s2")
    bench.answer_all(ev.StartEngine, "s0", "s1", "s2")
    bench.answer_all(ev.SyncWeights, "s0")
    bench.send(ev.WorkerLost("s1", 1, "out of memory"))
    cancelled = [entry for entry in bench.operations("expand") if entry[0] == "cancelled"]
    assert cancelled == [("cancelled", ("s0", "s1", "s2"), "s1: out of memory")]
    assert not {"s0", "s1", "s2"} & bench.roles().keys()
    bench.answer_all(ev.SyncWeights, "s2")
    assert {"s0", "s2"} <= bench.roles().keys(), "they did not have to start again"
    assert bench.activity("s1") == [Activity.STARTING]


def test_the_healthy_members_of_a_cancelled_expansion_can_be_released_instead() -> None:
    bench = Bench(elastic={"on_cancel": OnCancel.RELEASE})
    bench.join("s0", "s1")
    new = bench.send(ev.WorkerLost("s1", 1, "did not start"))
    assert [i.worker for i in kinds(new, ev.StopEngine)] == ["s0"]
    released = kinds(bench.answer_all(ev.StopEngine, "s0"), ev.ReleaseSlot)
    assert [(i.worker, "cancelled" in i.reason) for i in released] == [("s0", True)]


def test_a_notice_for_a_member_cancels_its_expansion() -> None:
    bench = Bench()
    bench.join("s0", "s1")
    new = bench.send(ev.SlotNotice("s0", 1, 30.0))
    assert [i.worker for i in kinds(new, ev.StopEngine)] == ["s0"], "a start is not waited for"
    assert "cancelled" in [phase for phase, _, _ in bench.operations("expand")]
    bench.answer_all(ev.StartEngine, "s1")
    bench.answer_all(ev.SyncWeights, "s1")
    assert "s1" in bench.roles()


def test_slots_that_come_later_form_an_expansion_of_their_own() -> None:
    bench = Bench(elastic={"join_window_s": 5.0})
    bench.join("s0")
    bench.now = 4.0
    bench.join("s1")
    bench.now = 6.0
    bench.join("s2")
    bench.answer_all(ev.StartEngine, "s2")
    bench.answer_all(ev.SyncWeights, "s2")
    assert "s2" in bench.roles()
    bench.answer_all(ev.StartEngine, "s0", "s1")
    bench.answer_all(ev.SyncWeights, "s0")
    assert "s0" not in bench.roles()


def test_a_slot_that_will_not_live_long_enough_is_declined_with_the_reason() -> None:
    bench = Bench(elastic={"preparation_prior_s": 60.0, "lifetime_factor": 2.0})
    new = bench.join("s0", lifetime_s=100.0)
    assert not kinds(new, ev.StartEngine)
    (release,) = kinds(new, ev.ReleaseSlot)
    assert (release.worker, release.life) == ("s0", 1) and "100 s" in release.reason
    assert bench.operations("expand")[-1][0] == "declined"
    assert kinds(bench.join("s0", life=2, lifetime_s=200.0), ev.StartEngine)


def test_without_inter_scale_elasticity_a_slot_goes_back_at_once() -> None:
    bench = Bench(elastic={"inter_scale": False})
    assert [type(i) for i in bench.join("s0")] == [ev.RecordOperation, ev.ReleaseSlot]


# --- shrink ---------------------------------------------------------------------------------------


def test_a_notice_stops_dispatch_then_aborts_then_stops_then_releases() -> None:
    bench = Bench()
    sent = bench.opened(FIRST)
    new = bench.send(ev.SlotNotice(sent.worker, 1, 30.0))
    assert kinds(new, ev.AbortRequests) and not kinds(new, ev.StopEngine)
    again = kinds(bench.generated(sent, 4, FinishReason.ABORT), ev.Generate)
    assert [(i.worker != sent.worker, i.max_new_tokens) for i in again] == [(True, sent.max_new_tokens - 4)]
    assert kinds(bench.answer_all(ev.AbortRequests, sent.worker), ev.StopEngine)
    assert kinds(bench.answer_all(ev.StopEngine, sent.worker), ev.ReleaseSlot)


def test_nothing_is_dispatched_after_a_notice() -> None:
    bench = Bench()
    bench.send(ev.SlotNotice("w0", 1, 30.0))
    assert {bench.opened(FIRST).worker, bench.opened(SECOND).worker} == {"w1"}


def test_a_worker_that_does_not_leave_in_time_is_ended_by_force() -> None:
    bench = Bench(elastic={"notice_margin_s": 2.0})
    sent = bench.opened(FIRST)
    (timer,) = kinds(bench.send(ev.SlotNotice(sent.worker, 1, 30.0)), ev.SetTimer)
    assert timer.at_s == 28.0
    assert [i.worker for i in kinds(bench.send(ev.TimerFired(timer.name)), ev.StopEngine)] == [sent.worker]


def test_a_death_without_notice_is_taken_like_one_and_the_slot_comes_back_in_its_next_life() -> None:
    bench = Bench()
    sent = bench.opened(FIRST)
    bench.send(ev.SlotLost(sent.worker, 1, "reclaimed"))
    assert bench.activity(sent.worker) == [Activity.GONE]
    assert kinds(bench.generated(sent, 0, FinishReason.LOST), ev.Generate)
    (start,) = kinds(bench.join(sent.worker, life=2), ev.StartEngine)
    assert start.incarnation == 2, "incarnations go on counting"


def test_words_about_an_earlier_life_or_said_twice_change_nothing() -> None:
    bench = Bench()
    bench.send(ev.SlotLost("w0", 1, "reclaimed"))
    bench.join("w0", life=2)
    for late in (ev.SlotLost("w0", 1, "x"), ev.SlotNotice("w0", 1, 9.0), ev.SlotJoined(slot("w0"), 2)):
        assert bench.send(late) == []
    assert bench.activity("w0") == [Activity.STARTING]


def test_the_layout_that_cannot_serve_any_more_is_left_at_once() -> None:
    """Forced: the last prefill worker goes."""
    bench = Bench(3, engine=Says({3: Layout(prefill=1, decode=2), 2: Layout(prefill=1, decode=1)}))
    roles = bench.roles()
    (prefill,) = [name for name, role in roles.items() if role is Role.PREFILL]
    new = bench.send(ev.SlotNotice(prefill, 1, 30.0))
    (decision,) = kinds(new, ev.RecordDecision)
    assert (decision.current, decision.decision.layout) == (Layout(decode=2), Layout(prefill=1, decode=1))
    (switch,) = kinds(new, ev.SwitchRole)
    assert switch.role is Role.PREFILL and switch.worker != prefill
    bench.answer(switch)
    assert sorted(r for n, r in bench.roles().items()) == [Role.DECODE, Role.PREFILL]


def test_a_later_event_supersedes_a_plan_that_has_not_begun() -> None:
    """Three workers drain to become a pair and a half; before their requests are back one of them is lost."""
    engine = Says({})
    bench = Bench(3, engine=engine, max_staleness_steps=2)
    bench.finish(FIRST)
    bench.finish(SECOND)
    sent = [bench.opened(TrajectoryId(group, 0, 0)) for group in (1, 2)]
    bench.send(ev.BatchTrained(1))
    engine.layouts = {3: Layout(prefill=1, decode=2)}
    bench.send(ev.SnapshotPublished(1))
    assert len([w for w in bench.fleet.workers.values() if w.goal_role is not Role.COLOCATED]) == 3
    (free,) = bench.fleet.workers.keys() - {g.worker for g in sent}
    bench.send(ev.SlotLost(free, 1, "reclaimed"))
    for g in sent:
        bench.generated(g, 1, FinishReason.ABORT)
        new = bench.answer_all(ev.AbortRequests, g.worker)
        assert kinds(new, ev.SyncWeights) and not kinds(new, ev.SwitchRole)


# --- pairs ----------------------------------------------------------------------------------------


def pairs(workers: int = 2) -> Bench:
    return Bench(workers, engine=Says({**PAIR, 3: Layout(prefill=1, decode=2), 4: Layout(prefill=2, decode=2)}))


def test_a_pair_serves_and_the_prefill_half_is_released_when_it_has_handed_over() -> None:
    bench = pairs()
    sent = bench.opened(FIRST)
    prefill = bench.fleet.workers[sent.prefill_worker]
    assert (prefill.role, bench.fleet.workers[sent.worker].role) == (Role.PREFILL, Role.DECODE)
    assert prefill.prefilling
    bench.send(ev.PrefillDone(FIRST, prefill.name, 1))
    assert not prefill.prefilling
    again = bench.opened(SECOND)
    bench.generated(again, 3, FinishReason.STOP)
    assert not prefill.prefilling, "the answer releases it too"


@pytest.mark.parametrize("half", ["worker", "prefill_worker"])
def test_if_either_half_dies_the_turn_goes_on_elsewhere_from_its_tokens(half: str) -> None:
    bench = pairs(4)
    sent = bench.opened(FIRST)
    dead = getattr(sent, half)
    bench.send(ev.WorkerLost(dead, 1, "died"))
    (again,) = kinds(bench.generated(sent, 2, FinishReason.LOST), ev.Generate)
    assert again.max_new_tokens == sent.max_new_tokens - 2
    assert dead not in (again.worker, again.prefill_worker)


def test_a_prefill_worker_drains_until_the_decode_side_has_answered() -> None:
    bench = pairs(3)
    sent = bench.opened(FIRST)
    (abort,) = kinds(bench.send(ev.SlotNotice(sent.prefill_worker, 1, 30.0)), ev.AbortRequests)[:1]
    assert abort.worker == sent.prefill_worker
    assert not kinds(bench.answer(abort), ev.StopEngine), "the acknowledgement came first"
    stops = kinds(bench.generated(sent, 0, FinishReason.ABORT), ev.StopEngine)
    assert [i.worker for i in stops] == [sent.prefill_worker]


# --- policies -------------------------------------------------------------------------------------


def test_a_fixed_ratio_is_kept_with_any_number_of_workers() -> None:
    bench = Bench(5, elastic={"roles": Roles.FIXED, "fixed_ratio": (2, 3)})
    assert sorted(bench.roles().values()) == [Role.DECODE] * 3 + [Role.PREFILL] * 2
    for name in ("w0", "w1", "w2"):
        bench.send(ev.SlotLost(name, 1, "gone"))
        for switch in kinds(bench.out, ev.SwitchRole):
            bench.answer(switch)
    assert sorted(bench.roles().values()) == [Role.DECODE, Role.PREFILL]


def test_a_change_of_roles_at_a_steps_end_rides_on_the_drain_for_the_new_weights() -> None:
    engine = Says({2: Layout(colocated=2)})
    bench = Bench(2, engine=engine)
    bench.finish(FIRST)
    bench.finish(SECOND)
    bench.send(ev.BatchTrained(1))
    engine.layouts = PAIR
    new = bench.send(ev.SnapshotPublished(1))
    assert len(kinds(new, ev.SwitchRole)) == 2 and not kinds(new, ev.SyncWeights)
    assert len(kinds(bench.answer_all(ev.SwitchRole, "w0", "w1"), ev.SyncWeights)) == 2


def test_dynamic_roles_need_an_engine_and_a_tracker() -> None:
    with pytest.raises(ValueError, match="Decision Engine"):
        Elastic(Pipeline(settings(), TaskCursor(4, 0)), ElasticSettings(roles=Roles.DYNAMIC))
