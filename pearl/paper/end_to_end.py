"""Figure 5 and Table 3: two hours of each availability segment, all systems on the same GPUs."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from pearl.core.workload import EngineProfile
from pearl.paper import published as p
from pearl.paper.cell import Cell, Study, gain_cell, multiple_cell, same_rank
from pearl.paper.jobs import Job, RunJob, seeded
from pearl.paper.plan import Plan
from pearl.paper.statistics import Estimate, estimate
from pearl.paper.testbed import Testbed
from pearl.paper.world import SEGMENTS, World

SYSTEMS = ("roll", "roll-large", "rlboost+", "pearl-paper", "pearl")
FIGURE = "Figure 5"
ON_DEMAND, PREEMPTIBLE = 1.0, 0.35
"""Prices of a GPU-hour, relative; ours: the source prints none, and spot GPUs cost some 30 to 40 % of reserved ones."""


class EndToEnd(Study):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for model in p.MODELS:
            for number, name in enumerate(SEGMENTS):
                for system in SYSTEMS:
                    self.jobs[model, number, system] = self._runs(model, number, name, system)

    def _runs(self, model: str, number: int, segment_name: str, system: str) -> list[Job]:
        """Two hours; where the number of GPUs never changes, fewer steps say as much."""
        plan = self.plan
        if fixed := {"roll": 4, "roll-large": p.LARGE_POOLS[number]}.get(system):
            testbed = replace(plan.fixed(system, model, fixed), steps=2 * plan.steps)
            return [RunJob(one, plan.skip) for one in seeded(testbed, plan.seeds)]
        testbed = Testbed(policy=system, model=model, trace=segment_name, hours=plan.hours, world=plan.world)
        return [RunJob(one) for one in seeded(testbed, plan.seeds)]

    def cells(self) -> list[Cell]:
        return [cell for model in p.MODELS for cell in (*self._gains(model), *self._multiples(model))] + [
            cell for model in p.MODELS for cell in self._operations(model)
        ]

    def _gains(self, model: str) -> list[Cell]:
        segments = range(len(SEGMENTS))
        ours = [self.gain((model, i, "pearl-paper"), (model, i, "rlboost+")) for i in segments]
        ranks = same_rank(p.OVER_RLBOOST[model], [e.mean for e in ours])
        cells = [
            gain_cell(
                FIGURE, f"PEARL over RLBoost+, segment {i + 1}", model, p.OVER_RLBOOST[model][i], ours[i],
                agrees_rank=ranks[i], pearl=self.gain((model, i, "pearl"), (model, i, "rlboost+")),
            )
            for i in segments
        ]  # fmt: skip
        for i in segments:
            against = (model, i, "roll-large")
            found = self.gain((model, i, "pearl-paper"), against)
            cells.append(
                Cell(
                    FIGURE, f"PEARL over ROLL-Large, segment {i + 1}", model, None, *found,
                    agrees_sign=found.mean >= 0, note="the source says only that it is no less",
                    pearl=self.gain((model, i, "pearl"), against),
                )
            )  # fmt: skip
        return cells

    def multiple(self, model: str, segment: int, system: str) -> Estimate:
        ours, roll = self.column(model, segment, system), self.column(model, segment, "roll")
        return estimate([a / b for a, b in zip(ours, roll, strict=True)])

    def _multiples(self, model: str) -> list[Cell]:
        """The source prints the least and the most of three segments."""
        cells = []
        for name, published, pick in zip(("least", "most"), p.OVER_ROLL[model], (min, max), strict=True):
            theirs, mine = (
                pick((self.multiple(model, i, s) for i in range(len(SEGMENTS))), key=lambda e: e.mean)
                for s in ("pearl-paper", "pearl")
            )
            cells.append(
                multiple_cell(FIGURE, f"PEARL over ROLL, {name} of the segments", model, published, theirs, pearl=mine)
            )
        return cells

    def _operations(self, model: str) -> list[Cell]:
        """Seconds as the Elastic Scheduler saw them: constants of the simulator, and what waited for what."""
        runs = [self.played[job]["operations"] for i in range(3) for job in self.jobs[model, i, "pearl-paper"]]

        def seconds(name: str) -> Estimate | None:
            values = [run[name] for run in runs if name in run]
            return estimate(values) if values else None

        measured = {
            "expansion, preparation": seconds("expand prepared"),
            "expansion, finalisation": seconds("expand finalised"),
            "borrowing, activation": seconds("borrow admitted"),
            "borrowing, deactivation": seconds("return done"),
        }
        note = "a constant of the simulator; what is over is waiting and, for borrowing, starting an engine once"
        cells = [
            Cell("Table 3", name, model, told, *found, unit="s", held_out=False, note=note)
            for (name, found), told in zip(measured.items(), p.RECONFIGURATION_S[model], strict=True)
            if found is not None
        ]
        again = prefill_again_percent(self.plan.world, self.plan.fixed("roll", model, 4).models().engine)
        note = "the source says less than this; by the profile, a mean context over a mean trajectory of decoding alone"
        cells.append(
            Cell(
                "Section 6.5.2", "prefilling an interrupted request again", model, p.PREFILL_AGAIN, again, again, again,
                agrees_sign=again < p.PREFILL_AGAIN, note=note,
            )
        )  # fmt: skip
        return cells

    def series(self) -> dict[str, Any]:
        keys = self.jobs
        return {
            "throughput_tokens_s": {"/".join(map(str, key)): fmean(self.column(*key)) for key in keys},
            "tokens_per_dollar_over_roll": {
                "/".join(map(str, key)): self._value(*key) / self._value(key[0], key[1], "roll") for key in keys
            },
        }

    def _value(self, *key: Any) -> float:
        """Tokens by relative price."""
        worth = []
        for job in self.jobs[key]:
            run = self.played[job]
            price = ON_DEMAND * run["dedicated_gpu_s"] + PREEMPTIBLE * run["preemptible_gpu_s"]
            worth.append(run["throughput"] * run["simulated_s"] / price)
        return fmean(worth)


def prefill_again_percent(world: World, engine: EngineProfile) -> float:
    """Prefill of a mean context, by the decoding of a mean trajectory with nobody beside it."""
    context = world.turns / 2 * (world.observation_tokens + world.response_tokens)
    prefill_s = engine.prefill_fixed_s + context * (
        engine.prefill_s_per_token + engine.prefill_s_per_token2 * context / 2
    )
    token_s = engine.decode_fixed_s + engine.decode_s_per_sequence + engine.decode_s_per_kv_token * context
    token_s += engine.expert_fixed_s * engine.expert_share
    return 100 * prefill_s / (world.turns * world.response_tokens * token_s)
