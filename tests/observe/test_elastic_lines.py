"""What the console says of decisions and gates: news, once."""

from __future__ import annotations

from pearl.core import events as ev
from pearl.core.decision import Candidate, Decision, GateDecision
from pearl.core.layout import Layout
from pearl.observe.elastic import Lines

ALONE, PAIR = Layout(colocated=2), Layout(prefill=1, decode=1)


def decided(current: Layout | None, chosen: Layout, best: Layout) -> ev.RecordDecision:
    candidates = (Candidate(Layout(prefill=2), 1.0, "nobody decodes"), Candidate(best, 2.0, ""))
    return ev.RecordDecision("step", current, 2, Decision(chosen, 3.0, None, False, ("why",), candidates), ())


def gate(slots: int) -> ev.RecordGate:
    return ev.RecordGate(GateDecision(slots > 0, slots, 1, 2, 3.0, 2.0, 1.0, "why"))


def test_a_layout_is_told_when_it_changes() -> None:
    lines = Lines()
    assert lines.line(decided(None, ALONE, ALONE)) == "layout (step, 2 workers): 2C: why"
    assert lines.line(decided(ALONE, ALONE, ALONE)) is None
    assert lines.line(decided(ALONE, PAIR, PAIR)) == "layout (step, 2 workers): 2C -> 1P1D: why"


def test_a_layout_that_stays_is_told_once_for_each_better_one() -> None:
    lines = Lines()
    assert lines.line(decided(ALONE, ALONE, PAIR)) is not None
    assert lines.line(decided(ALONE, ALONE, PAIR)) is None
    assert lines.line(decided(PAIR, PAIR, ALONE)) is not None


def test_that_nothing_is_borrowed_is_told_once_until_something_is() -> None:
    lines = Lines()
    assert [lines.line(gate(slots)) for slots in (0, 0, 1, 0)] == [
        "nothing is borrowed: why", None, None, "nothing is borrowed: why",
    ]  # fmt: skip
