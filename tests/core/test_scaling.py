"""How many slots are asked for, within a run: measured inputs, and slots that go back."""

from __future__ import annotations

from typing import Any

import pytest

from pearl.core import events as ev
from pearl.core.autoscaler import AutoscalerSettings
from pearl.core.scaling import Lifetimes
from pearl.core.settings import ElasticSettings
from pearl.errors import UserError
from pearl.sim.market import Market
from pearl.sim.scenario import Scenario, simulate
from pearl.sim.search.engines import slot
from tests.core.virtual_elastic import play_elastic


def test_a_mean_lifetime_counts_slots_that_still_live_and_not_only_losses() -> None:
    lifetimes = Lifetimes(None)
    lifetimes.began("a", 0.0)
    lifetimes.began("b", 0.0)
    assert lifetimes.mean_s(50.0) is None
    lifetimes.ended("a", 100.0, lost=True)
    assert lifetimes.mean_s(300.0) == pytest.approx(400.0)
    lifetimes.ended("b", 300.0, lost=False)
    lifetimes.ended("b", 400.0, lost=True)
    assert lifetimes.mean_s(900.0) == pytest.approx(400.0)


def test_a_prior_lifetime_counts_as_one_loss() -> None:
    lifetimes = Lifetimes(600.0)
    lifetimes.began("a", 0.0)
    assert lifetimes.mean_s(0.0) == pytest.approx(600.0)
    lifetimes.ended("a", 200.0, lost=True)
    assert lifetimes.mean_s(200.0) == pytest.approx(400.0)


def test_borrowed_gpus_make_preemptible_ones_worth_less() -> None:
    """At this price a policy that borrows asks for fewer at once than one that cannot."""
    asked = {}
    for policy in ("elastic", "elastic-borrow"):
        _, seen = scaled(policy=policy, preemptible_usd_per_gpu_hour=0.9)
        asked[policy] = max(i.slots for i in seen.of(ev.RequestSlots))
    assert asked["elastic-borrow"] < asked["elastic"]


SHORT: dict[str, Any] = {"hours": 0.2}


class Seen:
    def __init__(self) -> None:
        self.entries: list[tuple[float, ev.Event | ev.Instruction]] = []

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        self.entries.append((now, entry))

    def of(self, *kinds: type) -> list:
        return [entry for _, entry in self.entries if isinstance(entry, kinds)]


def scaled(**changes: Any) -> tuple[dict, Seen]:
    seen = Seen()
    scenario = Scenario(**SHORT, autoscale="tokens_per_usd", **changes)
    summary, _ = simulate(scenario, [seen], validate=True)
    assert summary["trajectories_lost"] == 0
    return summary, seen


def test_slots_that_cost_nothing_are_all_taken() -> None:
    summary, seen = scaled(preemptible_usd_per_gpu_hour=0.0)
    everything, _ = simulate(Scenario(**SHORT))
    assert summary["preemptible_gpu_s"] == everything["preemptible_gpu_s"]
    assert summary["steps"] == everything["steps"]
    assert seen.of(ev.RequestSlots)[0].slots == 6


def test_slots_that_cost_too_much_are_not_asked_for() -> None:
    summary, seen = scaled(preemptible_usd_per_gpu_hour=50.0)
    assert summary["preemptible_gpu_s"] == 0.0
    assert [i.slots for i in seen.of(ev.RequestSlots)] == [0]


def test_a_budget_bounds_the_slots_that_are_there_at_once() -> None:
    _, seen = scaled(preemptible_usd_per_gpu_hour=0.1, max_usd_per_hour=0.5)
    here: set[str] = set()
    most = 0
    for entry in seen.of(ev.SlotJoined, ev.SlotLost, ev.ReleaseSlot):
        if isinstance(entry, ev.SlotJoined):
            here.add(entry.slot.name)
        else:
            here.discard(entry.worker)
        most = max(most, len(here))
    assert most == 2  # slots of two GPUs, 0.2 an hour each


def test_slots_too_many_go_back_and_the_run_goes_on_without_them() -> None:
    """Prices make slots worth it for long rollouts only; here the last tasks of a run have short ones."""
    settings = AutoscalerSettings(5, other_usd_per_hour=1.0, cooldown_s=0.0, usd_per_slot_hour=0.2)
    found = [play_elastic(ElasticSettings(inter_scale=True, autoscale=settings), seed, spot=5) for seed in range(12)]
    assert all(not run.end.failed for run in found)
    given_back = [
        entry
        for run in found
        for _, entry in run.log
        if isinstance(entry, ev.ReleaseSlot) and entry.reason.startswith(("not worth", "so many"))
    ]
    assert given_back


def test_autoscaling_a_policy_that_takes_no_slots_is_refused() -> None:
    with pytest.raises(UserError, match="takes no preemptible"):
        Scenario(policy="colocated", autoscale="throughput").check()
    with pytest.raises(UserError, match="no objective"):
        Scenario(autoscale="fun").check()


def names(changes: list[ev.Event]) -> list[str]:
    return [f"{type(e).__name__} {e.slot.name if isinstance(e, ev.SlotJoined) else e.worker}" for e in changes]  # type: ignore[attr-defined]


def test_a_market_gives_what_is_wanted_and_another_one_for_what_is_lost() -> None:
    market = Market()
    market.want(1)
    assert names(market.changed(ev.SlotJoined(slot("a"), 1))) == ["SlotJoined a"]
    assert market.changed(ev.SlotJoined(slot("b"), 1)) == []
    assert names(market.changed(ev.SlotLost("a", 1, ""))) == ["SlotLost a", "SlotJoined b"]
    assert names(market.want(2)) == []
    assert market.changed(ev.SlotNotice("c", 1, 1.0)) == []


def test_a_slot_that_was_given_back_can_be_had_again_unless_it_has_notice() -> None:
    market = Market()
    market.want(2)
    market.changed(ev.SlotJoined(slot("a"), 1))
    market.changed(ev.SlotJoined(slot("b"), 1))
    market.changed(ev.SlotNotice("a", 1, 9.0))
    assert market.released("a") == []
    assert names(market.released("b")) == ["SlotJoined b"]
    (lost,) = market.changed(ev.SlotLost("b", 1, ""))
    assert lost == ev.SlotLost("b", 2, "")  # of the life that it has here
