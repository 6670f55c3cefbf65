"""Whole elastic runs in virtual time with faults: the interpreter of the fault search, for tests of both schedulers."""

from __future__ import annotations

from pearl.core.settings import ElasticSettings
from pearl.sim.search.case import Case, small_run
from pearl.sim.search.engines import slot
from pearl.sim.search.world import FixedProfile
from tests.core.virtual import Virtual

__all__ = ["FixedProfile", "play_elastic", "slot"]


def play_elastic(
    elastic: ElasticSettings,
    seed: int = 0,
    fault_rate: float = 0.0,
    spot: int = 0,
    overlap: int = 0,
    reserved: int = 2,
    **changes: object,
) -> Virtual:
    """A run with `spot` preemptible slots that come and go and `overlap` ones on the trainer's GPUs, to its end."""
    return Virtual(Case(seed, small_run(**changes), elastic, reserved, spot, overlap, fault_rate=fault_rate))
