"""What executors measured, for the event log: the machines take no note of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pearl.core.events import Event


@dataclass(frozen=True, slots=True)
class MemoryMoved(Event):
    """Device memory was given back or taken: `what` is release, resume (an engine), offload or reload (a rank)."""

    what: str
    who: str
    measured: dict[str, Any] = field(default_factory=dict)
    """As the actor said: bytes and seconds."""


@dataclass(frozen=True, slots=True)
class WeightsCopied(Event):
    """A host has a copy of the weights of `version` that `slot` fetched, for all slots of the host."""

    version: int
    host: str
    slot: str
    bytes_from: dict[str, int]
    """By the slot that gave them."""
    seconds: float
    left: dict[str, str] = field(default_factory=dict)
    """Why a slot that gave some of it was left for another one."""
