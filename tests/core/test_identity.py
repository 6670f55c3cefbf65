"""What is remembered of an object, and that it is of no other."""

from __future__ import annotations

from pearl.core.identity import REMEMBERED, remembered


def test_an_object_is_asked_about_once_and_an_equal_one_anew() -> None:
    asked: list[tuple[list[int], int]] = []

    @remembered
    def total(numbers: list[int], factor: int) -> int:
        asked.append((numbers, factor))
        return factor * sum(numbers)

    one, equal = [1, 2], [1, 2]
    assert [total(one, 3), total(one, 3), total(equal, 3), total(one, 2)] == [9, 9, 9, 6]
    assert [(numbers is one, factor) for numbers, factor in asked] == [(True, 3), (False, 3), (True, 2)]


def test_what_was_not_asked_about_for_long_is_let_go() -> None:
    calls = 0

    @remembered
    def first(numbers: list[int]) -> int:
        nonlocal calls
        calls += 1
        return numbers[0]

    kept = [0]
    for i in range(REMEMBERED):
        assert first([i]) == i
    assert first(kept) == 0
    assert calls == REMEMBERED + 1
    for i in range(REMEMBERED):
        assert first([i]) == i
    assert first(kept) == 0
    assert calls == 2 * REMEMBERED + 2
