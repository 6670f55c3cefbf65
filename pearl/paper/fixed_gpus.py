"""Figures 7 and 8: runs on a fixed number of rollout GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from pearl.paper import published as p
from pearl.paper.cell import Cell, Study, gain_cell
from pearl.paper.jobs import RunJob, seeded
from pearl.paper.plan import Plan
from pearl.paper.statistics import Estimate, best_of

STAGES = {"forced-pd": "pairs", "forced-pd-borrow": "and borrowing", "forced-pd-gated": "and the gate"}
SWEPT = ("rlboost+", "pearl-paper", "pearl")


class Ablation(Study):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for model in p.MODELS:
            for gpus in plan.gpus:
                for policy in ("roll", *STAGES, "pearl-paper", "pearl"):
                    testbeds = seeded(plan.fixed(policy, model, gpus), plan.seeds)
                    self.jobs[model, gpus, policy] = [RunJob(testbed, plan.skip) for testbed in testbeds]

    def over_roll(self, model: str, gpus: int, policy: str) -> Estimate:
        return self.gain((model, gpus, policy), (model, gpus, "roll"))

    def cells(self) -> list[Cell]:
        cells = []
        for model in p.MODELS:
            for stage, (policy, about) in enumerate(STAGES.items()):
                if 4 in self.plan.gpus:
                    cells.append(
                        gain_cell(
                            "Figure 7", f"4 GPUs: {about}", model, p.ABLATION_AT_4[model][stage],
                            self.over_roll(model, 4, policy), pearl=self.over_roll(model, 4, "pearl"),
                        )
                    )  # fmt: skip
                several = [gpus for gpus in self.plan.gpus if gpus >= 8]
                for name, pick, told in zip(
                    ("least", "most"), (min, max), p.ABLATION_FROM_8[model][stage], strict=True
                ):
                    cells.append(
                        gain_cell(
                            "Figure 7", f"8 to 16 GPUs: {about}, {name}", model, told,
                            _of(pick, (self.over_roll(model, gpus, policy) for gpus in several)),
                            pearl=_of(pick, (self.over_roll(model, gpus, "pearl") for gpus in several)),
                        )
                    )  # fmt: skip
        return cells

    def series(self) -> dict[str, Any]:
        return {
            f"{model}/{gpus}/{policy}": self.over_roll(model, gpus, policy)
            for model, gpus, policy in self.jobs
            if policy != "roll"
        }


class Sensitivity(Study):
    """Batch and length, Qwen3-8B on 8 GPUs."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for policy in SWEPT:
            for batch in plan.batches:
                self._add(("batch", batch, policy), policy, batch=batch)
            for length in plan.lengths:
                self._add(("length", length, policy), policy, max_tokens=length)

    def _add(self, key: tuple[Any, ...], policy: str, **changes: int) -> None:
        testbeds = seeded(self.plan.fixed(policy, p.SMALL, 8, **changes), self.plan.seeds)
        self.jobs[key] = [RunJob(testbed, self.plan.skip) for testbed in testbeds]

    def cells(self) -> list[Cell]:
        cells = []
        for what, values, told in (
            ("batch", self.plan.batches, p.BATCH_GAIN),
            ("length", self.plan.lengths, p.LENGTH_GAIN),
        ):
            for name, pick, published in zip(("least", "most"), (min, max), told, strict=True):
                theirs, mine = (
                    _of(pick, (self.gain((what, value, policy), (what, value, "rlboost+")) for value in values))
                    for policy in ("pearl-paper", "pearl")
                )
                span = f"{values[0]} to {values[-1]}"
                cells.append(
                    gain_cell(
                        "Figure 8",
                        f"PEARL over RLBoost+, {what} {span}, {name}",
                        p.SMALL,
                        published,
                        theirs,
                        pearl=mine,
                    )
                )
        return [*cells, *self._peaks(), self._slower()]

    def _peaks(self) -> list[Cell]:
        batches, cells = self.plan.batches, []
        for system, policy in (("rlboost+", "rlboost+"), ("pearl", "pearl-paper")):
            found = best_of([self.column("batch", batch, policy) for batch in batches])
            ours, lo, hi = (batches[i] for i in found)
            name = {"rlboost+": "RLBoost+", "pearl": "PEARL"}[system]
            told = p.PEAK_BATCH[system]
            mine = best_of([self.column("batch", batch, "pearl") for batch in batches])
            cells.append(
                Cell(
                    "Figure 8", f"batch at which {name} peaks", p.SMALL, told, ours, lo, hi, unit="trajectories",
                    agrees_rank=ours == told,
                    pearl=Estimate(*(batches[i] for i in mine)) if system == "pearl" else None,
                )
            )  # fmt: skip
        return cells

    def _slower(self) -> Cell:
        """Both systems slow down as the limit grows: throughput at the greatest limit against the least."""
        first, last = self.plan.lengths[0], self.plan.lengths[-1]
        found = self.gain(("length", last, "pearl-paper"), ("length", first, "pearl-paper"))
        return Cell(
            "Figure 8", f"PEARL's throughput at {last} tokens over {first}", p.SMALL, None, *found,
            agrees_sign=found.mean < 0, note="the source says only that it falls",
        )  # fmt: skip

    def series(self) -> dict[str, Any]:
        return {"/".join(map(str, key)): fmean(self.column(*key)) for key in self.jobs}


def _of(pick: Callable[..., Estimate], estimates: Iterable[Estimate]) -> Estimate:
    return pick(estimates, key=lambda e: e.mean)
