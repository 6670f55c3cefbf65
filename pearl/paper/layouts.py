"""Section 3 and Table 2: single batches on fixed layouts, and which layout the models choose."""

from __future__ import annotations

from typing import Any

from pearl.core.layout import Layout
from pearl.paper import published as p
from pearl.paper.cell import Cell, Study, gain_cell
from pearl.paper.jobs import BatchJob, ChoiceJob, seeded
from pearl.paper.plan import Plan
from pearl.paper.statistics import Estimate, best_of, estimate, gains
from pearl.paper.testbed import Testbed

OVERLAP_WORKERS = 8
MOTIVATION_TRAINING_GPUS = 8


def ratios(workers: int) -> list[str]:
    return [str(Layout(prefill, workers - prefill)) for prefill in range(1, workers)]


class Layouts(Study):
    """Shared: a batch on a layout."""

    def __init__(self, plan: Plan, seeds: int) -> None:
        super().__init__()
        self.plan, self.seeds = plan, seeds

    def add(self, key: tuple[Any, ...], layout: str, model: str, batch: int = 64) -> None:
        testbed = Testbed(model=model, batch=batch, world=self.plan.world)
        self.jobs[key] = [BatchJob(layout, seeded_one) for seeded_one in seeded(testbed, self.seeds)]

    def makespans(self, *key: Any) -> list[float]:
        return self.column(*key, of="makespan_s")


class Motivation(Layouts):
    """Rollout time by GPUs, against training."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, plan.batch_seeds)
        for gpus in (16, 24, 32):
            self.add((gpus,), f"{gpus // 2}C", p.SMALL)
        self.add(("unlimited",), "64C", p.SMALL)
        self.add(("prefill",), "8C", p.LARGE)

    def cells(self) -> list[Cell]:
        at_16, figure = self.makespans(16), "Section 3.1"
        cells = [
            gain_cell(
                figure, f"{gpus} rollout GPUs cut rollout time against 16", p.SMALL, told,
                estimate([100 * (1 - a / b) for a, b in zip(self.makespans(gpus), at_16, strict=True)]),
            )
            for gpus, told in p.SCALING_CUT.items()
        ]  # fmt: skip
        training = training_s(self.plan, self.plan.batch_seeds)
        over = estimate([a / b for a, b in zip(at_16, training, strict=True)])
        cells.append(
            Cell(figure, "rollout over training at 16 GPUs", p.SMALL, p.ROLLOUT_OVER_TRAINING, *over, unit="x",
                 within_5_points=abs(over.mean - p.ROLLOUT_OVER_TRAINING) <= 0.05)
        )  # fmt: skip
        share = estimate([100 * a / (a + b) for a, b in zip(self.makespans(32), training, strict=True)])
        fitted = {
            ("Section 2.1", "rollout's share of a step, 4 GPUs to each training GPU", p.SMALL, "%"): (
                100 * p.ROLLOUT_SHARE, share
            ),
            (figure, "rollout with unlimited GPUs", p.SMALL, "s"): (
                p.UNLIMITED_ROLLOUT_S, estimate(self.makespans("unlimited"))
            ),
            (figure, "training", p.SMALL, "s"): (p.TRAINING_S, estimate(training)),
            ("Section 3.2", "prefill's share of tokens", p.LARGE, "%"): (
                100 * p.PREFILL_TOKEN_SHARE, self._percent("prefill_token_share")
            ),
            ("Section 3.2", "prefill's share of time", p.LARGE, "%"): (
                100 * p.PREFILL_TIME_SHARE, self._percent("prefill_time_share")
            ),
        }  # fmt: skip
        return cells + [
            Cell(place, name, model, told, *found, unit=unit, held_out=False, note="fitted",
                 within_5_points=abs(found.mean - told) <= 5 if unit == "%" else None)
            for (place, name, model, unit), (told, found) in fitted.items()
        ]  # fmt: skip

    def _percent(self, share: str) -> Estimate:
        return estimate([100 * value for value in self.column("prefill", of=share)])


def training_s(plan: Plan, seeds: int) -> list[float]:
    """Of a batch of 64 on the motivating experiment's training GPUs."""
    testbed = Testbed(model=p.SMALL, world=plan.world, training_gpus=MOTIVATION_TRAINING_GPUS)
    trainer = testbed.models().trainer
    return [trainer.step_s(one.lengths()) for one in seeded(testbed, seeds)]


