"""What the replay takes for the source's testbed: fitted once to the named figures, frozen in `world.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from pearl.sim.workload import PRESETS, AgentWorkload, Lognormal

SEGMENTS = ("1_abundant_volatile", "2_scarce_volatile", "3_moderate_calm")


@dataclass(frozen=True, slots=True)
class World:
    """The means that the fit may move; all else of the workload is the simulator's `swe`."""

    turns: float
    observation_tokens: float
    response_tokens: float
    environment_s: float
    affinity: float
    """Share of turns that ask for the worker with their prefix."""
    turn_overhead_s: float
    """T_over: what switching between prefill and decode costs a prefill iteration on a colocated worker."""
    training_utilisation: float
    """Share of the training GPUs' peak."""

    def workload(self, seed: int) -> AgentWorkload:
        swe = PRESETS["swe"]

        def of_mean(mean: float, shipped: Lognormal) -> Lognormal:
            return replace(shipped, mean=mean)

        return replace(
            swe,
            seed=seed,
            turns=of_mean(self.turns, swe.turns),
            observation_tokens=of_mean(self.observation_tokens, swe.observation_tokens),
            response_tokens=of_mean(self.response_tokens, swe.response_tokens),
            environment_s=of_mean(self.environment_s, swe.environment_s),
        )


@cache
def frozen() -> dict[str, Any]:
    """The file: the world, the figures that it was fitted to, and how far off it is."""
    return yaml.safe_load((resources.files(__package__) / "world.yaml").read_text())


def load_world() -> World:
    return World(**{name: float(value) for name, value in frozen()["world"].items()})


def segment(name: str) -> Path:
    """The trace file of one of `SEGMENTS`."""
    return Path(str(resources.files(__package__) / "segments" / f"{name}.json"))
