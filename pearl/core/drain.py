"""Our makespan model: a batch that drains with the survivor curve, over engines with queues and finite memory.

Turn by turn, the trajectories that are left circle between environment, prefill and decode. Turn k's mean cycle is

    C = E + R_prefill + R_transfer + R_decode        and the makespan is   T = Σ_k P_k·C_k

where P_k = 1 - (1 - s_k)^B is the chance that any of B trajectories takes turn k, of which s_k do. A station at which
the others' work is in front of mine has R = α·C/(C - q): α is my own work and q the work that all the others bring
each cycle (mean value analysis in Schweitzer's form). Decode iterations are shared, so there α = r·(A + β) with
β = b + c·context, and q = r·β for each other sequence. Only those that decode are in an iteration, so the bubble comes
out of C and is no input.

* Colocated, n/N on each: prefill goes first, R_prefill = t·C/(C - q_p); decode waits for both, q = q_p + q_d.
* Pairs: prefill, link and decode workers are stations of their own. What was generated is new to the prefill worker.
* Memory: the prefixes of those who wait in the environment are kept in what active ones leave; what does not fit is
  computed again. For pairs that counts on the prefill side. Active ones that do not fit wait, which bounds C from below.
* Mixed: a turn goes where fewer requests are in flight, so both kinds of worker have the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pearl.core.layout import Layout
from pearl.core.makespan import Layouts, Seconds, layout_array
from pearl.core.workload import Profile, WorkloadProfile

Grid = NDArray[np.float64]
"""Shape (layouts, turns), or what broadcasts to it."""

PASSES = 3
"""Of memory, batch and mixture, which hang on C, which hangs on them."""
NEWTON = 4
MOVED_AT_MOST = 0.38
MOVED_HALF = 1.8
MOVED_POWER = 1.6
"""Turns that `pearl.core.routing` sends to another worker than the one with the prefix, as a function of how unevenly
requests are in flight. Fitted to simulated batches: within 2 percentage points."""
MARGIN = 1.45
CLIFF = 1.5
TURN_BINS = 10
"""Neighbouring turns are computed as one, so that long trajectories cost no more than short ones."""


@dataclass(frozen=True, slots=True)
class DrainAware:
    """See the module. The switches are ablations; the first two say what the engines do."""

    decode_keeps_kv: bool = True
    """A decode worker keeps a trajectory's KV for its next turn, so that only the new part crosses."""
    prefill_keeps_response: bool = False
    """A response's KV gets back to the prefill worker; if not, the next turn computes it again."""
    chunk_tokens: int = 8192
    """Prompt tokens of one prefill iteration at most: prompts that wait together share its fixed cost."""
    bubble: bool = True
    """Off: all trajectories decode all the time."""
    capacity: bool = True
    """Off: memory has no end."""
    queueing: bool = True
    """Off: nobody waits for anybody's prefill or transfer."""
    cache: bool = True
    """Off: no prefix is ever found."""
    drain: bool = True
    """Off: all trajectories take all S turns."""

    @property
    def name(self) -> str:
        return "drain_aware"

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return float(self.makespans(profile, layout_array([layout]), batch)[0])

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        return _Batch(self, profile, layouts, batch).makespans()


