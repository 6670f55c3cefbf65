"""The simulations that the study is made of. A job is a value: equal jobs give equal numbers, and are played once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pearl.core import events as ev
from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.drain import DrainAware
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout
from pearl.core.makespan import AlwaysPairs, ClosedForm, MakespanModel
from pearl.core.workload import Profile, TurnShape, WorkloadProfile
from pearl.paper.testbed import Testbed
from pearl.sim.batch import run_batch
from pearl.sim.results import Results
from pearl.sim.scenario import simulate
from pearl.sim.watcher import Watcher

Numbers = dict[str, Any]

TASKS_APART = 64
"""Between the first tasks of two batches of one seed; no batch has more groups."""
PROFILED_BATCHES = 3
NOTHING_KNOWN = WorkloadProfile((TurnShape(1.0, 1000.0, 200.0, 1.0, 0.0),), 1, 1000.0, 200.0, 1.0)


@dataclass(frozen=True, slots=True)
class RunJob:
    """A whole run. `skip`: steps at its beginning that throughput does not count."""

    testbed: Testbed
    skip: int = 0

    def play(self) -> Numbers:
        rates, operations = Rates(self.testbed.group_size), Operations()
        summary, _ = simulate(self.testbed, [rates, operations])
        dedicated = self.testbed.training_gpus + self.testbed.reserved_gpus
        return {
            **summary,
            "throughput": rates.throughput(self.skip),
            "dedicated_gpu_s": dedicated * summary["simulated_s"],
            "operations": operations.means(),
        }


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One batch on a fixed layout, in the frozen world."""

    layout: str
    testbed: Testbed
    """Gives model, world, batch and seed."""

    def play(self) -> Numbers:
        t = self.testbed
        engine = t.models().engine
        run = run_batch(
            Layout.parse(self.layout), engine, t.make_workload(), t.batch, group_size=t.group_size,
            max_tokens=t.max_tokens, affinity=t.affinity, options=t.options,
        )  # fmt: skip
        computed = run.prompt_tokens - run.cached_tokens
        return {
            "makespan_s": run.makespan_s,
            "prefill_token_share": computed / (computed + run.generated_tokens),
            "prefill_time_share": run.prefill_s / run.busy_s,
            "cached_share": run.cached_tokens / run.prompt_tokens,
        }


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """Which layouts the makespan models choose, from a profile that a tracker took of colocated batches."""

    workers: int
    testbed: Testbed

    def play(self) -> Numbers:
        watcher = Profiler(self.testbed)
        watcher.play(self.workers)
        profile = watcher.tracker.profile()
        drain = DrainAware(affinity=self.testbed.affinity)
        models: dict[str, MakespanModel] = {
            "closed_form": ClosedForm(), "drain_aware": drain,
            "closed_form_pairs": AlwaysPairs(ClosedForm()), "drain_aware_pairs": AlwaysPairs(drain),
        }  # fmt: skip
        settings = DecisionSettings(mixed=False, constraints=False)
        return {
            name: str(DecisionEngine(settings, model).best(profile, self.workers, self.testbed.batch)[0])
            for name, model in models.items()
        }


Job = RunJob | BatchJob | ChoiceJob


def seeded(testbed: Testbed, seeds: int, first: int = 0) -> list[Testbed]:
    return [replace(testbed, seed=seed) for seed in range(first, first + seeds)]


class Rates(Results):
    """Throughput of the later steps alone: the first ones fill an empty cluster."""

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size)
        self.trained_at_step: list[int] = []

    def _batch_trained(self, event: ev.BatchTrained) -> None:
        super()._batch_trained(event)
        self.trained_at_step.append(self.trained)

    def throughput(self, skip: int) -> float:
        """Tokens/s, generated and trained, from the end of step `skip` to the end of the last; 0 without a step."""
        if len(self.step_s) <= skip or self.began_s is None:
            return 0.0
        tokens, since = self.generated_at_step[-1] + self.trained_at_step[-1], self.began_s
        if skip:
            tokens -= self.generated_at_step[skip - 1] + self.trained_at_step[skip - 1]
            since = self.step_s[skip - 1]
        return tokens / (self.step_s[-1] - since)


class Operations:
    """Mean seconds of what the Elastic Scheduler did, by kind and phase, from its beginning; "expand finalised" is from
    an expansion's preparation to its admission."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._prepared: dict[int, float] = {}

    def saw(self, now: float, entry: Event | Instruction) -> None:
        if isinstance(entry, ev.RecordOperation):
            self._seconds[f"{entry.kind} {entry.phase}"].append(entry.seconds)
            if entry.kind == "expand" and entry.phase == "prepared":
                self._prepared[entry.number] = entry.seconds
            elif entry.kind == "expand" and entry.phase == "admitted":
                self._seconds["expand finalised"].append(entry.seconds - self._prepared[entry.number])

    def means(self) -> dict[str, float]:
        return {name: fmean(values) for name, values in self._seconds.items()}


class Profiler(Watcher):
    """Plays batches of a testbed, for the tracker."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed, self.engine = testbed, testbed.models().engine
        super().__init__(Profile(self.engine, NOTHING_KNOWN))

    def play(self, workers: int) -> None:
        """Batches on so many colocated workers, other ones than are judged."""
        t = self.testbed
        for number in range(1, PROFILED_BATCHES + 1):
            run_batch(
                Layout(colocated=workers), self.engine, t.make_workload(), t.batch, group_size=t.group_size,
                first_task=TASKS_APART * number, max_tokens=t.max_tokens, affinity=t.affinity, observers=[self],
            )  # fmt: skip
