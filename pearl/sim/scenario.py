"""What to simulate, checked and put together: cluster, models, workload and policy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pearl.core import events as ev
from pearl.core.autoscaler import AutoscalerSettings, Objective
from pearl.core.drain import DrainAware
from pearl.core.policies import POLICY_NAMES, Policy, policy_named
from pearl.core.settings import PipelineSettings
from pearl.core.tasks import TaskCursor
from pearl.core.workload import EngineProfile, Profile, WorkloadProfile
from pearl.errors import UserError
from pearl.profiles import load_architecture, load_gpu, load_profile
from pearl.sim import availability
from pearl.sim.cluster import Cluster, make_cluster
from pearl.sim.durations import Durations
from pearl.sim.engine import EngineOptions
from pearl.sim.replay import Replay
from pearl.sim.results import Results
from pearl.sim.simulator import Models, Observer, Simulator
from pearl.sim.trainer import ModelShape, TrainerModel
from pearl.sim.workload import PRESETS, Workload
from pearl.sim.workload_profile import workload_profile

TASKS = 4096
NO_END = 1_000_000
"""Steps: time ends the run, not they."""
DURATIONS = {"qwen3-30b-a3b": Durations(prepare_s=67.06, finalise_s=17.89, activate_s=6.09, deactivate_s=4.38)}
"""By model, where the source has others than Qwen3-8B's."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The defaults are the source's testbed and batch."""

    policy: str = "pearl"
    model: str = "qwen3-8b"
    gpu: str = "h800"
    gpus_per_worker: int = 2
    training_gpus: int = 16
    reserved_gpus: int = 4
    preemptible_gpus: int = 12
    """At most."""
    trace: str = "moderate-volatile"
    """One of `availability.GENERATED`, "none", or a file."""
    trace_start_s: float = 0.0
    notice_s: float | None = 30.0
    workload: str = "swe"
    """One of `PRESETS`, or a run directory."""
    hours: float = 2.0
    seed: int = 0
    batch: int = 64
    group_size: int = 16
    staleness: int = 1
    max_tokens: int = 32_768
    options: EngineOptions = field(default_factory=EngineOptions)
    autoscale: str = ""
    """An `Objective`: as many of the preemptible GPUs are taken as it is worth. Empty: all."""
    usd_per_gpu_hour: float = 1.0
    """Of training and reserved GPUs; only the ratio of the two counts for what is decided."""
    preemptible_usd_per_gpu_hour: float = 0.35
    max_usd_per_hour: float | None = None
    """Of preemptible GPUs, with `autoscale`."""

    @property
    def gpus(self) -> int:
        return self.training_gpus + self.reserved_gpus + self.preemptible_gpus

    @classmethod
    def of_size(cls, gpus: int, **changes: Any) -> Scenario:
        """In the source's proportions: half train, an eighth is reserved, a batch has two trajectories for each GPU."""
        worker = changes.get("gpus_per_worker", 2)
        if gpus < 8 * worker:
            raise UserError(f"{gpus} GPUs are too few", f"Take {8 * worker} or more, for workers of {worker}")
        training = gpus // 2 // worker * worker
        reserved = gpus // 8 // worker * worker
        group = changes.get("group_size", 16)
        batch = max(1, round(2 * gpus / group)) * group
        sizes = {
            "training_gpus": training,
            "reserved_gpus": reserved,
            "preemptible_gpus": gpus - training - reserved,
            "batch": batch,
        }
        return cls(**{**sizes, **changes})

    def check(self) -> None:
        """Raises UserError for the first thing that cannot be."""
        if self.policy not in POLICY_NAMES:
            raise UserError(f"no policy {self.policy!r}", f"There are: {', '.join(POLICY_NAMES)}")
        if self.batch < self.group_size or self.batch % self.group_size:
            raise UserError(
                f"a batch of {self.batch} trajectories is not made of groups of {self.group_size}",
                f"Take a multiple of {self.group_size}",
            )
        if self.group_size < 2:
            raise UserError("a group of one has no advantage", "Take a group size of 2 or more")
        if self.hours <= 0:
            raise UserError(f"nothing happens in {self.hours:g} hours", "Take a positive time")
        for name in ("training_gpus", "reserved_gpus", "preemptible_gpus"):
            if getattr(self, name) % self.gpus_per_worker:
                raise UserError(
                    f"{name} = {getattr(self, name)} does not divide into workers of {self.gpus_per_worker}",
                    "Take a multiple",
                )
        if self.autoscale and self.autoscale not in list(Objective):
            raise UserError(f"no objective {self.autoscale!r}", f"There are: {', '.join(Objective)}")
        if self.autoscale and not policy_named(self.policy).elastic.inter_scale:
            raise UserError(f"{self.policy} takes no preemptible GPUs", "Take another policy, or do not autoscale")
        if not self.reserved_gpus or not self.training_gpus:
            raise UserError("reserved and training GPUs are needed", f"Give at least {self.gpus_per_worker} of each")

    def availability(self) -> availability.Availability:
        most = self.preemptible_gpus
        if self.trace == "none" or not most:
            return [(0.0, 0)]
        if self.trace in availability.GENERATED:
            return availability.generate(self.trace, most, self.gpus_per_worker, self.hours * 3600, self.seed)
        return availability.read(Path(self.trace), most, self.gpus_per_worker, self.trace_start_s)

    def cluster(self) -> Cluster:
        return make_cluster(
            training_gpus=self.training_gpus,
            reserved_gpus=self.reserved_gpus,
            availability=self.availability(),
            gpus_per_slot=self.gpus_per_worker,
            notice_s=self.notice_s,
            seed=self.seed,
        )

    def machine_policy(self) -> Policy:
        """The policy that is named, with the autoscaler if there is to be one."""
        named = policy_named(self.policy)
        if not self.autoscale:
            return named
        settings = AutoscalerSettings(
            max_slots=self.preemptible_gpus // self.gpus_per_worker,
            max_usd_per_hour=self.max_usd_per_hour,
            other_usd_per_hour=(self.training_gpus + self.reserved_gpus) * self.usd_per_gpu_hour,
            objective=Objective(self.autoscale),
            usd_per_slot_hour=self.gpus_per_worker * self.preemptible_usd_per_gpu_hour,
        )
        return replace(named, elastic=replace(named.elastic, autoscale=settings))

    def usd(self, seconds: float, preemptible_gpu_s: float) -> float:
        """What a run of that length costs."""
        fixed = (self.training_gpus + self.reserved_gpus) * seconds * self.usd_per_gpu_hour
        return (fixed + preemptible_gpu_s * self.preemptible_usd_per_gpu_hour) / 3600.0

    def make_workload(self) -> Workload:
        if self.workload in PRESETS:
            return replace(PRESETS[self.workload], seed=self.seed)
        if Path(self.workload).is_dir():
            return Replay(Path(self.workload))
        raise UserError(f"no workload {self.workload!r}", f"Give a run directory, or one of {', '.join(PRESETS)}")

    def models(self) -> Models:
        architecture = load_architecture(self.model)
        routed = architecture.parameters - architecture.dense_parameters
        shape = ModelShape(
            self.model,
            architecture.parameters,
            architecture.dense_parameters + routed * architecture.expert_share,
            architecture.layers,
            architecture.attention_width,
            architecture.bytes_per_parameter,
        )
        trainer = TrainerModel(shape, self.training_gpus, load_gpu(self.gpu).flops)
        engine = load_profile(self.model, self.gpu, self.gpus_per_worker)
        return Models(engine, trainer, DURATIONS.get(self.model, Durations()), self.options)

    def pipeline(self, engine: EngineProfile) -> PipelineSettings:
        return PipelineSettings(
            steps=NO_END,
            groups_per_batch=self.batch // self.group_size,
            group_size=self.group_size,
            max_staleness_steps=self.staleness,
            in_drawn_order=True,
            abort_on_update=True,
            max_response_tokens=self.max_tokens,
            max_trajectory_tokens=self.max_tokens,
            max_concurrent_trajectories=NO_END,
            requests_per_worker=engine.max_running_requests,
            sample_attempts=3,
            min_group_size=2,
            quarantine_after=3,
            worker_restarts=NO_END,
            kv_tokens_per_worker=engine.kv_capacity_tokens,
        )


