"""The Decision Engine: what it chooses, what it holds on to, what it must leave, and how it searches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.decision import Decision, DecisionEngine, DecisionSettings
from pearl.core.drain import DrainAware
from pearl.core.feasible import Constraints
from pearl.core.layout import Layout, Mode
from pearl.core.makespan import ClosedForm, Layouts, MakespanModel, Seconds, layout_array, layout_of
from pearl.core.roles import RolePolicy
from pearl.core.search import mixtures, ratios
from pearl.core.settings import Roles
from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile

ENGINE = EngineProfile(
    prefill_fixed_s=0.006,
    prefill_s_per_token=18e-6,
    prefill_s_per_token2=1e-9,
    decode_fixed_s=0.0066,
    decode_s_per_sequence=7.5e-6,
    decode_s_per_kv_token=47e-9,
    kv_bytes_per_token=147_456,
    kv_capacity_tokens=340_000,
    transfer_bytes_per_s=25e9,
    turn_overhead_s=1.0,
)


def workload(turns: int = 12, new: float = 900.0, response: float = 300.0, bubble: float = 0.3) -> WorkloadProfile:
    shapes = [TurnShape(max(0.05, 1.0 - k / turns), new, response, 2.0, k * (new + response)) for k in range(turns)]
    return WorkloadProfile(tuple(shapes), turns, new, response, bubble, environment_s_per_turn=2.0)


PROFILE = Profile(ENGINE, workload())


@dataclass(frozen=True)
class Table(MakespanModel):
    """A model that answers from a table, so that a test says what is predicted."""

    seconds: dict[str, float]
    otherwise: float = 1000.0

    @property
    def name(self) -> str:
        return "table"

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return self.seconds.get(str(layout), self.otherwise)

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        return np.array([self.makespan(profile, layout_of(row), batch) for row in layouts])


def decide(seconds: dict[str, float], current: str | None, workers: int = 8, **thresholds: Any) -> Decision:
    engine = DecisionEngine(DecisionSettings(constraints=False, **thresholds), Table(seconds))
    return engine.decide(PROFILE, workers, 64, Layout.parse(current) if current else None)


def test_the_least_makespan_is_chosen_where_there_is_nothing_to_lose() -> None:
    decision = decide({"8C": 101.0, "3P5D": 100.0}, None)
    assert (decision.layout, decision.predicted_s, decision.kept_s, decision.forced) == (
        Layout(3, 5),
        100.0,
        None,
        False,
    )


def test_a_change_of_mode_needs_more_than_a_change_of_ratio() -> None:
    limits: dict[str, Any] = {"mode_threshold": 0.05, "ratio_threshold": 0.02}
    seconds = {"8C": 100.0, "4P4D": 100.0, "3P5D": 97.0}
    assert decide(seconds, "8C", **limits).layout == Layout(0, 0, 8)
    assert decide(seconds, "4P4D", **limits).layout == Layout(3, 5)
    assert decide(seconds | {"3P5D": 94.0}, "8C", **limits).layout == Layout(3, 5)
    assert decide({"4P4D": 100.0, "3P5D": 99.0}, "4P4D", **limits).layout == Layout(4, 4)


def test_a_layout_of_another_size_is_left_whatever_the_thresholds() -> None:
    decision = decide({"8C": 100.0, "3P5D": 99.9}, "7C", mode_threshold=0.9)
    assert decision.layout == Layout(3, 5)
    assert decision.forced
    assert decision.kept_s is None
    assert "7 workers, there are 8" in " ".join(decision.reasons)


def test_an_infeasible_layout_is_left_and_the_reason_says_which_constraint() -> None:
    small = Profile(replace(ENGINE, kv_capacity_tokens=100_000), workload())
    engine = DecisionEngine(DecisionSettings(mode_threshold=0.9, ratio_threshold=0.9), ClosedForm())
    decision = engine.decide(small, 8, 64, Layout(7, 1))
    assert decision.forced
    assert decision.layout != Layout(7, 1)
    assert "tokens of KV" in " ".join(decision.reasons)


def test_what_a_draining_batch_holds_is_less_than_all_trajectories_at_their_longest() -> None:
    work = workload()
    most = max(turn.survivors * (turn.context_tokens + 1200) for turn in work.turns)
    assert work.peak_context_tokens == pytest.approx(most)
    assert most < 0.6 * work.final_context_tokens


@pytest.mark.parametrize("drains", [True, False])
def test_decode_workers_must_hold_the_batch(drains: bool) -> None:
    work = workload()
    needed = 64 * (work.peak_context_tokens if drains else work.final_context_tokens)
    layouts = ratios(8)
    assert Constraints.of(PROFILE, layouts, 64, drains=drains).kv_needed_tokens == pytest.approx([needed] * 7)
    tight = Profile(replace(ENGINE, kv_capacity_tokens=int(needed / 4) + 1), work)
    held = Constraints.of(tight, layouts, 64, drains=drains)
    fits = held.kv_needed_tokens <= held.kv_capacity_tokens
    assert [layout_of(row).decode for row in layouts[fits]] == [7, 6, 5, 4]


def test_prefill_workers_that_could_not_keep_up_are_ruled_out() -> None:
    heavy = Profile(replace(ENGINE, kv_capacity_tokens=10**9), workload(new=8000.0, response=10.0, bubble=0.0))
    heavy = replace(heavy, workload=replace(heavy.workload, environment_s_per_turn=0.0))
    constraints = Constraints.of(heavy, layout_array([Layout(1, 7), Layout(0, 0, 8)]), 64)
    assert constraints.feasible.tolist() == [False, True]
    assert "busy" in constraints.reason(0)
    assert constraints.reason(1) == ""


def test_one_worker_is_colocated() -> None:
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    assert engine.decide(PROFILE, 1, 64).layout == Layout(0, 0, 1)


def test_nothing_to_decide_is_an_error() -> None:
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    with pytest.raises(ValueError, match="0 workers"):
        engine.decide(PROFILE, 0, 64)


def test_a_mixed_layout_wins_where_it_is_faster_and_is_not_looked_at_where_switched_off() -> None:
    seconds = {"8C": 100.0, "4P4D": 100.0, "3C+2P3D": 50.0}
    assert decide(seconds, None).layout.mode is Mode.MIXED
    assert decide(seconds, None, mixed=False).layout.mode is not Mode.MIXED


def test_a_mixed_layout_must_be_clearly_faster() -> None:
    seconds = {"8C": 100.0, "4P4D": 102.0, "3C+2P3D": 99.0}
    assert decide(seconds, None).layout == Layout(colocated=8)


@pytest.mark.parametrize(("overlap", "load"), [(True, 128.0), (False, 64)])
def test_roles_are_decided_for_all_batches_in_flight_where_that_is_asked_for(overlap: bool, load: float) -> None:
    asked: list[float] = []

    class Asked(DecisionEngine):
        def decide(self, profile: Profile, workers: int, batch: float, current: Layout | None = None) -> Decision:
            asked.append(batch)
            return super().decide(profile, workers, batch, current)

    work = workload()
    alive = sum(turn.survivors for turn in work.turns) / work.slowest_turns
    policy = RolePolicy(Roles.DYNAMIC, (1, 1), Asked(DecisionSettings(), ClosedForm()), 64, overlap)
    policy.decide(Profile(ENGINE, replace(work, in_flight=128 * alive)), 8, None)
    assert asked == [pytest.approx(load)]


def test_more_workers_gain_less_and_less() -> None:
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    gains = [engine.marginal_gain(PROFILE, workers, 64) for workers in (2, 4, 8, 16)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0


def test_workers_that_die_while_they_prepare_are_worth_nothing() -> None:
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    assert engine.expansion_benefit_s(PROFILE, 4, 8, 64, expected_lifetime_s=60, preparation_s=67) == 0.0
    short, long = (engine.expansion_benefit_s(PROFILE, 4, 8, 64, life, 67) for life in (600, 1200))
    assert 0 < short < long


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from([ClosedForm(), DrainAware()]),
    workers=st.integers(2, 120),
    batch=st.integers(8, 512),
    new=st.floats(50, 6000),
    response=st.floats(20, 1000),
    bubble=st.floats(0, 3),
    overhead=st.floats(0, 1),
)
def test_the_coarse_search_finds_the_best_ratio(
    model: MakespanModel, workers: int, batch: int, new: float, response: float, bubble: float, overhead: float
) -> None:
    profile = Profile(replace(ENGINE, turn_overhead_s=overhead), workload(10, new, response, bubble))
    rows = np.concatenate([layout_array([Layout(0, 0, workers)]), ratios(workers)])
    seconds = model.makespans(profile, rows, batch)
    least = seconds[Constraints.of(profile, rows, batch).feasible].min()
    engine = DecisionEngine(DecisionSettings(mixed=False), model)
    assert engine.best(profile, workers, batch)[1] <= least * 1.005


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(3, 40),
    batch=st.integers(8, 512),
    new=st.floats(50, 6000),
    response=st.floats(20, 1000),
    overhead=st.floats(0, 0.1),
)
def test_of_mixed_layouts_hardly_a_better_one_is_missed(
    workers: int, batch: int, new: float, response: float, overhead: float
) -> None:
    profile = Profile(replace(ENGINE, turn_overhead_s=overhead), workload(10, new, response))
    rows = np.concatenate([layout_array([Layout(0, 0, workers)]), ratios(workers), mixtures(workers)])
    seconds = DrainAware().makespans(profile, rows, batch)
    least = seconds[Constraints.of(profile, rows, batch).feasible].min()
    assert DecisionEngine(DecisionSettings(), DrainAware()).best(profile, workers, batch)[1] <= least * 1.03


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 40), batch=st.integers(1, 256), current=st.integers(0, 40))
def test_every_decision_can_serve_with_the_workers_there_are(workers: int, batch: int, current: int) -> None:
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    there = Layout(0, 0, current) if current else None
    decision = engine.decide(PROFILE, workers, batch, there)
    assert decision.layout.workers == workers
    assert decision.layout.whole
    assert decision.candidates[0].makespan_s <= decision.predicted_s
    assert any(candidate.layout == decision.layout and not candidate.infeasible for candidate in decision.candidates)
