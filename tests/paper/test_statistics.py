from __future__ import annotations

import random

import pytest

from pearl.paper.cell import same_rank
from pearl.paper.statistics import best_of, estimate, gains


def test_the_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.hi - found.mean == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert found.mean - found.lo == pytest.approx(found.hi - found.mean)
    assert estimate([7.0]) == (7.0, 7.0, 7.0)


def test_the_interval_covers_the_mean_in_nineteen_of_twenty_samples() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(1000):
        found = estimate([rng.gauss(5.0, 2.0) for _ in range(10)])
        covered += found.lo <= 5.0 <= found.hi
    assert 930 <= covered <= 970


def test_gains_are_paired() -> None:
    assert gains([110.0, 30.0], [100.0, 40.0]) == pytest.approx([10.0, -25.0])
    with pytest.raises(ValueError):
        gains([1.0], [1.0, 2.0])


def test_the_best_column_is_sure_only_where_it_stands_out() -> None:
    clear = [[1.0, 1.1, 0.9, 1.0], [9.0, 9.1, 8.9, 9.0], [2.0, 2.1, 1.9, 2.0]]
    assert best_of(clear) == (1, 1, 1)
    rng = random.Random(1)
    noise = [[rng.gauss(0.0, 1.0) for _ in range(6)] for _ in range(4)]
    best, lo, hi = best_of(noise)
    assert lo <= best <= hi and lo < hi


def test_ranks_are_places_in_the_row() -> None:
    assert same_rank([5.9, 26.9, 10.6], [1.0, 3.0, 2.0]) == [True, True, True]
    assert same_rank([5.9, 26.9, 10.6], [1.0, 2.0, 3.0]) == [True, False, False]
