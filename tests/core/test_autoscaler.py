"""The autoscaler: within its budget, worth its price, and not restless."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.autoscaler import Autoscaler, AutoscalerSettings, Objective, Offer, Scale

PREPARATION_S = 60.0


def amdahl(serial_s: float, parallel_s: float, others: int = 2) -> Callable[[int], float]:
    return lambda n: serial_s + parallel_s / (others + n)


def decide(
    autoscaler: Autoscaler, offer: Offer, now: float = 0.0, training_s: float = 10.0, parallel_s: float = 400.0
) -> Scale:
    rollout_s = amdahl(20.0, parallel_s)
    return autoscaler.decide(offer, lambda n: max(rollout_s(n), training_s), PREPARATION_S, now)


offers = st.builds(
    Offer,
    usd_per_slot_hour=st.floats(0.0, 20.0),
    expected_lifetime_s=st.none() | st.floats(1.0, 1e5),
)
settings_ = st.builds(
    AutoscalerSettings,
    max_slots=st.integers(0, 20),
    max_usd_per_hour=st.none() | st.floats(0.0, 100.0),
    other_usd_per_hour=st.floats(1.0, 100.0),
    objective=st.sampled_from(Objective),
)


@given(settings_, st.lists(offers, min_size=1, max_size=5), st.floats(1.0, 200.0))
def test_never_beyond_the_limits(settings: AutoscalerSettings, offers: list[Offer], training_s: float) -> None:
    autoscaler = Autoscaler(settings)
    for number, offer in enumerate(offers):
        scale = decide(autoscaler, offer, number * 10.0, training_s)
        assert 0 <= scale.slots <= settings.max_slots
        if settings.max_usd_per_hour is not None:
            assert scale.slots * offer.usd_per_slot_hour <= settings.max_usd_per_hour + 1e-6
        assert scale.slots == autoscaler.slots


@given(settings_, offers, st.floats(1.0, 200.0))
def test_the_first_choice_is_the_best_of_all_numbers_or_none(
    settings: AutoscalerSettings, offer: Offer, training_s: float
) -> None:
    scale = decide(Autoscaler(settings), offer, training_s=training_s)

    def score(n: int) -> float:
        terms = scale.terms[n]
        return terms.steps_per_usd if settings.objective is Objective.TOKENS_PER_USD else terms.steps_per_hour

    best = max(score(n) for n in range(len(scale.terms)))
    assert score(scale.slots) == pytest.approx(best, rel=0.03)


def test_a_dearer_slot_is_asked_for_less() -> None:
    settings = AutoscalerSettings(max_slots=16, other_usd_per_hour=40.0)
    numbers = [decide(Autoscaler(settings), Offer(price)).slots for price in (0.5, 2.0, 8.0, 30.0, 200.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 16 and numbers[-1] == 0 and len(set(numbers)) > 2


def test_training_that_takes_as_long_needs_no_more_rollout() -> None:
    settings = AutoscalerSettings(max_slots=16, other_usd_per_hour=40.0, objective=Objective.THROUGHPUT)
    assert decide(Autoscaler(settings), Offer(1.0), training_s=500.0).slots == 0
    scale = decide(Autoscaler(settings), Offer(1.0), training_s=60.0)
    assert scale.terms[scale.slots].step_s == 60.0 < scale.terms[scale.slots - 1].step_s


def test_slots_that_die_while_they_prepare_are_not_asked_for() -> None:
    settings = AutoscalerSettings(max_slots=8, other_usd_per_hour=10.0)
    assert decide(Autoscaler(settings), Offer(1.0, PREPARATION_S / 2)).slots == 0
    assert decide(Autoscaler(settings), Offer(1.0, 100 * PREPARATION_S)).slots > 0


def test_a_change_waits_for_the_cooldown_unless_the_budget_forces_it() -> None:
    autoscaler = Autoscaler(AutoscalerSettings(max_slots=8, max_usd_per_hour=16.0, other_usd_per_hour=40.0))
    assert decide(autoscaler, Offer(2.0)).slots == 8
    calm = decide(autoscaler, Offer(2.0), now=100.0, parallel_s=1.0)
    assert (calm.slots, calm.changed) == (8, False)
    assert "cools down for another 200 s" in calm.reason
    forced = decide(autoscaler, Offer(8.0), now=100.0)
    assert forced.changed and forced.slots <= 2 and forced.reason == "the budget allows 2"
    assert decide(autoscaler, Offer(2.0), now=401.0, parallel_s=1.0).slots == 0


def test_little_gain_changes_nothing() -> None:
    autoscaler = Autoscaler(AutoscalerSettings(max_slots=1, other_usd_per_hour=1000.0))
    scale = decide(autoscaler, Offer(0.01), parallel_s=1.0)
    assert (scale.slots, scale.changed) == (0, False)
    assert "less than 2%" in scale.reason


def test_where_nothing_can_be_done_without_slots_some_are_asked_for() -> None:
    autoscaler = Autoscaler(AutoscalerSettings(4, other_usd_per_hour=1.0))
    scale = autoscaler.decide(Offer(1.0), lambda n: 100.0 / n if n else float("inf"), PREPARATION_S, 0.0)
    assert scale.changed and scale.slots > 0
