"""How long an engine's iterations take: the formulas of `pearl.core.workload`, and sums of them in closed form.

Between two changes of the batch the context sum grows by `batch` tokens an iteration and the iteration's time is affine
in it, so k iterations take `alpha·k + beta·k²` and need not be stepped one by one.
"""

from __future__ import annotations

import math

from pearl.core.workload import EngineProfile


def prefill_compute_s(profile: EngineProfile, tokens: int, before: int) -> float:
    """Prefill of `tokens` behind `before` ones that are in the cache, without the batch's fixed cost."""
    return profile.prefill_s_per_token * tokens + profile.prefill_s_per_token2 * tokens * (tokens / 2 + before)


def decode_s(profile: EngineProfile, batch: int, kv_tokens: float) -> float:
    """One decode iteration of `batch` sequences whose contexts sum up to `kv_tokens`."""
    seconds = profile.decode_fixed_s + profile.decode_s_per_sequence * batch + profile.decode_s_per_kv_token * kv_tokens
    if profile.expert_fixed_s:
        seconds += profile.expert_fixed_s * (1 - (1 - profile.expert_share) ** batch)
    return seconds


class DecodeRun:
    """Consecutive decode iterations of one batch, the first with `kv_tokens` of context."""

    __slots__ = ("alpha", "beta")

    def __init__(self, profile: EngineProfile, batch: int, kv_tokens: int) -> None:
        self.beta = profile.decode_s_per_kv_token * batch / 2
        self.alpha = decode_s(profile, batch, kv_tokens) - self.beta

    def seconds(self, iterations: int) -> float:
        return iterations * (self.alpha + self.beta * iterations)

    def within(self, seconds: float) -> float:
        """Inverse of `seconds`: iterations, with the fraction of the last one."""
        if self.beta * seconds < 1e-12 * self.alpha * self.alpha:
            return seconds / self.alpha
        return (math.sqrt(self.alpha * self.alpha + 4 * self.beta * seconds) - self.alpha) / (2 * self.beta)
