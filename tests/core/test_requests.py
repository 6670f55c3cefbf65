"""When a provider that did not give a slot is asked again, and for what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pearl.core.requests import FIRST_S, MOST_S, Cause, Requests

OPTIONS = ("a", "b", "c")
CAUSES = st.sampled_from(list(Cause))


def test_the_next_option_is_asked_at_once_and_the_first_one_again_when_it_has_rested() -> None:
    requests = Requests(OPTIONS, first_s=10, most_s=100)
    assert requests.choose(0) == "a"
    requests.failed("a", Cause.CAPACITY, 0)
    assert requests.choose(0) == "b" and requests.wait_s(0) == 0
    requests.failed("b", Cause.QUOTA, 1)
    requests.failed("c", Cause.UNREACHABLE, 2)
    assert requests.choose(9) is None and requests.wait_s(9) == 1
    assert requests.choose(10) == "a"


def test_each_failure_in_a_row_doubles_the_rest_and_a_slot_ends_it() -> None:
    requests = Requests(("a",), first_s=10, most_s=50)
    now, rests = 0.0, []
    for _ in range(5):
        requests.failed("a", Cause.CAPACITY, now)
        rests.append(requests.wait_s(now))
        now += rests[-1]
    assert rests == [10, 20, 40, 50, 50]
    requests.given("a")
    requests.failed("a", Cause.CAPACITY, now)
    assert requests.wait_s(now) == 10


def test_many_requests_that_fail_together_are_one_failure() -> None:
    requests = Requests(("a",))
    for _ in range(20):
        requests.failed("a", Cause.CAPACITY, 0)
    assert requests.wait_s(0) == FIRST_S


def test_what_only_a_person_can_mend_rests_the_longest_at_once() -> None:
    for cause in (Cause.CREDENTIALS, Cause.CONFIGURATION):
        requests = Requests(("a", "b"))
        requests.failed("a", cause, 0)
        assert requests.choose(0) == "b"
        requests.failed("b", cause, 0)
        assert requests.choose(0) is None and requests.wait_s(0) == MOST_S


def test_an_option_without_room_is_passed_over_and_does_not_rest() -> None:
    requests = Requests(OPTIONS)
    assert requests.choose(0, lambda option: option != "a") == "b"
    assert requests.choose(0, lambda option: False) is None and requests.wait_s(0) == 0
    assert requests.choose(0) == "a"


@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from([*OPTIONS, None]), CAUSES), max_size=60))
def test_nothing_rests_longer_than_the_limit_and_the_choice_never_rests(
    steps: list[tuple[int, str | None, Cause]],
) -> None:
    requests, now = Requests(OPTIONS), 0.0
    for pause, option, cause in steps:
        now += pause
        if option is None:
            requests.given("a")
        else:
            requests.failed(option, cause, now)
        wait = requests.wait_s(now)
        assert 0 <= wait <= MOST_S
        assert (requests.choose(now) is None) == (wait > 0)
        assert requests.choose(now + wait) is not None
