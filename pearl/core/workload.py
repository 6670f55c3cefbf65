"""What the makespan models are computed from: a profile of the engine and one of the workload.

`EngineProfile` is of one *worker* (a tensor-parallel group) for one model on one kind of GPU:

    t_prefill(n, cached) = p0 + p1·n + p2·n·(n/2 + cached)
    t_decode(batch, kv)  = A + b·batch + c·kv + m·(1 - (1 - s)^batch)       (the last term: experts touched by a batch)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.core.identity import remembered


@dataclass(frozen=True, slots=True)
class EngineProfile:
    prefill_fixed_s: float
    """p0: fixed cost of a prefill batch."""
    prefill_s_per_token: float
    """p1: t_prefill of the source."""
    prefill_s_per_token2: float
    """p2: attention over what is before."""
    decode_fixed_s: float
    """A: reading the weights once."""
    decode_s_per_sequence: float
    """b: one more concurrent sequence."""
    decode_s_per_kv_token: float
    """c: reading one token's KV."""
    kv_bytes_per_token: float
    """K."""
    kv_capacity_tokens: int
    """H_max in tokens: what one worker can hold."""
    transfer_bytes_per_s: float
    """BW between two workers."""
    transfer_latency_s: float = 0.0
    expert_fixed_s: float = 0.0
    """m: reading all experts once; 0 for a dense model."""
    expert_share: float = 0.0
    """s: share of the experts that one token activates."""
    turn_overhead_s: float = 0.0
    """T_over of the source: what switching between prefill and decode costs a turn on a colocated worker."""
    max_running_requests: int = 256
    """Sequences that one worker decodes at once at most."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """Turn k over all trajectories of a batch."""

    survivors: float
    """Share of the trajectories that take this turn at all; 1.0 for the first, never rising."""
    new_tokens: float
    """Mean new prompt tokens (the first prompt, then observations)."""
    response_tokens: float
    environment_s: float
    """Mean time in the environment behind this turn."""
    context_tokens: float
    """Mean context in front of this turn's new tokens."""


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """The Runtime Tracker's view of the rollout workload."""

    turns: tuple[TurnShape, ...]
    """The survivor curve, at least one turn."""
    slowest_turns: float
    """S: turns of the slowest trajectory of a batch."""
    new_tokens_per_turn: float
    """ΔL."""
    response_tokens_per_turn: float
    """r."""
    bubble_ratio: float
    """θ = (1 - f)/f, f = time-weighted fraction of the live trajectories that are decoding."""
    prefix_hit_rate: float = 1.0
    """Share of the context in front of a turn's new tokens that is found in the cache of the worker that had it, where
    its capacity allows that: what new weights and restarts leave."""
    in_flight: float = 0.0
    """Measured: trajectories that live at once, as a mean over time. 0: not measured."""
    prefill_s_per_new_token: float = 0.0
    """Measured: seconds of prefill by new prompt tokens, prefixes that were lost for whatever reason included. 0: not
    measured."""
    group_size: float = 1.0
    """Trajectories that share a first prompt, whose KV a worker computes and holds once."""
    environment_s_per_turn: float = 0.0
    environment_cv: float = 0.0
    """Standard deviation over the mean, between trajectories at the same turn."""
    response_cv: float = 0.0
    confidence: dict[str, float] = field(default_factory=dict)
    """Per field, and of the engine's prefill, decode and transfer costs: 0 = a prior, 1 = measured and steady."""

    @property
    def final_context_tokens(self) -> float:
        """K_seq in tokens: what a trajectory holds at its longest, as the mean over the trajectories."""
        return _final_context_tokens(self)

    def load(self, batch: float) -> float:
        """Trajectories of a batch that, alone, would be as many at once on average as live now; at least `batch`.

        With staleness, batches overlap: engines serve more than one batch, and a batch does not drain alone. A batch
        that is alone has less of them alive than it began with: Σ s_k of its S turns.
        """
        alive = sum(turn.survivors for turn in self.turns) / max(self.slowest_turns, 1.0)
        return max(batch, self.in_flight / max(alive, 1e-3))

    @property
    def peak_context_tokens(self) -> float:
        """What a batch holds at once while it drains, at the most, by its trajectories: the largest s_k·(context behind
        turn k). Those that are left grow, but ever fewer are."""
        return max(turn.survivors * _behind(turn) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Profile:
    engine: EngineProfile
    workload: WorkloadProfile


@remembered
def _final_context_tokens(work: WorkloadProfile) -> float:
    after = [turn.survivors for turn in work.turns[1:]] + [0.0]
    ending = [(turn, turn.survivors - later) for turn, later in zip(work.turns, after, strict=True)]
    return sum(share * _behind(turn) for turn, share in ending)


def _behind(turn: TurnShape) -> float:
    """Context behind a turn, in tokens."""
    return turn.context_tokens + turn.new_tokens + turn.response_tokens
