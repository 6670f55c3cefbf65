"""Which layouts can serve a batch at all.

Two constraints count for the part of a batch that prefill-decode pairs serve (all of it, unless the layout is mixed):

* Decode memory: B·K_seq ≤ N_D·H_max. In the source K_seq is of a trajectory at its longest. But not all of a batch are
  at their longest at once: while it drains, ever fewer hold ever longer contexts. So B·K_seq is the most that the batch
  holds at once, unless the source's rule is asked for.
* Prefill rate. Prefill has to keep up with λ_P = B·S·ΔL prompt tokens in a step of T_dis seconds. Computing them and
  handing their KV on takes λ_P·(t_prefill/N_P + K/BW) = T_prefill seconds, so T_prefill ≤ u·T_dis. With u = 1 this says
  no more than the makespan does; near it, prompts that come unevenly wait without bound, which the closed form does not
  see. So u is a bit less.

Colocated workers are not constrained: what does not fit waits there, and is served.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pearl.core.makespan import ClosedForm, Layouts
from pearl.core.workload import Profile

PREFILL_UTILISATION = 0.95
"""u: a single-server queue with regular service waits for some ten service times at this load."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What each of many layouts needs and has; arrays of shape (n,)."""

    whole: NDArray[np.bool_]
    kv_needed_tokens: NDArray[np.float64]
    kv_capacity_tokens: NDArray[np.float64]
    prefill_utilisation: NDArray[np.float64]

    @classmethod
    def of(cls, profile: Profile, layouts: Layouts, batch: float, *, drains: bool = True) -> Constraints:
        """`drains`: memory for the most that a batch holds at once while it drains; if not, for all trajectories at
        their longest, as in the source."""
        prefill, decode, _ = layouts.T
        share, utilisation = ClosedForm().pair_load(profile, layouts, batch)
        work = profile.workload
        needed = batch * share * (work.peak_context_tokens if drains else work.final_context_tokens)
        return cls(
            whole=((prefill > 0) == (decode > 0)) & (layouts.sum(axis=1) > 0),
            kv_needed_tokens=np.where(decode > 0, needed, 0.0),
            kv_capacity_tokens=decode * float(profile.engine.kv_capacity_tokens),
            prefill_utilisation=utilisation,
        )

    @classmethod
    def joined(cls, parts: list[Constraints]) -> Constraints:
        return cls(
            np.concatenate([part.whole for part in parts]),
            np.concatenate([part.kv_needed_tokens for part in parts]),
            np.concatenate([part.kv_capacity_tokens for part in parts]),
            np.concatenate([part.prefill_utilisation for part in parts]),
        )

    @property
    def feasible(self) -> NDArray[np.bool_]:
        fits = self.kv_needed_tokens <= self.kv_capacity_tokens
        return self.whole & fits & (self.prefill_utilisation <= PREFILL_UTILISATION)

    def reason(self, row: int) -> str:
        """What the layout of `row` breaks, or nothing."""
        if not self.whole[row]:
            return "prefill without decode workers, or the reverse"
        needed, capacity = self.kv_needed_tokens[row], self.kv_capacity_tokens[row]
        if needed > capacity:
            return f"decode workers hold {capacity:,.0f} tokens of KV, the batch grows to {needed:,.0f}"
        used = self.prefill_utilisation[row]
        if used > PREFILL_UTILISATION:
            return f"prefill workers would be busy {used:.0%} of the time, more than {PREFILL_UTILISATION:.0%}"
        return ""
