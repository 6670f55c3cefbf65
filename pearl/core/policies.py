"""Named settings of the Elastic Scheduler, for runs and for simulations."""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.drain import DrainAware
from pearl.core.elastic import Elastic
from pearl.core.makespan import ClosedForm
from pearl.core.pipeline import Pipeline
from pearl.core.profile import RuntimeTracker
from pearl.core.scheduler import Scheduler
from pearl.core.settings import Borrowing, ElasticSettings, OnCancel, PipelineSettings, Roles
from pearl.core.tasks import TaskCursor
from pearl.core.workload import Profile


@dataclass(frozen=True, slots=True)
class Policy:
    about: str
    elastic: ElasticSettings
    decision: DecisionSettings = field(default_factory=DecisionSettings)
    closed_form: bool = False
    """The source's equations instead of the drain-aware model."""

    def machine(self, pipeline: PipelineSettings, tasks: TaskCursor, prior: Profile, drain: DrainAware) -> Scheduler:
        """The schedulers of a run, with a tracker that begins with `prior`; `drain` knows the engines' caches."""
        model = ClosedForm() if self.closed_form else drain
        tracker = RuntimeTracker(prior)
        hot = Pipeline(pipeline, tasks)
        cold = Elastic(hot, self.elastic, DecisionEngine(self.decision, model), tracker)
        return Scheduler(hot, cold)


INTER = ElasticSettings(inter_scale=True)

POLICIES: dict[str, Policy] = {
    "colocated": Policy("reserved GPUs only, nothing elastic, all workers colocated", ElasticSettings()),
    "elastic": Policy("preemptible GPUs too; all workers colocated", INTER),
    "elastic-borrow": Policy(
        "preemptible GPUs, and training GPUs whenever the trainer waits; all workers colocated",
        ElasticSettings(inter_scale=True, intra_scale=Borrowing.ALWAYS),
    ),
    "static-pd": Policy(
        "preemptible GPUs; prefill and decode workers one to one, whatever the load",
        ElasticSettings(inter_scale=True, roles=Roles.FIXED),
    ),
    "pearl-paper": Policy(
        "all of the source, by its equations: no mixed layouts, a failed expansion is cancelled as a whole",
        ElasticSettings(
            inter_scale=True, intra_scale=Borrowing.GATED, roles=Roles.DYNAMIC, on_cancel=OnCancel.RELEASE
        ),
        DecisionSettings(mixed=False),
        closed_form=True,
    ),
    "pearl": Policy(
        "preemptible and borrowed GPUs, layouts by the drain-aware model, mixed ones too",
        ElasticSettings(inter_scale=True, intra_scale=Borrowing.GATED, roles=Roles.DYNAMIC),
    ),
}  # fmt: skip
