"""GPUs that come and go, and what is decided about them.

A slot's *life* counts how often it came from the cloud; a worker's *incarnation* counts engines. So a late or repeated
word about an earlier life changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.autoscaler import Scale
from pearl.core.decision import Decision, GateDecision
from pearl.core.events.base import Event, Instruction
from pearl.core.layout import Layout, SlotInfo


@dataclass(frozen=True, slots=True)
class SlotJoined(Event):
    """A slot is there; no engine runs on it yet."""

    slot: SlotInfo
    life: int
    expected_lifetime_s: float | None = None
    """How long the like of it live, if anybody knows."""


@dataclass(frozen=True, slots=True)
class SlotNotice(Event):
    """The slot will be taken away in `seconds_left`."""

    worker: str
    life: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class SlotLost(Event):
    """The slot is gone, with or without a notice before."""

    worker: str
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestSlots(Instruction):
    """So many preemptible slots are wanted in all. No answer is awaited: SlotJoined follows for as many as can be had.

    Those that are too many are given back one by one (ReleaseSlot).
    """

    slots: int
    scale: Scale
    """Why, for the log."""


@dataclass(frozen=True, slots=True)
class ReleaseSlot(Instruction):
    """Nothing of ours runs on the slot any more; it can go back. No answer is awaited (SlotLost may follow)."""

    worker: str
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecordDecision(Instruction):
    """For the log: the Decision Engine was asked, because of `trigger`, and this is what follows."""

    trigger: str
    current: Layout | None
    workers: int
    decision: Decision
    role_changes: tuple[tuple[str, str, str], ...] = ()
    """(worker, role there was or "", role to have or "" if it leaves)."""


@dataclass(frozen=True, slots=True)
class RecordGate(Instruction):
    """For the log: the gate was asked, and its terms."""

    decision: GateDecision


@dataclass(frozen=True, slots=True)
class RecordOperation(Instruction):
    """For the log: an expansion, a shrink, a borrowing, a return or a change of roles began, ended or was cancelled."""

    kind: str
    number: int
    phase: str
    """"began", "prepared", "admitted", "done", "cancelled" ..."""
    workers: tuple[str, ...]
    reason: str = ""
    seconds: float = 0.0
    """Since it began."""