@dataclass(frozen=True, slots=True)
class Turns:
    """Bins of neighbouring turns; every array has shape (bins,)."""

    weight: Grid
    """Σ P_k: how many turns of the slowest trajectory the bin stands for."""
    live: Grid
    new: Grid
    response: Grid
    before: Grid
    """Response of the turn before."""
    environment_s: Grid
    context: Grid
    first: NDArray[np.bool_]

    @classmethod
    def of(cls, work: WorkloadProfile, batch: float, *, drain: bool) -> Turns:
        turns = work.turns
        survivors = np.array([turn.survivors for turn in turns])
        if not drain:
            survivors = np.ones(max(1, round(work.slowest_turns)))[: len(turns)]
            turns = turns[: len(survivors)]
        alive = 1.0 - (1.0 - np.minimum(survivors, 1.0)) ** batch
        columns = np.array([[t.new_tokens, t.response_tokens, t.environment_s, t.context_tokens] for t in turns]).T
        before = np.concatenate([[0.0], columns[1][:-1]])
        live = np.maximum(1.0, batch * survivors)
        table = np.stack([live, *columns, before])
        # The first turn is unlike the others, so it stays alone.
        rest = max(1, len(turns) - 1)
        bins = np.concatenate([[0], 1 + np.arange(len(turns) - 1) * min(TURN_BINS - 1, rest) // rest])
        weight = np.bincount(bins, alive)
        live, new, response, environment_s, context, before = (
            np.bincount(bins, alive * row) / np.maximum(weight, 1e-12) for row in table
        )
        return cls(weight, live, new, response, before, environment_s, context, np.arange(len(weight)) == 0)


class _Batch:
    """One call's arrays: rows are layouts, columns are bins of turns."""

    def __init__(self, model: DrainAware, profile: Profile, layouts: Layouts, batch: float) -> None:
        self.model, self.engine, self.work = model, profile.engine, profile.workload
        self.turns = Turns.of(profile.workload, batch, drain=model.drain)
        prefill, decode, colocated = (column[:, None].astype(float) for column in layouts.T)
        self.prefill, self.decode = np.maximum(prefill, 1.0), np.maximum(decode, 1.0)
        self.colocated = np.maximum(colocated, 1.0)
        self.whole = ((prefill > 0) == (decode > 0)) & (prefill + decode + colocated > 0)
        self.has_pair, self.has_colocated = decode > 0, colocated > 0
        self.prompt = self.turns.new[0]
        group = max(1.0, profile.workload.group_size)
        self.shared_alone, self.shared_pair, self.shared_decode = (
            self.prompt * np.maximum(0.0, 1.0 - side / group) for side in (self.colocated, self.prefill, self.decode)
        )
        self.hit = np.where(self.turns.first, 0.0, profile.workload.prefix_hit_rate if model.cache else 0.0)

    def makespans(self) -> Seconds:
        t, pure = self.turns, not (self.has_pair & self.has_colocated).any()
        share = np.where(self.has_pair, self.decode / (self.decode + self.colocated * self.has_colocated), 0.0)
        alone = pair = np.zeros((1, len(t.live)))
        for _ in range(1 if pure else 3):
            if self.has_colocated.any():
                alone = self._colocated_s(t.live * (1.0 - share))
            if self.has_pair.any():
                pair = self._pair_s(t.live * share)
            if not pure:
                # Equal requests in flight on every worker that answers.
                rate, other = self.decode / np.maximum(pair, 1e-9), self.colocated / np.maximum(alone, 1e-9)
                mixed = rate / (rate + other)
                share = np.where(self.has_pair, np.where(self.has_colocated, mixed, 1.0), 0.0)
        cycle = t.environment_s + share * pair + (1.0 - share) * alone
        result: Seconds = np.where(self.whole[:, 0], cycle @ t.weight, np.inf)
        return result

    # --- the two kinds of service -----------------------------------------------------------------

    def _colocated_s(self, live: Grid) -> Grid:
        """Seconds from a turn's request to its answer where `live` trajectories share the colocated workers."""
        e, t = self.engine, self.turns
        load = np.maximum(1.0, live / self.colocated)
        others = load - 1.0
        miss = np.zeros_like(load)
        most = np.maximum(1.0, np.minimum(load, self.model.chunk_tokens / t.new))
        together = np.ones_like(load)
        decoding = load
        response = np.zeros_like(load)
        for _ in range(PASSES):
            compute = self._prefill_s(t.new, t.context, miss, self.shared_alone)
            start = e.prefill_fixed_s + e.turn_overhead_s
            work = compute + start
            fixed, each = self._decode_costs(decoding)
            ahead = others * (compute + start / together) if self.model.queueing else np.zeros_like(work)
            stations = [(work, ahead), (t.response * (fixed + each), ahead + others * t.response * each)]
            cycle = self._cycle(t.environment_s, stations)
            if self.model.capacity:
                active = e.kv_capacity_tokens / (t.context + t.new + t.response)
                slots = np.minimum(np.maximum(1.0, active), e.max_running_requests)
                at_once = np.minimum(load, slots)
                busy = at_once * (compute + start / together) + t.response * (fixed + each * at_once)
                cycle = np.maximum(cycle, load / at_once * busy)
            # The first turn comes all at once: nobody's environment hides anybody's prefill.
            burst = load * (compute + start / most) + t.response * (fixed + each * load) + t.environment_s
            cycle = np.where(t.first, np.maximum(cycle, burst), cycle)
            response = cycle - t.environment_s
            rate = others / cycle
            arrivals = rate * (start + fixed + each * decoding) / np.maximum(1.0 - rate * compute, 0.1)
            together = np.minimum(most, 1.0 + arrivals)
            evicted = self._evicted(load, t.context + t.new + t.response, self.shared_alone)
            miss = 1.0 - (1.0 - evicted) * (1.0 - self._moved(load, load * response / cycle, self.colocated))
            decode_s = response - work
            decoding = 1.0 + others * np.clip(decode_s / cycle, 0.0, 1.0) if self.model.bubble else load
        return response

    def _pair_s(self, live: Grid) -> Grid:
        """The same for prefill-decode pairs."""
        e, t = self.engine, self.turns
        on_prefill, on_decode = (np.maximum(1.0, live / side) for side in (self.prefill, self.decode))
        again = np.zeros_like(t.before) if self.model.prefill_keeps_response else t.before
        new, known = t.new + again, np.maximum(t.context - again, 0.0)
        miss = moved = np.zeros_like(on_prefill)
        most = np.maximum(1.0, np.minimum(on_prefill, self.model.chunk_tokens / new))
        together = np.ones_like(on_prefill)
        decoding = on_decode
        response = np.zeros_like(on_decode)
        for _ in range(PASSES):
            compute = self._prefill_s(new, known, miss, self.shared_pair)
            work = compute + e.prefill_fixed_s
            crossing = t.context + t.new
            if self.model.decode_keeps_kv:
                crossing = moved * crossing + (1.0 - moved) * t.new
            transfer = e.transfer_latency_s + crossing * e.kv_bytes_per_token / e.transfer_bytes_per_s
            fixed, each = self._decode_costs(decoding)
            queueing = 1.0 if self.model.queueing else 0.0
            ahead = [queueing * (on_prefill - 1.0) * s for s in (compute + e.prefill_fixed_s / together, transfer)]
            own = t.response * (fixed + each)
            stations = [(work, ahead[0]), (transfer, ahead[1]), (own, (on_decode - 1.0) * t.response * each)]
            cycle = self._cycle(t.environment_s, stations)
            if self.model.capacity:
                active = e.kv_capacity_tokens / (t.context + t.new + t.response)
                slots = np.minimum(np.maximum(1.0, active), e.max_running_requests)
                at_once = np.minimum(on_decode, slots)
                busy = transfer + t.response * (fixed + each * at_once)
                cycle = np.maximum(cycle, on_decode / at_once * busy)
            burst = (
                on_prefill * (compute + e.prefill_fixed_s / most)
                + transfer
                + t.response * (fixed + each * on_decode)
                + t.environment_s
            )
            cycle = np.where(t.first, np.maximum(cycle, burst), cycle)
            response = cycle - t.environment_s
            rate = (on_prefill - 1.0) / cycle
            arrivals = rate * e.prefill_fixed_s / np.maximum(1.0 - rate * compute, 0.1)
            together = np.minimum(most, 1.0 + arrivals)
            on_link = response - own * cycle / np.maximum(cycle - (on_decode - 1.0) * t.response * each, 1e-9)
            evicted = self._evicted(on_prefill, t.context + t.new, self.shared_pair)
            miss = 1.0 - (1.0 - evicted) * (1.0 - self._moved(on_prefill, on_prefill * on_link / cycle, self.prefill))
            dropped = self._evicted(on_decode, t.context + t.new + t.response, self.shared_decode)
            moved = 1.0 - (1.0 - dropped) * (1.0 - self._moved(on_decode, on_decode * response / cycle, self.decode))
            decoding = 1.0 + (on_decode - 1.0) * np.clip(own / cycle, 0.0, 1.0) if self.model.bubble else on_decode
        return response

    # --- their parts ------------------------------------------------------------------------------

    def _prefill_s(self, new: Grid, known: Grid, miss: Grid, shared: Grid) -> Grid:
        """Compute of a turn's prefill without the fixed cost, found prefixes and lost ones in their proportion."""
        first = np.where(self.turns.first, shared, 0.0)
        warm = self._prefill_cost(new - first, known + first)
        lost = np.minimum(shared, known)
        cold = self._prefill_cost(new - first + known - lost, first + lost)
        hit = self.hit * (1.0 - miss)
        found = np.where(self.turns.first, 1.0, hit)
        return found * warm + (1.0 - found) * cold

    def _prefill_cost(self, new: Grid, known: Grid) -> Grid:
        e = self.engine
        return e.prefill_s_per_token * new + e.prefill_s_per_token2 * new * (new / 2 + known)

    def _decode_costs(self, decoding: Grid) -> tuple[Grid, Grid]:
        """(A, β) of an iteration with about `decoding` sequences; the experts' saturating term as its tangent."""
        e, t = self.engine, self.turns
        context = t.context + t.new + t.response / 2
        each = e.decode_s_per_sequence + e.decode_s_per_kv_token * context
        fixed = e.decode_fixed_s
        if not e.expert_fixed_s:
            return np.full_like(decoding, fixed), np.broadcast_to(each, decoding.shape)
        left = (1.0 - e.expert_share) ** decoding
        slope = -e.expert_fixed_s * np.log1p(-e.expert_share) * left
        return fixed + e.expert_fixed_s * (1.0 - left) - slope * decoding, each + slope

    def _evicted(self, load: Grid, held: Grid, shared: Grid) -> Grid:
        """Share of the prefixes of `load` trajectories of `held` tokens that are gone when their trajectory comes back.

        Turns come round almost in a circle, where evicting the least recently used one is the worst there is: a little
        too many and each evicts the next. And batches differ, and a cliff is not to be met on average.
        """
        if not self.model.capacity:
            return np.zeros_like(load)
        wanted = MARGIN * load * np.maximum(held - shared, 1.0)
        return np.clip(CLIFF * (1.0 - self.engine.kv_capacity_tokens / wanted), 0.0, 1.0)

    def _moved(self, load: Grid, in_flight: Grid, workers: Grid) -> Grid:
        """Share of the turns that go where their prefix is not. What moves them is the unevenness of the requests in
        flight; of `load` trajectories a worker each is in flight or not, which has the variance of the binomial law."""
        power = np.maximum(in_flight * (1.0 - in_flight / load), 0.0) ** MOVED_POWER
        return MOVED_AT_MOST * (1.0 - 1.0 / workers) * power / (power + MOVED_HALF**MOVED_POWER)

    def _cycle(self, delay: Grid, stations: list[tuple[Grid, Grid]]) -> Grid:
        """C = delay + Σ α·C/(C - q), by Newton's method from below; concave, so it never passes the root."""
        own = sum(alpha for alpha, _ in stations) + delay
        cycle = own
        for alpha, q in stations:
            total = own + q
            root = 0.5 * (total + np.sqrt(np.maximum(total * total - 4.0 * (own - alpha) * q, 0.0)))
            cycle = np.maximum(cycle, root)
        for _ in range(NEWTON):
            value, slope = cycle - delay, np.ones_like(cycle)
            for alpha, q in stations:
                gap = np.maximum(cycle - q, 1e-12)
                value = value - alpha * cycle / gap
                slope = slope + alpha * q / (gap * gap)
            cycle = cycle - value / slope
        return cycle
