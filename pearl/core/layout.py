"""Names of what is decided about: roles, zones, slots, layouts.

A *worker* is a tensor-parallel group of GPUs on one host: a slot with a fixed binding. A *layout* says how many workers
have which role; N in every formula counts workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    COLOCATED = "colocated"
    """Prefills and decodes."""
    PREFILL = "prefill"
    DECODE = "decode"


class Zone(StrEnum):
    """Whose GPUs a rollout slot has."""

    RESERVED = "reserved"
    """Dedicated to rollout, there to stay."""
    PREEMPTIBLE = "preemptible"
    """Dedicated to rollout as long as the cloud lets us."""
    OVERLAP = "overlap"
    """The training GPUs: borrowed between updates."""


class Mode(StrEnum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    MIXED = "mixed"
    """Colocated workers beside prefill-decode pairs."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One rollout slot: what it is bound to, for as long as it exists."""

    name: str
    zone: Zone = Zone.RESERVED
    gpus: tuple[str, ...] = ()
    """Cluster-wide GPU ids, "host/index"."""
    host: str = ""
    trainer_ranks: tuple[int, ...] = ()
    """Of an overlap slot: the training ranks on the same GPUs."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How many workers have which role. Feasible ones have both prefill and decode workers or neither."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def mode(self) -> Mode:
        if not self.prefill and not self.decode:
            return Mode.COLOCATED
        return Mode.MIXED if self.colocated else Mode.DISAGGREGATED

    @property
    def whole(self) -> bool:
        """Every request can be served: there is a worker, and no half of a pair without the other."""
        return self.workers > 0 and (self.prefill > 0) == (self.decode > 0)

    def count(self, role: Role) -> int:
        return {Role.COLOCATED: self.colocated, Role.PREFILL: self.prefill, Role.DECODE: self.decode}[role]

    def __str__(self) -> str:
        """ "8C", "3P5D" or "2C+1P1D"."""
        pairs = f"{self.prefill}P{self.decode}D" if self.prefill or self.decode else ""
        alone = f"{self.colocated}C" if self.colocated or not pairs else ""
        return "+".join(part for part in (alone, pairs) if part)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Inverse of `str`; raises ValueError."""
        match = re.fullmatch(r"(?:(\d+)C)?\+?(?:(\d+)P(\d+)D)?", text.strip())
        if not text.strip() or match is None or not any(match.groups()):
            raise ValueError(f"{text!r} is not a layout; write 8C, 3P5D or 2C+1P1D")
        colocated, prefill, decode = (int(part or 0) for part in match.groups())
        return cls(prefill, decode, colocated)
