"""Fits the world to the figures that the protocol names, and to no others; writes `world.yaml`.

    python -m pearl.paper.fit [--batches 3] [--out pearl/paper/world.yaml]

The figures are prefill's share of tokens and of time, the rollout that unlimited GPUs leave, training's time, and
rollout's share of a step. Where the source says nothing of the experiment, this is assumed: batches of 64 trajectories;
workers of two H800; for prefill's shares Qwen3-30B-A3B on 16 colocated GPUs; for the times Qwen3-8B and the 8 training
GPUs of the scaling experiment beside them.

Prefill's tokens are those that it computes: read as whole prompts, its share of time would be out of reach. A live
engine finds 99 % of a turn's prefix where that was left (`pearl.paper.hits`), so prefixes are lost to routing alone.

The first four weigh ten times as much as the last one, which is of the same time as two of them. What they leave open
is decided by nearness to the simulator's `swe`, which weighs least. Bounds are what published traces of coding agents
show, wide.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pearl.paper import published as p
from pearl.paper.jobs import BatchJob, seeded
from pearl.paper.layouts import MOTIVATION_TRAINING_GPUS
from pearl.paper.testbed import Testbed
from pearl.paper.world import World

BOUNDS = {
    "turns": (8.0, 35.0),
    "observation_tokens": (150.0, 3000.0),
    "response_tokens": (75.0, 1200.0),
    "environment_s": (0.5, 8.0),
    "affinity": (0.001, 1.0),
    "turn_overhead_s": (0.001, 0.1),
    "training_utilisation": (0.01, 0.6),
}
START = World(23.0, 650.0, 600.0, 4.0, 0.5, 0.01, 0.25)
"""`swe`, routing and an overhead of which nothing is known, and the simulator's trainer."""
TARGETS = {
    "prefill_token_share": p.PREFILL_TOKEN_SHARE,
    "prefill_time_share": p.PREFILL_TIME_SHARE,
    "unlimited_rollout_s": p.UNLIMITED_ROLLOUT_S,
    "training_s": p.TRAINING_S,
    "rollout_share": p.ROLLOUT_SHARE,
}
WEIGHTS = {"rollout_share": 0.1}
NEARNESS = 0.01
FIRST_SEED = 1000
"""The study's own batches have other seeds."""
STEP = 0.05
"""Of the differences that the derivatives are taken from: smaller ones drown in rounded turns."""


def figures(world: World, batches: int) -> dict[str, float]:
    """What the simulator has in place of `TARGETS`."""

    def played(model: str, layout: str) -> dict[str, float]:
        testbed = Testbed(model=model, world=world)
        runs = [BatchJob(layout, one).play() for one in seeded(testbed, batches, FIRST_SEED)]
        return {name: fmean(run[name] for run in runs) for name in runs[0]}

    small = Testbed(model=p.SMALL, world=world, training_gpus=MOTIVATION_TRAINING_GPUS)
    trainer = small.models().trainer
    training_s = fmean(trainer.step_s(one.lengths()) for one in seeded(small, batches, FIRST_SEED))
    rollout_s, large = played(p.SMALL, "16C")["makespan_s"], played(p.LARGE, "8C")
    return {
        "prefill_token_share": large["prefill_token_share"],
        "prefill_time_share": large["prefill_time_share"],
        "unlimited_rollout_s": played(p.SMALL, "64C")["makespan_s"],
        "training_s": training_s,
        "rollout_share": rollout_s / (rollout_s + training_s),
    }


def _odds(name: str, value: float) -> float:
    """Log-odds of shares, logarithms of times."""
    return math.log(value / (1 - value)) if name.endswith("share") else math.log(value)


def fit(batches: int) -> tuple[World, dict[str, float]]:
    names = [field.name for field in fields(World)]
    start = np.log([getattr(START, name) for name in names])

    def world_of(point: NDArray[np.float64]) -> World:
        return World(**dict(zip(names, np.exp(point).tolist(), strict=True)))

    def misses(point: NDArray[np.float64]) -> NDArray[np.float64]:
        found = figures(world_of(point), batches)
        print({name: round(value, 4) for name, value in found.items()}, flush=True)
        far = [
            WEIGHTS.get(name, 1.0) * (_odds(name, found[name]) - _odds(name, told)) for name, told in TARGETS.items()
        ]
        return np.concatenate([far, NEARNESS * (point - start)])

    low, high = (np.log([BOUNDS[name][end] for name in names]) for end in (0, 1))
    found = least_squares(misses, start, bounds=(low, high), diff_step=STEP, xtol=1e-3, ftol=1e-4, max_nfev=12)
    world = world_of(found.x)
    return world, figures(world, batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("pearl/paper/world.yaml"))
    arguments = parser.parse_args()
    world, found = fit(arguments.batches)
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(world).items()}
    told = {name: {"source": TARGETS[name], "ours": float(f"{value:.4g}")} for name, value in found.items()}
    head = "# Made by `python -m pearl.paper.fit`, which says how, and frozen before any held-out cell was played.\n"
    arguments.out.write_text(head + yaml.safe_dump({"world": rounded, "fitted": told}, sort_keys=False))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
