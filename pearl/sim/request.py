"""One request to an engine, and what is measured of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.core.trajectory import FinishReason, TrajectoryId

if TYPE_CHECKING:
    from pearl.sim.engine import Engine


class Request:
    """One Generate on its way. `wanted` tokens end it, with `finish`."""

    __slots__ = (
        "asked_s", "batch_before", "cached", "context", "finish", "first_s", "first_step", "kv_before", "left", "made",
        "over", "prefill", "prefill_s", "prefill_share", "shared", "stall_before", "started_s", "trajectory",
        "transfer_bytes", "transfer_s", "version", "wanted", "worker",
    )  # fmt: skip

    def __init__(
        self, trajectory: TrajectoryId, version: int, context: int, shared: int, wanted: int, finish: FinishReason
    ) -> None:
        self.trajectory, self.version = trajectory, version
        self.context = context
        """Tokens that it comes with."""
        self.shared = shared
        """How many of them are the group's prompt."""
        self.wanted, self.finish = wanted, finish
        self.worker: Engine
        """Where it decodes, and which answers."""
        self.prefill: Engine | None = None
        """The other half, until it has handed the KV on."""
        self.over = False
        self.asked_s = self.started_s = self.first_s = -1.0
        self.left = 0
        """Tokens to prefill yet."""
        self.made = 0
        """Tokens of it that are part of `context` since it was retracted."""
        self.cached = 0
        self.prefill_s = self.prefill_share = 0.0
        self.transfer_bytes = 0
        self.transfer_s = -1.0
        self.first_step = -1
        """The worker's count of iterations when this one began to decode; negative before."""
        self.batch_before = self.kv_before = self.stall_before = 0.0
