"""The benefit gate and its averages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.gate import Average, ask_gate


def amdahl(parallel_s: float, dedicated: int) -> Callable[[int], float]:
    return lambda k: parallel_s / (dedicated + k)


def test_it_borrows_exactly_when_the_benefit_exceeds_the_cost() -> None:
    predicted = {0: 100.0, 1: 60.0}.__getitem__
    assert ask_gate(25, 100, 1, predicted, lambda k: 9.9).borrow
    no = ask_gate(25, 100, 1, predicted, lambda k: 10.0)
    assert not no.borrow and no.slots == 0
    assert (no.remaining, no.batch, no.dedicated_s, no.full_s, no.toggle_s) == (25, 100, 100.0, 60.0, 10.0)


def test_it_borrows_the_number_of_slots_with_the_most_net_benefit() -> None:
    makespans = {0: 100.0, 1: 80.0, 2: 60.0, 3: 61.0, 4: 90.0}
    assert ask_gate(10, 10, 4, makespans.__getitem__, lambda k: 1.0).slots == 2


def test_a_slot_that_costs_more_than_it_brings_is_not_borrowed() -> None:
    makespans = {0: 100.0, 1: 60.0, 2: 55.0}
    assert ask_gate(10, 10, 2, makespans.__getitem__, lambda k: 1.0 if k == 1 else 20.0).slots == 1


@given(st.integers(0, 64), st.floats(1, 1e4), st.integers(1, 50), st.integers(1, 200), st.floats(0, 100))
def test_a_borrowing_always_pays_by_its_own_figures(
    remaining: int, parallel_s: float, dedicated: int, slots: int, cost_s: float
) -> None:
    decision = ask_gate(remaining, 64, slots, amdahl(parallel_s, dedicated), lambda k: cost_s)
    benefit_s = remaining / 64 * (decision.dedicated_s - decision.full_s)
    assert decision.borrow == (benefit_s > decision.toggle_s)
    assert 0 <= decision.slots <= slots and (decision.slots > 0) == decision.borrow


def test_the_first_measurement_replaces_the_prior_and_later_ones_are_averaged() -> None:
    average = Average(60.0, 0.25)
    average.add(8.0)
    assert average.value == 8.0
    average.add(4.0)
    assert average.value == pytest.approx(7.0)
