"""Which layout there is to be: always colocated, a fixed ratio, or what the PD Decision Engine says."""

from __future__ import annotations

from typing import Protocol

from pearl.core.decision import Decision
from pearl.core.layout import Layout, Mode
from pearl.core.settings import Roles
from pearl.core.workload import Profile

EXTENSIONS = 16
"""Ways to add workers to a layout that are compared, spread evenly where there are more."""


class DecisionEngine(Protocol):
    """See `pearl.core.decision.DecisionEngine`."""

    def decide(self, profile: Profile, workers: int, batch: float, current: Layout | None = None) -> Decision: ...

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float: ...


class RolePolicy:
    """`batch`: trajectories of a batch. `engine` may be None unless roles are dynamic. `overlap`: decide for all that
    are in flight, and not for one batch alone."""

    def __init__(
        self, roles: Roles, ratio: tuple[int, int], engine: DecisionEngine | None, batch: float, overlap: bool = False
    ) -> None:
        self.roles, self.ratio, self.engine, self.batch, self.overlap = roles, ratio, engine, batch, overlap

    def load(self, profile: Profile) -> float:
        """Trajectories that are decided for."""
        return profile.workload.load(self.batch) if self.overlap else self.batch

    def decide(self, profile: Profile | None, workers: int, current: Layout | None, switch_s: float = 0.0) -> Decision:
        """The layout for `workers` workers, the ones in `current` among them. Without a profile: colocated.
        `switch_s`: see `DecisionEngine.decide`."""
        if self.roles is Roles.DYNAMIC and self.engine is not None and profile is not None:
            kept = current if current is None else self._extended(profile, current, workers - current.workers)
            return self.engine.decide(profile, workers, self.load(profile), kept)
        layout = self._fixed(workers)
        seconds = self.engine.makespan(profile, layout, self.load(profile)) if self.engine and profile else 0.0
        return Decision(layout, seconds, None, False, (f"roles are {self.roles}",), ())

    def predicted_s(self, profile: Profile, workers: int, current: Layout | None) -> float:
        """Makespan of a batch on so many workers."""
        return self.decide(profile, workers, current).predicted_s if workers else float("inf")

    def _fixed(self, workers: int) -> Layout:
        if self.roles is not Roles.FIXED or workers < 2:
            return Layout(colocated=workers)
        prefill, decode = self.ratio
        count = min(max(1, round(workers * prefill / (prefill + decode))), workers - 1)
        return Layout(prefill=count, decode=workers - count)

    def _extended(self, profile: Profile, current: Layout, added: int) -> Layout:
        """`current` with `added` more workers and nobody reassigned: what hysteresis would keep."""
        assert self.engine is not None
        if added <= 0:
            return current
        if current.mode is not Mode.DISAGGREGATED:
            return Layout(current.prefill, current.decode, current.colocated + added)
        splits = sorted({round(i * added / (EXTENSIONS - 1)) for i in range(EXTENSIONS)})
        ways = [Layout(current.prefill + p, current.decode + added - p) for p in splits]
        engine, load = self.engine, self.load(profile)
        return min(ways, key=lambda layout: engine.makespan(profile, layout, load))
