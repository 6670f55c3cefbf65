"""Our makespan model: a batch that drains with the survivor curve, over engines with queues and finite memory.

Turn by turn, the trajectories that are left circle between environment, prefill and decode. Turn k's mean cycle is

    C = E + R_prefill + R_transfer + R_decode        and the makespan is   T = Σ_k P_k·C_k + tail

where P_k = 1 - (1 - s_k)^B is the chance that any of B trajectories takes turn k, of which s_k do. A station at which
the others' work is in front of mine has R = α·C/(C - q): α is my own work and q the work that all the others bring
each cycle (mean value analysis in Schweitzer's form). Prefill is more regular than that form supposes, so there
R = α + ½·α·q/(C - q). Decode iterations are shared, so there α = r·(A + β) with β = b + c·context, and q = r·β for each
other sequence. Only those that decode are in an iteration, so the bubble comes out of C and is no input.

* Colocated, n/N on each: prefill goes first, as above; decode waits for both, q = q_p + q_d.
* Pairs: prefill, link and decode workers are stations of their own. What was generated is new to the prefill worker.
* Prefixes are lost where the router moves a turn and where memory is short; then they are computed again. For pairs
  that counts on the prefill side. Active contexts that do not fit wait, which bounds C from below.
* Mixed: a turn goes where fewer requests are in flight, so both kinds of worker have the same number.
* Tail: the last trajectory's environment and answers took longer than the mean ones'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pearl.core.layout import Layout
from pearl.core.makespan import Layouts, Seconds, layout_array
from pearl.core.stations import Grid, cycle_s
from pearl.core.turns import TurnBins
from pearl.core.workload import Profile

PASSES = 2
"""Of memory, batch and mixture, which hang on C, which hangs on them."""
CONGESTED = 0.5
"""Share of its life for which a trajectory is in flight where turns are moved the most. The first pass supposes that: a
batch begins all at once, so where lost prefixes lengthen the round and a longer round loses prefixes, it is the longer
of two possible rounds that comes about. From there two passes get within 0.3 % of the fixed point (1 % for mixed
layouts); from the other side they creep."""
MOVED_AT_MOST = 0.36
MOVED_HALF = 1.6
MOVED_POOL = 1.6
"""Turns that `pearl.core.routing` sends to another worker than the one with the prefix, as a function of how unevenly
requests are in flight and of how many other workers there are. Fitted to 8,000 turns of simulated batches: within 5
percentage points, and on average within 1 for colocated, prefill and decode workers alike."""
PREFILL_WAIT = 0.5
"""Of the wait that exponential service would have: prompts are served in turn and take about equally long, and behind
regular service one waits half as long."""
MARGIN = 1.4
CLIFF = 1.5
"""Prefixes begin to be lost when what they are expected to fill, times 1.4, is the memory: trajectories are of unequal
length, and so are workers' shares. Then lost ones grow 1.5 times as fast as what does not fit. Fitted to simulated
batches."""
SPREAD = 0.5
"""Batches of few tasks differ: with g groups, half of them have 1 + 0.5/sqrt(g) times as many trajectories left after
some turns as expected, the others so many fewer, and the makespan is the mean of both. Where a layout is close to a
cliff (of memory, of a prefill pool that just keeps up), that is more than what the mean batch takes. Fitted as well."""
TAIL = 0.8
"""Standard deviations by which the last of a batch's trajectories exceeds the mean of those with its number of turns.
Fitted to simulated batches of 16 to 128 trajectories, over which it hardly changes."""


@dataclass(frozen=True, slots=True)
class DrainAware:
    """See the module. The first three say what the engines do; the other switches are ablations."""

    decode_keeps_kv: bool = True
    """A decode worker keeps a trajectory's KV for its next turn, so that only the new part crosses."""
    prefill_keeps_response: bool = False
    """A response's KV gets back to the prefill worker; if not, the next turn computes it again."""
    chunk_tokens: int = 8192
    """Prompt tokens of one prefill iteration at most: prompts that wait together share its fixed cost."""
    affinity: float = 1.0
    """Share of turns that ask for the worker with their prefix (`PipelineSettings.affinity`)."""
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
        prefill, decode, colocated = layouts.T
        whole = ((prefill > 0) == (decode > 0)) & (prefill + decode + colocated > 0)
        if not whole.all():
            result = np.full(len(layouts), np.inf)
            if whole.any():
                result[whole] = self.makespans(profile, layouts[whole], batch)
            return result
        return _Batch(self, profile, layouts, batch).makespans()

    def bubble_ratio(self, profile: Profile, layout: Layout, batch: float) -> float:
        """θ = (1 - f)/f, f = share of their lives in which the trajectories decode; for a profile that has none yet."""
        return _Batch(self, profile, layout_array([layout]), batch).bubble_ratio()


