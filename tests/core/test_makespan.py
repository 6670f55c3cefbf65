"""The makespan models: the source's equations by hand, and what must hold of ours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.drain import DrainAware
from pearl.core.layout import Layout
from pearl.core.makespan import AlwaysColocated, ClosedForm, Layouts, LinearCosts, MakespanModel, layout_array
from pearl.core.search import colocated, mixtures, ratios
from pearl.core.stations import cycle_s
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
    turn_overhead_s=0.01,
)
SIMPLE = replace(
    ENGINE, prefill_fixed_s=0.0, prefill_s_per_token2=0.0, decode_s_per_kv_token=0.0, decode_s_per_sequence=1e-4
)
"""Costs that the closed form has, and no others."""


def workload(
    turns: int = 12, new: float = 900.0, response: float = 300.0, environment_s: float = 2.0
) -> WorkloadProfile:
    shapes = [TurnShape(1.0 - k / turns, new, response, environment_s, k * (new + response)) for k in range(turns)]
    return WorkloadProfile(tuple(shapes), turns, new, response, 0.5, environment_s_per_turn=environment_s, group_size=8)


def test_the_closed_form_is_the_source_s() -> None:
    profile = Profile(SIMPLE, workload())
    s, b, new, r, theta, environment = 12, 64, 900, 300, 0.5, 12 * 2.0
    t, a, cost, over = 18e-6, 0.0066, 1e-4, 0.01
    model = ClosedForm()
    for n in (1, 4, 8):
        expected = s * ((b * new / n) * t + r * (a + cost * b / n) + over) + environment
        assert model.makespan(profile, Layout(colocated=n), b) == pytest.approx(expected)
    for p, d in ((1, 7), (4, 4), (7, 1)):
        decode = s * r * (a + cost * b / (d * (1 + theta))) * (1 + theta)
        prefill = s * (b * new / p * t + b * new * 147_456 / 25e9)
        assert model.makespan(profile, Layout(p, d), b) == pytest.approx(max(prefill, decode) + environment)


def test_without_the_bubble_the_closed_form_has_theta_0() -> None:
    profile = Profile(SIMPLE, workload())
    flat = replace(profile, workload=replace(profile.workload, bubble_ratio=0.0))
    layout = Layout(4, 4)
    assert ClosedForm(bubble=False).makespan(profile, layout, 64) == ClosedForm().makespan(flat, layout, 64)
    assert ClosedForm(bubble=False).makespan(profile, layout, 64) != ClosedForm().makespan(profile, layout, 64)


def test_what_the_closed_form_does_not_know_is_taken_at_the_mean_turn() -> None:
    work = workload()
    dense = LinearCosts.at(ENGINE, work, 8)
    context = sum(t.survivors * t.context_tokens for t in work.turns) / sum(t.survivors for t in work.turns)
    assert dense.decode_s_per_sequence == pytest.approx(7.5e-6 + 47e-9 * (context + 900 + 150))
    experts = replace(ENGINE, expert_fixed_s=0.014, expert_share=1 / 16)
    line = LinearCosts.at(experts, work, 16)
    extra = [line.decode_fixed_s - dense.decode_fixed_s, line.decode_s_per_sequence - dense.decode_s_per_sequence]
    for batch in (1, 16):
        assert extra[0] + extra[1] * batch == pytest.approx(0.014 * (1 - (15 / 16) ** batch))


def test_a_layout_that_cannot_serve_takes_for_ever() -> None:
    profile = Profile(ENGINE, workload())
    for model in (ClosedForm(), DrainAware()):
        assert model.makespan(profile, Layout(prefill=2), 8) == np.inf
        assert np.isfinite(model.makespan(profile, Layout(1, 1), 8))
    assert AlwaysColocated().makespan(profile, Layout(1, 1), 8) == np.inf


def test_one_trajectory_alone_waits_for_nobody() -> None:
    """With one trajectory the drain-aware model is arithmetic."""
    work = replace(workload(turns=1), group_size=1)
    expected = 0.006 + 0.01 + 900 * 18e-6 + 1e-9 * 900 * 450 + 300 * (0.0066 + 7.5e-6 + 47e-9 * 1050) + 2.0
    assert DrainAware().makespan(Profile(ENGINE, work), Layout(colocated=1), 1) == pytest.approx(expected)
    crossing = 900 * 147_456 / 25e9
    assert DrainAware().makespan(Profile(ENGINE, work), Layout(1, 1), 1) == pytest.approx(expected - 0.01 + crossing)


def test_a_round_of_stations_solves_its_equation() -> None:
    own = np.array([[[0.5]], [[0.1]], [[2.0]]])
    ahead = np.array([[[3.0]], [[0.4]], [[6.0]]])
    cycle = float(cycle_s(np.array([[1.0]]), own, ahead)[0, 0])
    around = 1.0 + float((own * cycle / (cycle - ahead)).sum())
    assert cycle > 6.0
    assert around == pytest.approx(cycle, rel=1e-3)


def compare(model: DrainAware, changed: DrainAware, layout: Layout, profile: Profile, batch: float = 64) -> float:
    return changed.makespan(profile, layout, batch) / model.makespan(profile, layout, batch)


def test_each_switch_takes_its_own_term_away() -> None:
    profile = Profile(replace(ENGINE, kv_capacity_tokens=60_000), workload())
    ours, pair, alone = DrainAware(), Layout(2, 2), Layout(colocated=4)
    assert compare(ours, DrainAware(capacity=False), alone, profile) < 1
    assert compare(ours, DrainAware(capacity=False), pair, profile) < 1
    assert compare(ours, DrainAware(queueing=False), pair, profile) < 1
    assert compare(ours, DrainAware(cache=False), alone, profile) > 1
    assert compare(ours, DrainAware(bubble=False), alone, profile) > 1
    assert compare(ours, DrainAware(drain=False), alone, profile) > 1
    assert compare(ours, DrainAware(prefill_keeps_response=True), pair, profile) < 1
    assert compare(ours, DrainAware(decode_keeps_kv=False), pair, profile) > 1


def test_a_prefill_side_whose_memory_is_too_small_for_the_prefixes_is_slow() -> None:
    weak = replace(ENGINE, prefill_s_per_token=100e-6)
    plenty, scarce = (Profile(replace(weak, kv_capacity_tokens=tokens), workload()) for tokens in (10_000_000, 150_000))
    ours = DrainAware()
    few, many = Layout(1, 7), Layout(4, 4)
    loss = [ours.makespan(scarce, layout, 64) / ours.makespan(plenty, layout, 64) for layout in (few, many)]
    assert loss[0] > 1.5 * loss[1]


def test_batches_of_few_tasks_take_longer_close_to_a_cliff(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(SIMPLE, prefill_s_per_token=80e-6, kv_capacity_tokens=350_000)
    profile = Profile(engine, replace(workload(), group_size=32))
    rows = layout_array([Layout(1, 7), Layout(4, 4)])  # the memory of one prefill worker just holds the mean batch
    uneven = DrainAware().makespans(profile, rows, 64)
    monkeypatch.setattr("pearl.core.drain.SPREAD", 0.0)
    longer = uneven / DrainAware().makespans(profile, rows, 64)
    assert longer[0] > 1.1
    assert longer[1] < 1.01


@pytest.mark.parametrize(("rows", "within"), [(ratios(10), 0.01), (mixtures(6), 0.1)])
def test_few_passes_find_the_fixed_point(rows: Layouts, within: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(ENGINE, prefill_s_per_token=40e-6, kv_capacity_tokens=300_000)
    profile = Profile(engine, workload(environment_s=0.5))
    few = DrainAware().makespans(profile, rows, 128)
    monkeypatch.setattr("pearl.core.drain.PASSES", 40)
    assert few == pytest.approx(DrainAware().makespans(profile, rows, 128), rel=within)


def test_the_tail_grows_with_the_spread_of_environment_times() -> None:
    even = workload()
    ours, layout = DrainAware(), Layout(colocated=8)
    spread = replace(even, environment_cv=1.5)
    assert ours.makespan(Profile(ENGINE, spread), layout, 64) > ours.makespan(Profile(ENGINE, even), layout, 64)


def test_the_bubble_ratio_that_follows_from_the_model_is_that_of_its_parts() -> None:
    work = workload(turns=1, environment_s=5.0)
    decode = 300 * (0.0066 + 7.5e-6 + 47e-9 * 1050)
    life = DrainAware().makespan(Profile(ENGINE, work), Layout(colocated=1), 1)
    theta = DrainAware().bubble_ratio(Profile(ENGINE, work), Layout(colocated=1), 1)
    assert theta == pytest.approx(life / decode - 1, rel=1e-6)


models = st.sampled_from([ClosedForm(), DrainAware(), DrainAware(prefill_keeps_response=True)])


@settings(max_examples=60, deadline=None)
@given(
    model=models,
    workers=st.integers(3, 12),
    batch=st.integers(1, 200),
    new=st.floats(10, 5000),
    response=st.floats(5, 1000),
    environment_s=st.floats(0, 20),
    capacity=st.integers(20_000, 2_000_000),
    experts=st.sampled_from([0.0, 0.02]),
)
def test_predictions_are_positive_and_the_same_one_by_one_and_together(
    model: MakespanModel,
    workers: int,
    batch: int,
    new: float,
    response: float,
    environment_s: float,
    capacity: int,
    experts: float,
) -> None:
    engine = replace(ENGINE, kv_capacity_tokens=capacity, expert_fixed_s=experts, expert_share=1 / 16)
    profile = Profile(engine, workload(6, new, response, environment_s))
    layouts = np.concatenate([colocated(workers), ratios(workers), mixtures(workers)])
    together = model.makespans(profile, layouts, batch)
    assert np.isfinite(together).all()
    assert (together > 6 * environment_s * 0.5).all()
    for row in (0, 1, len(layouts) - 1):
        p, d, c = (int(count) for count in layouts[row])
        assert model.makespan(profile, Layout(p, d, c), batch) == pytest.approx(float(together[row]), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(2, 256), workers=st.integers(1, 16), new=st.floats(50, 4000), response=st.floats(20, 800))
def test_more_colocated_workers_are_never_slower_and_more_trajectories_never_faster(
    batch: int, workers: int, new: float, response: float
) -> None:
    profile = Profile(replace(ENGINE, kv_capacity_tokens=10**8), workload(8, new, response))
    for model in (ClosedForm(), DrainAware()):
        here = model.makespan(profile, Layout(colocated=workers), batch)
        # Moves to other workers cost prefixes, and there are none with one worker.
        assert model.makespan(profile, Layout(colocated=2 * workers), batch) <= here * (1.1 if workers == 1 else 1.02)
        assert model.makespan(profile, Layout(colocated=workers), 2 * batch) >= here * 0.999


def test_rows_that_cannot_serve_do_not_disturb_the_others() -> None:
    profile = Profile(ENGINE, workload())
    rows = layout_array([Layout(2, 0), Layout(2, 2), Layout(0, 0, 4), Layout(1, 1, 2)])
    seconds = DrainAware().makespans(profile, rows, 32)
    assert seconds[0] == np.inf
    assert seconds[1:].tolist() == pytest.approx(DrainAware().makespans(profile, rows[1:], 32).tolist())
