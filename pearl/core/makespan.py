"""Makespan of a batch's rollout under a layout: the common interface, and the source's closed form.

A model gets the number of trajectories and answers with seconds; it knows no constraints (`pearl/core/feasible.py`) and
no preference for what there is (`pearl/core/decision.py`). Many layouts are one array of shape (n, 3) with the columns
prefill, decode, colocated, so that thousands are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pearl.core.identity import remembered
from pearl.core.layout import Layout
from pearl.core.workload import EngineProfile, Profile, WorkloadProfile

Layouts = NDArray[np.int64]
Seconds = NDArray[np.float64]


def layout_array(layouts: Iterable[Layout]) -> Layouts:
    """Rows (prefill, decode, colocated)."""
    rows = [(layout.prefill, layout.decode, layout.colocated) for layout in layouts]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def layout_of(row: Iterable[int]) -> Layout:
    """Inverse of `layout_array` for one row."""
    prefill, decode, colocated = (int(count) for count in row)
    return Layout(prefill, decode, colocated)


class MakespanModel(Protocol):
    """Seconds from the first dispatch of `batch` trajectories to the end of the last one, before it is scored."""

    @property
    def name(self) -> str: ...

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        """Of one layout; infinite where it is not whole or the model does not know its kind."""
        ...

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        """Of many layouts, shape (n, 3) → (n,)."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The equations of the source (arXiv 2609.35158):

        T_coloc   = S·[(B·ΔL/N)·t_prefill + r·(A + b·B/N) + T_over] + T_env
        T_decode  = S·r·(A + b·B/(N_D·(1 + θ)))·(1 + θ)
        T_prefill = S·(B·ΔL/N_P·t_prefill + B·ΔL·K/BW)
        T_dis     = max(T_prefill, T_decode) + T_env

    A, b and t_prefill are read off the engine profile at the workload's mean turn (`LinearCosts`). Mixed layouts are
    not in the source: here the batch is split so that both parts end together.
    """

    bubble: bool = True
    """Ablation: without it θ is 0."""

    @property
    def name(self) -> str:
        return "closed_form"

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return float(self.makespans(profile, layout_array([layout]), batch)[0])

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        lines = self._lines(profile, layouts, batch)
        share = lines.colocated_share()
        result: Seconds = lines.environment_s + np.maximum(lines.colocated(share), lines.disaggregated(1.0 - share))
        return result

    def pair_load(self, profile: Profile, layouts: Layouts, batch: float) -> tuple[Seconds, Seconds]:
        """Share of the trajectories that pairs serve, 1 or 0 unless a layout is mixed, and share of the makespan in
        which their prefill workers compute and hand over, T_prefill/T_dis; 0 without any."""
        lines = self._lines(profile, layouts, batch)
        share = 1.0 - lines.colocated_share()
        makespan = lines.environment_s + np.maximum(lines.colocated(1.0 - share), lines.disaggregated(share))
        busy = np.where(layouts[:, 0] > 0, (lines.prefill_compute + lines.transfer) * share / makespan, 0.0)
        return share, busy

    def _lines(self, profile: Profile, layouts: Layouts, batch: float) -> _Lines:
        engine, work = profile.engine, profile.workload
        prefill, decode, colocated = (np.maximum(column, 1e-9) for column in layouts.T.astype(float))
        per_worker = batch / max(1.0, float(layouts.sum(axis=1).max(initial=1)))
        costs = LinearCosts.at(engine, work, per_worker)
        turns, new, response = work.slowest_turns, work.new_tokens_per_turn, work.response_tokens_per_turn
        stretch = 1.0 + (work.bubble_ratio if self.bubble else 0.0)
        prompt_s = turns * batch * new * costs.prefill_s_per_token
        token_s = turns * response * costs.decode_s_per_sequence * batch
        fixed_s = turns * response * costs.decode_fixed_s
        return _Lines(
            has_colocated=layouts[:, 2] > 0,
            has_pair=(layouts[:, 0] > 0) & (layouts[:, 1] > 0),
            whole=((layouts[:, 0] > 0) == (layouts[:, 1] > 0)) & (layouts.sum(axis=1) > 0),
            colocated_fixed=fixed_s + turns * engine.turn_overhead_s,
            colocated_slope=(prompt_s + token_s) / colocated,
            decode_fixed=fixed_s * stretch,
            decode_slope=token_s / decode,
            prefill_compute=prompt_s / prefill,
            transfer=turns * batch * new * engine.kv_bytes_per_token / engine.transfer_bytes_per_s,
            environment_s=turns * work.environment_s_per_turn,
        )


@dataclass(frozen=True, slots=True)
class _Lines:
    """The closed form as straight lines over the share of the batch that a part of the layout serves."""

    has_colocated: NDArray[np.bool_]
    has_pair: NDArray[np.bool_]
    whole: NDArray[np.bool_]
    colocated_fixed: float
    colocated_slope: Seconds
    decode_fixed: float
    decode_slope: Seconds
    prefill_compute: Seconds
    transfer: float
    environment_s: float

    def colocated(self, share: Seconds) -> Seconds:
        seconds: Seconds = np.where(self.has_colocated, self.colocated_fixed + self.colocated_slope * share, 0.0)
        return seconds

    def disaggregated(self, share: Seconds) -> Seconds:
        prefill = (self.prefill_compute + self.transfer) * share
        decode = self.decode_fixed + self.decode_slope * share
        seconds: Seconds = np.where(self.has_pair, np.maximum(prefill, decode), 0.0)
        return np.where(self.whole, seconds, np.inf)

    def colocated_share(self) -> Seconds:
        """Share of the batch for the colocated workers at which both parts take equally long."""
        prefill = self.prefill_compute + self.transfer
        at_prefill = (prefill - self.colocated_fixed) / (self.colocated_slope + prefill)
        at_decode = self.decode_fixed + self.decode_slope - self.colocated_fixed
        at_decode = at_decode / (self.colocated_slope + self.decode_slope)
        share = np.clip(np.maximum(at_prefill, at_decode), 0.0, 1.0)
        result: Seconds = np.where(self.has_pair, np.where(self.has_colocated, share, 0.0), 1.0)
        return result


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """The three costs that the closed form knows, as its Runtime Tracker would fit them at this operating point.

    One more sequence brings its KV along, so b holds the KV term at the mean context; a mixture of experts, whose cost
    saturates with the batch, is taken as the line through one sequence and the operating batch.
    """

    prefill_s_per_token: float
    decode_fixed_s: float
    decode_s_per_sequence: float

    @classmethod
    def at(cls, engine: EngineProfile, work: WorkloadProfile, batch_per_worker: float) -> LinearCosts:
        context = _mean_context(work)
        new, response = max(work.new_tokens_per_turn, 1.0), work.response_tokens_per_turn
        prefill = engine.prefill_fixed_s / new + engine.prefill_s_per_token
        prefill += engine.prefill_s_per_token2 * (new / 2 + context)
        prefill = work.prefill_s_per_new_token or prefill
        sequence = engine.decode_s_per_sequence + engine.decode_s_per_kv_token * (context + new + response / 2)
        fixed = engine.decode_fixed_s
        if engine.expert_fixed_s:
            high = max(batch_per_worker, 2.0)
            one, many = engine.expert_share, 1.0 - (1.0 - engine.expert_share) ** high
            slope = engine.expert_fixed_s * (many - one) / (high - 1.0)
            sequence += slope
            fixed += engine.expert_fixed_s * one - slope
        return cls(prefill, fixed, sequence)


@remembered
def _mean_context(work: WorkloadProfile) -> float:
    """In front of a turn's new tokens, over all turns."""
    total = sum(turn.survivors for turn in work.turns)
    return sum(turn.survivors * turn.context_tokens for turn in work.turns) / total


@dataclass(frozen=True, slots=True)
class AlwaysColocated:
    """The trivial policy as a model: whatever is not colocated takes for ever. For comparison."""

    model: MakespanModel = ClosedForm()

    @property
    def name(self) -> str:
        return "always_colocated"

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return float(self.makespans(profile, layout_array([layout]), batch)[0])

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        seconds = self.model.makespans(profile, layouts, batch)
        result: Seconds = np.where((layouts[:, 0] > 0) | (layouts[:, 1] > 0), np.inf, seconds)
        return result


@dataclass(frozen=True, slots=True)
class AlwaysPairs:
    """Prefill-decode pairs at whatever ratio the model likes best: whatever has a colocated worker takes for ever."""

    model: MakespanModel = ClosedForm()

    @property
    def name(self) -> str:
        return f"pairs_by_{self.model.name}"

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return float(self.makespans(profile, layout_array([layout]), batch)[0])

    def makespans(self, profile: Profile, layouts: Layouts, batch: float) -> Seconds:
        result: Seconds = np.where(layouts[:, 2] > 0, np.inf, self.model.makespans(profile, layouts, batch))
        return result