class Pairs(Layouts):
    """Pairs against colocated workers, Qwen3-30B-A3B on 8 workers."""

    WORKERS = 8

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, plan.batch_seeds)
        for batch in plan.pairs_batches:
            for layout in (f"{self.WORKERS}C", *ratios(self.WORKERS)):
                self.add((batch, layout), layout, p.LARGE, batch)

    def best(self, batch: int) -> tuple[int, int, int]:
        """Prefill workers of the fastest ratio, with the interval of that number."""
        first, lo, hi = best_of([[-s for s in self.makespans(batch, r)] for r in ratios(self.WORKERS)])
        return first + 1, lo + 1, hi + 1

    def pairs_gain(self, batch: int) -> Estimate:
        layout = ratios(self.WORKERS)[self.best(batch)[0] - 1]
        return estimate(gains(self.makespans(batch, f"{self.WORKERS}C"), self.makespans(batch, layout)))

    def cells(self) -> list[Cell]:
        figure = "Section 3.3"
        gained = {batch: self.pairs_gain(batch) for batch in self.plan.pairs_batches}
        cells = [
            gain_cell(figure, f"best pairs over colocated, batch {batch}", p.LARGE, told, gained[batch])
            for batch, told in p.PAIRS_GAIN.items()
            if batch in gained
        ]
        for batch, told in p.BEST_PREFILL.items():
            found = self.best(batch)
            cells.append(
                Cell(figure, f"prefill workers of the best ratio, batch {batch}", p.LARGE, told, *found, unit="of 8",
                     agrees_rank=found[0] == told)
            )  # fmt: skip
        return cells

    def series(self) -> dict[str, Any]:
        return {f"{b}": {"gain": self.pairs_gain(b), "prefill": self.best(b)} for b in self.plan.pairs_batches}


class Ratios(Layouts):
    """Table 2: the ratio that a model chooses among pairs, and the measured best."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, plan.seeds)
        for gpus, overlap in plan.ratios:
            workers = gpus // 2 + OVERLAP_WORKERS * overlap
            for layout in (f"{workers}C", *ratios(workers)):
                self.add((workers, layout), layout, p.SMALL)
            self.jobs[workers, "chosen"] = [ChoiceJob(workers, Testbed(model=p.SMALL, world=plan.world))]

    def regret(self, workers: int, layout: str) -> Estimate:
        """Per cent by which the layout's mean batch takes longer than the best ratio's."""
        best = ratios(workers)[best_of([[-s for s in self.makespans(workers, r)] for r in ratios(workers)])[0]]
        return estimate(gains(self.makespans(workers, layout), self.makespans(workers, best)))

    def cells(self) -> list[Cell]:
        cells = []
        for gpus, overlap in self.plan.ratios:
            workers = gpus // 2 + OVERLAP_WORKERS * overlap
            selected, measured = p.RATIOS[gpus, overlap]
            where = f"{gpus} GPUs{' and the overlap zone' if overlap else ''}"
            first, lo, hi = best_of([[-s for s in self.makespans(workers, r)] for r in ratios(workers)])
            choice = self.played[self.jobs[workers, "chosen"][0]]
            prefill = {name: Layout.parse(layout).prefill for name, layout in choice.items()}
            told = Layout.parse(measured).prefill
            cells.append(
                Cell("Table 2", f"prefill workers of the best ratio, {where}", p.SMALL, told, first + 1, lo + 1, hi + 1,
                     unit=f"of {workers}", agrees_rank=first + 1 == told,
                     note=f"the source's best is {self.regret(workers, measured).mean:.1f} % slower here")
            )  # fmt: skip
            told, mine = Layout.parse(selected).prefill, prefill["closed_form_pairs"]
            lost = self.regret(workers, choice["closed_form_pairs"]).mean
            note = f"that is {lost:.1f} % slower than the best; of all layouts it chooses {choice['closed_form']}, "
            note += f"the drain-aware model {choice['drain_aware']}, among pairs {choice['drain_aware_pairs']}"
            cells.append(
                Cell("Table 2", f"prefill workers that are chosen, {where}", p.SMALL, told, mine, mine, mine,
                     unit=f"of {workers}", agrees_rank=mine == told, note=note,
                     pearl=Estimate(*(3 * [prefill["drain_aware_pairs"]])))
            )  # fmt: skip
        return cells

    def series(self) -> dict[str, Any]:
        return {
            f"{workers}": {layout: self.regret(workers, layout).mean for layout in (f"{workers}C", *ratios(workers))}
            for workers in (gpus // 2 + OVERLAP_WORKERS * overlap for gpus, overlap in self.plan.ratios)
        }
