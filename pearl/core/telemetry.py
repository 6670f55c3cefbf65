"""What a served turn tells the Runtime Tracker. All times in seconds, all lengths in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnTelemetry:
    """One generate request, as seen by the worker that served it. A negative number: not measured."""

    prompt_tokens: int
    """The whole context that the request came with."""
    cached_tokens: int
    """How many of them the prefix cache held."""
    queue_s: float = -1.0
    prefill_s: float = -1.0
    """Compute of the `prompt_tokens - cached_tokens`, without waiting."""
    prefill_share: float = 1.0
    """How much of the fixed cost of prefill iterations is in that: less than 1 where prompts shared one, more where the
    prompt took several."""
    decode_s: float = -1.0
    """From the first to the last generated token."""
    stall_s: float = 0.0
    """Of `decode_s`, time in which the worker prefilled others and did not decode."""
    decode_batch: float = -1.0
    """Mean number of sequences in the decode iterations that made this turn's tokens, itself included."""
    decode_kv_tokens: float = -1.0
    """Mean sum of context lengths in those iterations."""
    transfer_bytes: int = 0
    transfer_s: float = -1.0
    """Time on the wire from the prefill to the decode worker, without waiting."""
