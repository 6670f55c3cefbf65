"""What all events and instructions are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a sample ended. Each sample ends exactly once."""

    TRAINED = "trained"
    FAILED = "failed"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to do."""