class _Batch:
    """One call's arrays. Columns are bins of turns. Rows are *sides*: the colocated workers of each layout that has
    any, then the pairs of each that has any; a mixed layout has two. Each layout is there twice, for a heavier batch
    than the mean one and for a lighter one."""

    def __init__(self, model: DrainAware, profile: Profile, layouts: Layouts, batch: float) -> None:
        self.model, self.engine, self.work = model, profile.engine, profile.workload
        self.turns = TurnBins.of(profile.workload, batch, drain=model.drain)
        prefill, decode, colocated = np.concatenate([layouts, layouts]).T
        self.of_alone, self.of_pair = np.flatnonzero(colocated), np.flatnonzero(decode)
        self.count = len(colocated)
        self.mixed = len(self.of_alone) + len(self.of_pair) > self.count
        ones = np.ones(len(self.of_alone))
        self.alone = np.concatenate([ones, 0.0 * self.of_pair])[:, None]
        """1 for colocated workers, 0 for pairs."""
        self.pair = 1.0 - self.alone
        workers = colocated[self.of_alone], prefill[self.of_pair], decode[self.of_pair]
        self.prefill = np.concatenate([workers[0], workers[1]]).astype(float)[:, None]
        self.decode = np.concatenate([workers[0], workers[2]]).astype(float)[:, None]
        self.answering = np.concatenate([(colocated + decode)[self.of_alone], (colocated + decode)[self.of_pair]])
        self.answering = self.answering.astype(float)[:, None]
        # A group's first prompt is computed and held once on each worker that has members of it.
        group = max(1.0, profile.workload.group_size)
        spread = SPREAD / max(1.0, batch / group) ** 0.5
        heavier = 1.0 + spread * np.where(np.concatenate([self.of_alone, self.of_pair]) < len(layouts), 1.0, -1.0)
        self.live = np.minimum(np.maximum(self.turns.live * heavier[:, None], 1.0), max(batch, 1.0))
        prompt = self.turns.new[0]
        self.shared = prompt * np.maximum(0.0, 1.0 - self.prefill / group)
        self.shared_decode = prompt * np.maximum(0.0, 1.0 - self.decode / group)

    def makespans(self) -> Seconds:
        t = self.turns
        share = self.decode / self.answering
        response = self._response_s(share)
        if self.mixed:
            response = self._sum(self.share * response)
        else:
            order = np.argsort(np.concatenate([self.of_alone, self.of_pair]))
            response = response[order]
        seconds = (t.environment_s + response) @ t.weight + self._tail_s(response)
        mean: Seconds = seconds.reshape(2, -1).mean(axis=0)
        return mean

    def bubble_ratio(self) -> float:
        t = self.turns
        response = self._response_s(self.decode / self.answering)
        lived = self._sum(self.share * (response + t.environment_s)) @ (t.weight * t.live)
        decoded = self._sum(self.share * self.decode_s) @ (t.weight * t.live)
        return float(lived.sum() / max(decoded.sum(), 1e-9) - 1.0)

    def _sum(self, sides: Grid) -> Grid:
        """Sides, shape (sides, turns), added up by layout."""
        total = np.zeros((self.count, sides.shape[1]))
        total[self.of_alone] = sides[: len(self.of_alone)]
        total[self.of_pair] += sides[len(self.of_alone) :]
        return total

    def _tail_s(self, response: Grid) -> Seconds:
        """By how much the last trajectory's turns took longer than the mean ones."""
        t, work = self.turns, self.work
        turns = t.weight.sum()
        answer_s, environment_s = response @ t.weight / turns, t.environment_s @ t.weight / turns
        variance = (answer_s * work.response_cv) ** 2 + (environment_s * work.environment_cv) ** 2
        tail: Seconds = TAIL * np.sqrt(turns * variance)
        return tail

    def _response_s(self, share: Grid) -> Grid:
        """Seconds from a turn's request to its answer on each side, which serves `share` of the turns at first."""
        e, t, model = self.engine, self.turns, self.model
        start = e.prefill_fixed_s + self.alone * e.turn_overhead_s
        again = 0.0 if model.prefill_keeps_response else self.pair * t.before
        new, known = t.new + again, np.maximum(t.context - again, 0.0)
        prompt, full = t.context + t.new, t.context + t.new + t.response
        held = prompt + self.alone * t.response - self.shared
        held_decode, chunks = full - self.shared_decode, model.chunk_tokens / new
        slots = np.minimum(np.maximum(e.kv_capacity_tokens / full, 1.0), e.max_running_requests)
        warm, cold = self._prefill_costs(new, known)
        again_s = cold - warm
        decode_fixed = e.decode_fixed_s
        each: Grid = e.decode_s_per_sequence + e.decode_s_per_kv_token * (prompt + t.response / 2)
        together: Grid = np.ones_like(self.alone)
        decoding: Grid = self.live * share / self.decode
        response: Grid = np.zeros_like(decoding)
        own, ahead = np.zeros((2, 3, *decoding.shape))
        answering = self._pool(self.answering)
        prefilling = self._pool(np.where(self.alone > 0, self.answering, self.prefill))
        elsewhere = self.pair * (1.0 - self.decode / self.answering)
        for number in range(PASSES):
            if not number or self.mixed:
                served = self.live * share
                on_prefill, on_decode = np.maximum(1.0, served / self.prefill), np.maximum(1.0, served / self.decode)
                among, among_decode = on_prefill - 1.0, on_decode - 1.0
                kept = 1.0 - self._evicted(on_prefill, held)
                kept_decode = 1.0 - self._evicted(on_decode, held_decode)
                most = np.maximum(1.0, np.minimum(on_prefill, chunks))
            if not number:
                moved = self._moved(on_decode, CONGESTED, *answering)
                moved_here = self._moved(on_prefill, CONGESTED, *prefilling)
                lost = 1.0 - kept * (1.0 - moved_here) * (1.0 - elsewhere * moved)
                crossing_whole = 1.0 - kept_decode * (1.0 - moved)
            compute = warm + (1.0 - self._hit(lost)) * again_s
            amortised = compute + start / together
            crossing = t.new + crossing_whole * t.context if model.decode_keeps_kv else prompt
            transfer = self.pair * (e.transfer_latency_s + crossing * e.kv_bytes_per_token / e.transfer_bytes_per_s)
            fixed, slope = self._experts(decoding)
            fixed, slope = decode_fixed + fixed, each + slope
            decode = t.response * (fixed + slope * (1.0 if model.bubble else on_decode))
            prefill = compute + start
            own[0], own[1], own[2] = PREFILL_WAIT * prefill, transfer, decode
            if model.queueing:
                ahead[0], ahead[1] = among * amortised, among * transfer
            ahead[2] = self.alone * ahead[0] + (among_decode * t.response * slope if model.bubble else 0.0)
            cycle = cycle_s(t.environment_s + (1.0 - PREFILL_WAIT) * prefill, own, ahead)
            if model.capacity:
                at_once = np.minimum(on_decode, slots)
                busy = self.alone * at_once * amortised + transfer + t.response * (fixed + slope * at_once)
                cycle = np.maximum(cycle, on_decode / at_once * busy)
            response = cycle - t.environment_s
            decode_s = np.minimum(response, decode * cycle / np.maximum(cycle - ahead[2], 1e-9))
            if number + 1 == PASSES:
                # The first turn comes all at once: nobody's environment hides anybody's prefill.
                prefill = compute[:, 0] + start[:, 0] / most[:, 0]
                decode_all = t.response[0] * (fixed + slope * on_decode)[:, 0]
                burst = on_prefill[:, 0] * prefill + transfer[:, 0] + decode_all
                response[:, 0] = np.maximum(response[:, 0], burst)
                break
            on_prefill_s = response - self.pair * decode_s
            rate = among / cycle
            gap = start + self.alone * (fixed + slope * decoding)
            together = np.minimum(most, 1.0 + rate * gap / np.maximum(1.0 - rate * compute, 0.1))
            moved = self._moved(on_decode, response / cycle, *answering)
            moved_here = self._moved(on_prefill, on_prefill_s / cycle, *prefilling)
            lost = 1.0 - kept * (1.0 - moved_here) * (1.0 - elsewhere * moved)
            crossing_whole = 1.0 - kept_decode * (1.0 - moved)
            decoding = 1.0 + among_decode * decode_s / cycle if model.bubble else on_decode
            if self.mixed:
                rate = self.decode / np.maximum(response, 1e-9)
                total = self._sum(rate)
                # Halfway: with the whole step it swings, as the side that gets more turns gets slower.
                share = 0.5 * (share + rate / np.concatenate([total[self.of_alone], total[self.of_pair]]))
        self.share, self.decode_s = share, decode_s
        return response

    def _hit(self, lost: Grid) -> Grid:
        return (self.work.prefix_hit_rate if self.model.cache else 0.0) * (1.0 - lost)

    def _prefill_costs(self, new: Grid, known: Grid) -> tuple[Grid, Grid]:
        """Compute of a turn's prefill with its prefix and without, but for the group's shared prompt; the first turn
        has no prefix to lose."""
        lost = np.minimum(self.shared, known)
        warm, cold = self._compute_s(new, known), self._compute_s(new + known - lost, lost)
        first = self._compute_s(new[..., :1] - self.shared, self.shared)
        warm[..., :1] = first
        cold[..., :1] = first
        return warm, cold

    def _compute_s(self, new: Grid, known: Grid) -> Grid:
        e = self.engine
        seconds: Grid = new * (e.prefill_s_per_token + e.prefill_s_per_token2 * (new / 2 + known)) + 0.0 * self.alone
        return seconds

    def _experts(self, decoding: Grid) -> tuple[Grid | float, Grid | float]:
        """What the experts add to (A, β) with about `decoding` sequences: the tangent of the saturating term."""
        e = self.engine
        if not e.expert_fixed_s:
            return 0.0, 0.0
        left = (1.0 - e.expert_share) ** decoding
        slope = -e.expert_fixed_s * np.log1p(-e.expert_share) * left
        return e.expert_fixed_s * (1.0 - left) - slope * decoding, slope

    def _evicted(self, load: Grid, tokens: Grid) -> Grid:
        """Share of the prefixes of `load` trajectories of `tokens` each that are gone when their trajectory comes back.

        Turns come round almost in a circle, where evicting the least recently used one is the worst there is: a little
        too many, and each evicts the next.
        """
        if not self.model.capacity:
            return np.zeros_like(load)
        wanted = MARGIN * load * np.maximum(tokens, 1.0)
        if wanted.max() <= self.engine.kv_capacity_tokens:
            return np.zeros_like(wanted)
        short = CLIFF * (1.0 - self.engine.kv_capacity_tokens / wanted)
        return np.minimum(np.maximum(short, 0.0), 1.0)

    @staticmethod
    def _pool(workers: Grid) -> tuple[Grid, Grid]:
        """Of a pool with so many workers: the share of the others in it, and the most that is moved."""
        elsewhere = 1.0 - 1.0 / workers
        return elsewhere, MOVED_AT_MOST * elsewhere**MOVED_POOL

    def _moved(self, load: Grid, in_flight: Grid | float, elsewhere: Grid, at_most: Grid) -> Grid:
        """Share of the turns that go where their prefix is not. What moves them is the unevenness of the requests in
        flight: each of `load` trajectories a worker is in flight for this share of its time, so it is binomial."""
        uneven = load * in_flight * np.maximum(1.0 - in_flight, 0.0)
        uneven *= uneven
        moved: Grid = at_most * (uneven / (uneven + MOVED_HALF**2))
        astray = 1.0 - self.model.affinity
        return moved + astray * (elsewhere - moved) if astray else moved
