"""Elasticity as a person reads it: one line per decision, gate and operation, and the counts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from pearl.cluster.adapter import RequestFailed
from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout, Mode
from pearl.core.trajectory import Trajectory

FORCED_S = 15.0
"""Beyond its deadline a return may take as long as it takes to kill a process."""


class Lines:
    """What the console says of each entry: None where it says nothing new. The event log has all of them."""

    def __init__(self) -> None:
        self._kept: tuple[Layout, Layout] | None = None
        """The layout that stayed and the better one, when that was told."""
        self._borrows: bool | None = None

    def line(self, entry: Event | Instruction) -> str | None:
        match entry:
            case ev.RecordDecision():
                return self._decision(entry)
            case ev.RecordGate(decision=gate):
                before, self._borrows = self._borrows, gate.borrow
                # That something is borrowed, and why, is told when it begins.
                return None if gate.borrow or before is False else f"nothing is borrowed: {gate.reason}"
            case ev.RecordOperation():
                after = f" after {entry.seconds:.1f} s" if entry.seconds else ""
                why = f" ({one_line(entry.reason)})" if entry.reason else ""
                return f"{entry.kind} {entry.number} {entry.phase}: {', '.join(entry.workers)}{after}{why}"
            case ev.RequestSlots():
                return f"{entry.slots} preemptible slots are wanted: {entry.scale.reason}"
            case ev.SlotJoined():
                return f"{entry.slot.name} joined (life {entry.life})"
            case ev.SlotNotice():
                return f"{entry.worker} has notice: {entry.seconds_left:.0f} s left"
            case ev.SlotLost():
                return f"{entry.worker} left: {one_line(entry.reason)}"
            case RequestFailed():
                return f"no slot: {one_line(entry.reason)}"
        return None

    def _decision(self, entry: ev.RecordDecision) -> str | None:
        """A layout that stays is told once for each better one that did not save enough."""
        decision = entry.decision
        if entry.current == decision.layout:
            feasible = (c for c in decision.candidates if not c.infeasible)
            kept = decision.layout, next((c.layout for c in feasible), decision.layout)
            if kept == self._kept or kept[0] == kept[1]:
                return None
            self._kept = kept
        elif not decision.candidates and decision.layout.mode is Mode.COLOCATED:
            return None  # it could not have been another one
        terms = "; ".join(decision.reasons)
        return f"layout ({entry.trigger}, {entry.workers} workers): {_change(entry.current, decision.layout)}: {terms}"


def _change(current: Layout | None, chosen: Layout) -> str:
    return f"{chosen}" if current is None or current == chosen else f"{current} -> {chosen}"


def one_line(text: str) -> str:
    """The first line of a reason; the last words of a process follow it."""
    return text.partition("\n")[0].removesuffix(":")


class ElasticCounts:
    """Observer: counts and medians of durations for `--json`."""

    def __init__(self, return_deadline_s: float) -> None:
        self.return_deadline_s = return_deadline_s
        self.counts = dict.fromkeys(
            (
                "joins", "leaves", "kills", "borrows", "returns", "return_deadline_misses", "role_switches",
                "mode_switches", "expansions_cancelled",
            ),
            0,
        )  # fmt: skip
        self.seconds: dict[str, list[float]] = {
            name: [] for name in ("prep_s", "finalise_s", "activate_s", "deactivate_s", "role_switch_s")
        }
        self._drained: set[str] = set()
        """Slots of which nothing ran any more when they went."""
        self._prepared: dict[int, float] = {}
        self._joined: set[int] = set()
        """Expansions by slots that joined."""
        self._returning: float | None = None
        """When the present return began, if overlap workers were to leave."""
        self._switching: dict[str, float] = {}

    def saw(self, now: float, entry: Event | Instruction) -> None:
        match entry:
            case ev.SlotJoined():
                self.counts["joins"] += 1
                self._drained.discard(entry.slot.name)
            case ev.ReleaseSlot():
                self._drained.add(entry.worker)
            case ev.SlotLost():
                self.counts["leaves" if entry.worker in self._drained else "kills"] += 1
            case ev.RecordOperation():
                self._operation(now, entry)
            case ev.SetTimer() if entry.name.startswith("return:"):
                self._returning = now
            case ev.ReloadTrainer() if self._returning is not None:
                late = now - self._returning > self.return_deadline_s + FORCED_S
                self.counts["return_deadline_misses"] += late
            case ev.RecordDecision() if entry.current is not None:
                self.counts["mode_switches"] += entry.current.mode is not entry.decision.layout.mode
            case ev.SwitchRole():
                self._switching[entry.worker] = now
            case ev.RoleSwitched() if entry.worker in self._switching:
                self.counts["role_switches"] += 1
                self.seconds["role_switch_s"].append(now - self._switching.pop(entry.worker))

    def _operation(self, now: float, entry: ev.RecordOperation) -> None:
        match entry.kind, entry.phase:
            case "expand", "began" if entry.reason == "joined":
                self._joined.add(entry.number)
            case "expand", "prepared" if entry.number in self._joined:
                self._prepared[entry.number] = entry.seconds
                self.seconds["prep_s"].append(entry.seconds)
            case "expand", "admitted" if entry.number in self._prepared:
                self.seconds["finalise_s"].append(entry.seconds - self._prepared.pop(entry.number))
            case "expand", "cancelled":
                self.counts["expansions_cancelled"] += 1
            case "borrow", "admitted":
                self.counts["borrows"] += 1
                self.seconds["activate_s"].append(entry.seconds)
            case "return", "began":
                self._returning = None
            case "return", "done":
                self.counts["returns"] += 1
                self.seconds["deactivate_s"].append(entry.seconds)

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        pass

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        """Counts, and medians in seconds (None where nothing was measured)."""
        return {**self.counts, **{name: _median(values) for name, values in self.seconds.items()}}


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return round(median(known), 2) if known else None
