"""Weights on their way: the links' work is that of a live run's fan-out."""

from __future__ import annotations

import pytest

from pearl.sim.clock import Clock
from pearl.sim.weights import PIECE_BYTES, WeightLinks

BYTES_PER_S = 1e9
SIZE = 10e9
COPY_S, PIECE_S = SIZE / BYTES_PER_S, PIECE_BYTES / BYTES_PER_S


def links(clock: Clock, gone: frozenset[str] = frozenset()) -> WeightLinks:
    return WeightLinks(clock, BYTES_PER_S, lambda name: name not in gone)


def test_many_that_ask_at_once_wait_for_one_copy_and_a_piece_for_each_before_them() -> None:
    weights = links(Clock())
    took = [weights.seconds(1, f"w{i}", (), SIZE) for i in range(100)]
    assert took == pytest.approx([COPY_S + i * PIECE_S for i in range(100)])


def test_two_that_join_later_take_them_from_different_holders() -> None:
    clock = Clock()
    weights = links(clock)
    for name in ("a", "b"):
        weights.seconds(1, name, (), SIZE)
    while clock.advance(100.0):
        pass
    assert weights.seconds(1, "c", ("a", "b"), SIZE) == pytest.approx(COPY_S)
    assert weights.seconds(1, "d", ("b", "a"), SIZE) == pytest.approx(COPY_S)
    assert weights.seconds(1, "e", ("a",), SIZE) == pytest.approx(2 * COPY_S), "one copy crosses a link at a time"


def test_nobody_takes_them_from_a_worker_that_is_gone() -> None:
    weights = links(Clock(), gone=frozenset({"a"}))
    weights.seconds(1, "a", (), SIZE)
    assert weights.seconds(1, "b", (), SIZE) == pytest.approx(2 * COPY_S), "behind the trainer's first copy"


def test_each_version_has_a_chain_of_its_own() -> None:
    clock = Clock()
    weights = links(clock)
    weights.seconds(1, "a", (), SIZE)
    while clock.advance(100.0):
        pass
    weights.retire(1)
    assert weights.seconds(2, "b", (), SIZE) == pytest.approx(COPY_S)
    assert weights.seconds(2, "a", (), SIZE) == pytest.approx(COPY_S + PIECE_S)