@cache
def _prior(batch: int, group_size: int) -> WorkloadProfile:
    """What a tracker takes for granted before it has seen anything: the same whatever is simulated."""
    return workload_profile(PRESETS["swe"], batch=batch, group_size=group_size)


def _drain_aware(options: EngineOptions, affinity: float) -> DrainAware:
    return DrainAware(
        affinity=affinity,
        decode_keeps_kv=options.decode_keeps_kv,
        prefill_keeps_response=options.prefill_keeps_response,
        chunk_tokens=options.chunk_tokens,
    )


def simulate(
    scenario: Scenario, observers: Iterable[Observer] = (), *, validate: bool = False
) -> tuple[dict[str, Any], Simulator]:
    """Play it; the numbers of the JSON output, and the simulator as it is at the end.

    Raises UserError for what cannot be simulated.
    """
    scenario.check()
    began = time.perf_counter()
    models, cluster, workload = scenario.models(), scenario.cluster(), scenario.make_workload()
    prior = Profile(models.engine, _prior(scenario.batch, scenario.group_size))
    pipeline = scenario.pipeline(models.engine)
    machine = scenario.machine_policy().machine(
        pipeline, TaskCursor(TASKS, scenario.seed), prior, _drain_aware(models.options, pipeline.affinity)
    )
    results = Results(scenario.group_size)
    simulator = Simulator(
        machine,
        cluster,
        models,
        workload,
        seed=scenario.seed,
        observers=[results, *observers],
        validate=validate,
    )
    end = simulator.run(scenario.hours * 3600)
    simulated_s = simulator.clock.now if end else scenario.hours * 3600
    found = results.summary()
    usd = scenario.usd(simulated_s, found["preemptible_gpu_s"])
    open_samples = sum(not m.ended for group in machine.pipeline.groups.values() for m in group.members)
    summary = {
        "policy": scenario.policy,
        "gpus": scenario.gpus,
        "seed": scenario.seed,
        "wall_s": round(time.perf_counter() - began, 2),
        "simulated_s": round(simulated_s, 1),
        "events": simulator.totals.events,
        **found,
        "usd": round(usd, 2),
        "tokens_per_usd": round((found["generated_tokens"] + found["trained_tokens"]) / usd, 1),
        "tokens_lost": simulator.totals.tokens_lost,
        "trajectories_lost": results.drawn_samples - results.ended_samples - open_samples,
        "ended": _ended(end),
    }
    return summary, simulator


def _ended(end: ev.FinishRun | None) -> str:
    return "time is over" if end is None else f"{'failed' if end.failed else 'done'}: {end.reason}"
