"""What an engine's decode iterations were like during a request, seen from outside.

The engine does not say how many sequences each iteration had. But every answer streams through one process, so between
two streamed replies the decoding requests and their contexts are known; their integrals over time give means over any
request's life. Prefills, which hold decoding up, are known from the engine's own timestamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoded:
    """Means over the time from a request's first token to its last."""

    batch: float = -1.0
    """Decoding requests, itself included; negative: no time went by."""
    kv_tokens: float = -1.0
    """Sum of their contexts."""
    stall_s: float = -1.0
    """Of that time, how long others' prompts were computed."""
    prefill_s: float = -1.0
    """Its share, by tokens, of the iteration that computed its prompt."""
    prefill_share: float = 1.0


@dataclass(slots=True)
class _Prompts:
    """Those of one prefill iteration."""

    seconds: float
    tokens: int = 0


@dataclass(slots=True)
class _Stay:
    context: int
    since_s: float
    batch_before: float
    kv_before: float
    stall_before: float
    prompt: _Prompts | None
    new_tokens: int


class DecodeMeter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = clock()
        self._stays: dict[str, _Stay] = {}
        self._contexts = 0
        self._batch_s = self._kv_s = self._prefill_s = 0.0
        """Integrals over time: requests, contexts, and seconds of prefill."""
        self._prefilled_until = 0.0
        self._prompts: dict[float, _Prompts] = {}
        """The newest iteration, by its beginning."""

    def joined(self, request: str, context: int, new: int, prefill: tuple[float, float] | None) -> None:
        """Its first token is there. `new` of its tokens were not cached; they were computed in an iteration that lasted
        from and to these readings of the engine's clock, if it says so."""
        now = self._advance()
        prompts = None
        if prefill is not None:
            began, ended = prefill
            if began not in self._prompts:
                self._prefill_s += max(0.0, ended - max(began, self._prefilled_until))
                self._prefilled_until = max(self._prefilled_until, ended)
                self._prompts = {began: _Prompts(ended - began)}
            prompts = self._prompts[began]
            prompts.tokens += new
        self._stays[request] = _Stay(context, now, self._batch_s, self._kv_s, self._prefill_s, prompts, new)
        self._contexts += context

    def grew(self, request: str, tokens: int) -> None:
        self._advance()
        self._stays[request].context += tokens
        self._contexts += tokens

    def left(self, request: str) -> Decoded:
        """It ended; harmless if it never joined."""
        now = self._advance()
        stay = self._stays.pop(request, None)
        if stay is None:
            return Decoded()
        self._contexts -= stay.context
        prefill_s, share = -1.0, 1.0
        if stay.prompt is not None and stay.new_tokens > 0:
            share = stay.new_tokens / stay.prompt.tokens
            prefill_s = stay.prompt.seconds * share
        seconds = now - stay.since_s
        if seconds <= 0:
            return Decoded(prefill_s=prefill_s, prefill_share=share)
        means = ((self._batch_s - stay.batch_before) / seconds, (self._kv_s - stay.kv_before) / seconds)
        return Decoded(*means, min(seconds, self._prefill_s - stay.stall_before), prefill_s, share)

    def _advance(self) -> float:
        now = self._clock()
        self._batch_s += (now - self._now) * len(self._stays)
        self._kv_s += (now - self._now) * self._contexts
        self._now = now
        return now
