"""`pearl` against `pearl-paper` in environments that are drawn, and that nothing was tuned on."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from pearl.paper.cell import Cell, Study
from pearl.paper.jobs import RunJob, seeded
from pearl.paper.plan import Plan
from pearl.paper.statistics import estimate
from pearl.paper.testbed import Testbed
from pearl.paper.world import World
from pearl.sim.availability import GENERATED

HARDWARE = (
    ("qwen3-8b", "h100", 2), ("qwen3-8b", "h800", 1), ("qwen3-8b", "h200", 1), ("qwen3-8b", "a100", 2),
    ("qwen3-8b", "h20", 2), ("qwen3-30b-a3b", "h800", 2), ("qwen3-30b-a3b", "h200", 2), ("qwen3-30b-a3b", "h20", 2),
)  # fmt: skip
SIZES = (16, 32, 32, 64)
BATCH_PER_GPU = (1, 2, 2, 4)
HOURS = 12.0
"""At most: the steps end a run."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One draw: availability, workload and hardware, with our own routing."""

    number: int
    testbed: Testbed

    @classmethod
    def draw(cls, number: int, steps: int) -> Environment:
        rng = random.Random(f"environment {number}")
        model, gpu, per_worker = rng.choice(HARDWARE)
        gpus = rng.choice(SIZES)
        world = World(
            turns=rng.uniform(5, 30),
            observation_tokens=rng.uniform(200, 2500),
            response_tokens=rng.uniform(80, 700),
            environment_s=rng.uniform(0.5, 8.0),
            affinity=1.0,
            turn_overhead_s=rng.choice((0.0, 0.005, 0.02)),
            training_utilisation=rng.uniform(0.1, 0.4),
        )
        batch = max(1, round(gpus * rng.choice(BATCH_PER_GPU) / 16)) * 16
        testbed = Testbed.of_size(
            gpus, model=model, gpu=gpu, gpus_per_worker=per_worker, batch=batch, trace=rng.choice(GENERATED),
            notice_s=rng.choice((None, 30.0, 120.0)), hours=HOURS, world=world, steps=steps,
        )  # fmt: skip
        assert isinstance(testbed, Testbed)
        return cls(number, testbed)

    def __str__(self) -> str:
        t, w = self.testbed, self.testbed.world
        assert w is not None
        return (
            f"{t.gpus} {t.gpu}, {t.model}, batch {t.batch}, {t.trace}, {w.turns:.0f} turns of "
            f"{w.observation_tokens:.0f} + {w.response_tokens:.0f} tokens and {w.environment_s:.1f} s"
        )


class Beyond(Study):
    """Both policies on the same draws and seeds."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.environments = [Environment.draw(number, plan.environment_steps) for number in range(plan.environments)]
        for environment in self.environments:
            for policy in ("pearl-paper", "pearl"):
                testbeds = seeded(replace(environment.testbed, policy=policy), plan.environment_seeds)
                self.jobs[environment.number, policy] = [RunJob(testbed) for testbed in testbeds]

    def gains_by_environment(self) -> list[float]:
        """Mean over seeds, per cent."""
        return [self.gain((e.number, "pearl"), (e.number, "pearl-paper")).mean for e in self.environments]

    def cells(self) -> list[Cell]:
        found = self.gains_by_environment()
        mean = estimate(found)
        worst = min(found)
        where = self.environments[found.index(worst)]
        name = f"pearl over pearl-paper, {len(found)} drawn environments"
        return [
            Cell("Beyond", f"{name}, mean", "", None, *mean, agrees_sign=mean.mean > 0),
            Cell("Beyond", f"{name}, least", "", None, worst, worst, worst, agrees_sign=worst > 0, note=str(where)),
        ]

    def series(self) -> dict[str, Any]:
        return {
            str(environment): {
                "gain": gain,
                **{
                    f"{policy}: {what}": [self.played[job][what] for job in self.jobs[environment.number, policy]]
                    for policy in ("pearl-paper", "pearl")
                    for what in ("throughput_tokens_s", "borrowed_gpu_s", "mode_switches", "role_switches")
                },
            }
            for environment, gain in zip(self.environments, self.gains_by_environment(), strict=True)
        }
