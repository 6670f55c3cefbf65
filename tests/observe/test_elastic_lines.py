"""What the console says of decisions and gates: news, once."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from pearl.core import events as ev
from pearl.core.decision import Candidate, Decision, GateDecision
from pearl.core.layout import Layout
from pearl.observe.console import RunConsole
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


def test_an_engine_that_goes_with_its_slot_is_no_loss_of_its_own() -> None:
    output = io.StringIO()
    pipeline: Any = SimpleNamespace()
    screen = RunConsole(Console(file=output, width=200), pipeline)
    lost = ev.WorkerLost("preemptible-0", 1, "its engine ended; its log ends:\nbye")
    screen.saw(0.0, lost)
    screen.saw(1.0, ev.SlotNotice("preemptible-0", 1, 12.0))
    screen.saw(2.0, lost)
    screen.saw(3.0, ev.SlotLost("preemptible-0", 1, "given back"))
    screen.saw(4.0, lost)
    loss = "preemptible-0 is lost: its engine ended; its log ends"
    assert output.getvalue().splitlines() == [
        loss, "elastic preemptible-0 has notice: 12 s left", "elastic preemptible-0 left: given back", loss,
    ]  # fmt: skip
