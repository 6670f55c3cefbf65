"""Named settings of the Elastic Scheduler, for runs and for simulations.

`POLICIES` are for both. `COMPARED` are what others do, on the same machines, for simulations; `SYSTEMS` are the names
of published systems, each with the policy that it comes to here and what of it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.drain import DrainAware
from pearl.core.elastic import Elastic
from pearl.core.events import Event, Instruction
from pearl.core.makespan import AlwaysPairs, ClosedForm, MakespanModel
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
    model: MakespanModel | None = None
    """None: the drain-aware one."""
    pairs: bool = False
    """Never colocated where there are two workers, whatever the model says."""
    learns: bool = True
    """Off: decides by the prior for ever, as a planner does that runs once, before the engines start."""

    def machine(self, pipeline: PipelineSettings, tasks: TaskCursor, prior: Profile, drain: DrainAware) -> Scheduler:
        """The schedulers of a run, with a tracker that begins with `prior`; `drain` knows the engines' caches."""
        tracker = RuntimeTracker(prior) if self.learns else Unmoved(prior)
        hot = Pipeline(pipeline, tasks)
        model = self.model or drain
        engine = DecisionEngine(self.decision, AlwaysPairs(model) if self.pairs else model)
        cold = Elastic(hot, self.elastic, engine, tracker)
        return Scheduler(hot, cold)


@dataclass(frozen=True, slots=True)
class Unmoved:
    """A tracker that sees nothing."""

    known: Profile

    def observe(self, entry: Event | Instruction, now: float) -> None:
        pass

    def profile(self) -> Profile:
        return self.known


@dataclass(frozen=True, slots=True)
class System:
    """A published system."""

    policy: str
    left_out: str
    """Of its published rules."""


INTER = ElasticSettings(inter_scale=True)
DYNAMIC = ElasticSettings(inter_scale=True, roles=Roles.DYNAMIC)
PAPER = ElasticSettings(
    inter_scale=True, intra_scale=Borrowing.GATED, roles=Roles.DYNAMIC, on_cancel=OnCancel.RELEASE,
    partial_borrowing=False,
)  # fmt: skip
AS_PUBLISHED = DecisionSettings(mixed=False, drains=False)
PAIRS = DecisionSettings(mixed=False, constraints=False)
OURS = ElasticSettings(inter_scale=True, intra_scale=Borrowing.GATED, roles=Roles.DYNAMIC, overlap=True)
SURER = DecisionSettings(mode_threshold=0.02, ratio_threshold=0.01)
"""Of 14 simulated settings in which the drain-aware model predicted that another mode saves 1 to 5 %, it did in all.
And a change at a step's end costs next to nothing: new weights drain all workers and empty their caches anyway."""
AT_ONCE = DecisionSettings(mode_threshold=0.0, ratio_threshold=0.0, mixed=False, drains=False)
"""Without hysteresis: serving planners follow the load."""
RATE = ClosedForm(bubble=False)
"""What serving planners balance: prefill against decode work, as if all sequences decoded all the time."""

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
        "all of the source, by its equations: no mixed layouts, all training GPUs are borrowed or none, a failed "
        "expansion is cancelled as a whole",
        PAPER, AS_PUBLISHED, ClosedForm(),
    ),
    "pearl": Policy(
        "preemptible and borrowed GPUs, layouts by the drain-aware model for all that is in flight, mixed ones too",
        OURS, SURER,
    ),
}  # fmt: skip

COMPARED: dict[str, Policy] = {
    "borrow": Policy(
        "reserved GPUs, and training GPUs whenever the trainer waits; all workers colocated",
        ElasticSettings(intra_scale=Borrowing.ALWAYS),
    ),
    "borrow-gated": Policy(
        "reserved GPUs, and training GPUs where a model says that it pays; all workers colocated",
        ElasticSettings(intra_scale=Borrowing.GATED), model=ClosedForm(),
    ),
    "fixed-pd": Policy(
        "reserved GPUs only; prefill and decode workers one to one, whatever the load",
        ElasticSettings(roles=Roles.FIXED),
    ),
    "forced-pd": Policy(
        "the source's ablation: prefill-decode pairs at the ratio of its equations, never colocated",
        DYNAMIC, PAIRS, ClosedForm(), pairs=True,
    ),
    "forced-pd-borrow": Policy(
        "the same, and training GPUs whenever the trainer waits",
        ElasticSettings(inter_scale=True, intra_scale=Borrowing.ALWAYS, roles=Roles.DYNAMIC), PAIRS, ClosedForm(),
        pairs=True,
    ),
    "forced-pd-gated": Policy(
        "the same, and training GPUs where the gate says so", PAPER, PAIRS, ClosedForm(), pairs=True
    ),
    "pearl-pd": Policy(
        "as pearl, but prefill-decode pairs always",
        OURS, PAIRS, pairs=True,
    ),
    "splitwise": Policy(
        "preemptible GPUs; pairs at the ratio that balances the expected load, planned once",
        DYNAMIC, AT_ONCE, RATE, pairs=True, learns=False,
    ),
    "dopd": Policy(
        "preemptible GPUs; pairs at the ratio that balances the measured load", DYNAMIC, AT_ONCE, RATE, pairs=True
    ),
    "ampd": Policy(
        "preemptible GPUs; pairs or colocated workers, whichever balance the expected load better, planned once",
        DYNAMIC, AT_ONCE, RATE, learns=False,
    ),
    "ppd": Policy(
        "preemptible GPUs; pairs, colocated workers or both, whichever balance the measured load better",
        DYNAMIC, DecisionSettings(mode_threshold=0.0, ratio_threshold=0.0), RATE,
    ),
}  # fmt: skip

SYSTEMS: dict[str, System] = {
    "areal": System("colocated", "batches of whatever ends first, and its loss for stale tokens"),
    "roll": System("colocated", "nothing that the source names"),
    "roll-large": System("colocated", "nothing: it is ROLL with more reserved GPUs"),
    "laminar": System("colocated", "relay workers, weights by trajectory, repacking of the last ones"),
    "rlboost": System("elastic", "synchronous steps and seeding on the training GPUs; its tokens migrate as here"),
    "rlboost+": System("elastic", "nothing that the source names: RLBoost in asynchronous steps"),
    "rose": System("elastic", "serving GPUs whose engines are warm, their SLOs, sparse weight updates"),
    "seamlessflow": System("borrow", "its data plane and tags of other resources"),
    "bidirl": System("borrow-gated", "lending rollout GPUs to training, and its own admission model"),
    "rollart": System("fixed-pd", "hardware by affinity, serverless rewards, redundant environments"),
    "nemo-rl": System("fixed-pd", "what the user may set: other ratios"),
    "slime": System("fixed-pd", "what the user may set: other ratios"),
    "splitwise": System("splitwise", "the mixed pool for bursts, SLOs, clusters of unlike machines"),
    "dopd": System("dopd", "its forecast of the load and its scheduling of short requests"),
    "ampd": System("ampd", "the choice of local or remote prefill for each turn"),
    "ppd": System("ppd", "appended prompts on decode workers: a worker here that decodes for pairs never prefills"),
}

POLICY_NAMES = (*POLICIES, *COMPARED, *(name for name in SYSTEMS if name not in COMPARED))


def policy_named(name: str) -> Policy:
    """Of a policy or of a published system, one of `POLICY_NAMES`."""
    key = SYSTEMS[name].policy if name in SYSTEMS else name
    return POLICIES.get(key) or COMPARED[key]
