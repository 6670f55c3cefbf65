"""One schedule: sizes and policies of a small run, and the faults that happen in it. All follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from pearl.core.autoscaler import AutoscalerSettings, Objective
from pearl.core.settings import Borrowing, ElasticSettings, OnCancel, PipelineSettings, Roles

ANY = "any"
"""Stands for every event and instruction."""


class Kind(StrEnum):
    """What goes wrong. "Its" worker: the one that the trigger names, or one that is picked."""

    ENGINE_DIES = "engine dies"
    """Requests return the tokens that had arrived."""
    PROCESS_DIES = "process dies"
    """They return none."""
    PREFILL_DIES = "prefill half dies"
    """Of a Generate: the process that computes the prompt."""
    ANSWER_LOST = "answer lost"
    """Of an instruction: at its deadline whoever should have answered is ended, as the live side does."""
    ANSWER_LATE = "answer late"
    """Just before the deadline."""
    REFUSED = "refused"
    """Of an instruction: it fails at once, by the worker's or the environment's own fault."""
    REPEATED = "repeated"
    """The event comes a second time."""
    NOTICE = "notice"
    """A slot is announced to leave, and leaves."""
    SLOT_LOST = "slot lost"
    SLOT_JOINS = "slot joins"
    ENVIRONMENT_LOST = "environment worker lost"
    TRAINER_LOST = "trainer lost"
    DRIVER_DIES = "driver dies"
    """It is restored from its records."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Happens `wait_s` after the `nth` (from 1) entry `on` of the run: the name of an event or instruction, or ANY."""

    kind: Kind
    on: str
    nth: int
    wait_s: float = 0.0
    pick: float = 0.0
    """In [0, 1): which slot, where the trigger names none; also how a notice is long."""

    def __str__(self) -> str:
        after = f" + {self.wait_s:.2f} s" if self.wait_s else ""
        return f"{self.kind} at {self.on} #{self.nth}{after}"


@dataclass(frozen=True, slots=True)
class Case:
    """`elastic` None: the Pipeline Scheduler alone, as with fixed slots."""

    seed: int
    pipeline: PipelineSettings
    elastic: ElasticSettings | None = None
    reserved: int = 2
    preemptible: int = 0
    overlap: int = 0
    environment_workers: int = 1
    environments_per_worker: int = 32
    tasks: int = 8
    task_seed: int = 0
    """Of the order in which tasks are drawn."""
    tracked: bool = False
    """The Runtime Tracker gives the profile, else it is fixed."""
    faults: tuple[Fault, ...] = ()
    fault_rate: float = 0.0
    """Share of the instructions, and of the slots that join, that meet a fault besides the planned ones."""


def small_run(**changes: object) -> PipelineSettings:
    """Settings of a run of four steps of two groups of three samples."""
    base = {
        "steps": 4, "groups_per_batch": 2, "group_size": 3, "max_staleness_steps": 1, "in_drawn_order": True,
        "abort_on_update": True, "max_response_tokens": 20, "max_trajectory_tokens": 120,
        "max_concurrent_trajectories": 64, "requests_per_worker": 4, "sample_attempts": 3, "min_group_size": 2,
        "quarantine_after": 3, "worker_restarts": 50,
    }  # fmt: skip
    return PipelineSettings(**{**base, **changes})  # type: ignore[arg-type]


MOST_FAULTS = 14

AWAITED = ("StartEngine", "SyncWeights", "AbortRequests", "SwitchRole", "ReleaseEngine", "ResumeEngine", "Generate",
           "StopEngine", "TrainBatch", "PublishSnapshot", "OffloadTrainer", "ReloadTrainer", "RestartTrainer",
           "OpenEnvironment", "ReopenEnvironment", "StepEnvironment", "ScoreTrajectory",
           "StartEnvironmentWorker")  # fmt: skip
OF_WORKERS = ("StartEngine", "EngineLoaded", "SyncWeights", "WeightsSynced", "AbortRequests", "AbortAcknowledged",
              "SwitchRole", "RoleSwitched", "ReleaseEngine", "EngineReleased", "ResumeEngine", "EngineResumed",
              "Generate", "PrefillDone", "TurnGenerated", "SlotNotice", "StopEngine")  # fmt: skip
OF_TRAINER = ("TrainBatch", "BatchTrained", "PublishSnapshot", "SnapshotPublished", "CheckpointWritten",
              "OffloadTrainer", "TrainerOffloaded", "ReloadTrainer", "TrainerReloaded", "RestartTrainer",
              "TrainerReady", "Generate")  # fmt: skip
OF_ENVIRONMENTS = ("OpenEnvironment", "EnvironmentOpened", "StepEnvironment", "EnvironmentStepped", "ScoreTrajectory",
                   "TrajectoryScored", "StartEnvironmentWorker", "ReopenEnvironment", "CloseEnvironment")  # fmt: skip
REPEATABLE = ("SlotJoined", "SlotNotice", "SlotLost", "WorkerLost", "EngineLoaded", "WeightsSynced", "RoleSwitched",
              "EngineReleased", "EngineResumed", "EnvironmentWorkerReady", "EnvironmentWorkerLost", "PrefillDone",
              "TimerFired")  # fmt: skip
ANYTHING = (*OF_WORKERS, *OF_TRAINER, *OF_ENVIRONMENTS, "DrawGroup", "EndSample", "DiscardTrajectory", "SetTimer",
            "RecordDecision", "RecordOperation", "WorkerLost", "SlotJoined", "SlotLost", "ReleaseSlot")  # fmt: skip
TRIGGERS: dict[Kind, tuple[str, ...]] = {
    Kind.ENGINE_DIES: OF_WORKERS,
    Kind.PROCESS_DIES: OF_WORKERS,
    Kind.PREFILL_DIES: ("Generate", "PrefillDone"),
    Kind.ANSWER_LOST: AWAITED,
    Kind.ANSWER_LATE: AWAITED,
    Kind.REFUSED: AWAITED,
    Kind.REPEATED: REPEATABLE,
    Kind.NOTICE: ANYTHING,
    Kind.SLOT_LOST: ANYTHING,
    Kind.SLOT_JOINS: ANYTHING,
    Kind.ENVIRONMENT_LOST: OF_ENVIRONMENTS,
    Kind.TRAINER_LOST: OF_TRAINER,
    Kind.DRIVER_DIES: ANYTHING,
}
OFTEN = frozenset({"Generate", "TurnGenerated", "StepEnvironment", "EnvironmentStepped", "PrefillDone"})
"""Entries of which a run has many."""


def draw(seed: int) -> Case:
    """The schedule of a seed."""
    r = random.Random(f"faults {seed}")
    elastic = None if r.random() < 0.1 else _policies(r)
    reserved = r.randint(1, 4)
    grows = elastic is not None and elastic.inter_scale
    borrows = elastic is not None and elastic.intra_scale is not Borrowing.NEVER
    checkpoints = r.random() < 0.7
    settings = small_run(
        steps=r.randint(2, 4), groups_per_batch=r.randint(1, 2), group_size=r.randint(2, 3),
        max_staleness_steps=r.randint(0, 2), in_drawn_order=r.random() < 0.5, abort_on_update=r.random() < 0.6,
        requests_per_worker=r.randint(1, 4), max_concurrent_trajectories=r.choice([2, 5, 64]),
        quarantine_after=r.choice([2, 50]), checkpoints=checkpoints,
        checkpoint_every_steps=r.choice([0, 1, 2]) if checkpoints else 0,
        kv_tokens_per_worker=r.choice([0, 0, 150]), max_trajectory_tokens=r.choice([40, 120]),
        worker_restarts=r.choice([1, 50, 50, 50]),
    )  # fmt: skip
    kinds = [kind for kind in Kind if _applies(kind, elastic, checkpoints)]
    kinds = r.sample(kinds, r.choice([1, 2, 3, len(kinds)]))  # few kinds, many of each, meet more often
    count = r.choice([0, 1, 2, 4, 6, 8, 10, MOST_FAULTS])
    return Case(
        seed=seed,
        pipeline=settings,
        elastic=elastic,
        reserved=reserved,
        preemptible=r.randint(0, 5) if grows else 0,
        overlap=r.randint(1, 3) if borrows else 0,
        environment_workers=r.randint(1, 3),
        environments_per_worker=r.choice([2, 32]),
        tasks=r.choice([3, 40]),
        task_seed=seed,
        tracked=r.random() < 0.4,
        faults=tuple(_fault(r, r.choice(kinds)) for _ in range(count)),
        fault_rate=r.choice([0.0, 0.0, 0.0, 0.02, 0.1]),
    )


def _policies(r: random.Random) -> ElasticSettings:
    return ElasticSettings(
        inter_scale=r.random() < 0.8,
        intra_scale=r.choice([Borrowing.NEVER, Borrowing.ALWAYS, Borrowing.ALWAYS, Borrowing.GATED]),
        roles=r.choice(list(Roles)),
        fixed_ratio=r.choice([(1, 1), (2, 1), (1, 3)]),
        on_cancel=r.choice(list(OnCancel)),
        join_window_s=r.choice([0.0, 5.0]),
        preparation_prior_s=6.0,
        return_deadline_s=r.choice([0.5, 5.0, 20.0]),
        notice_margin_s=r.choice([0.0, 2.0]),
        borrow_prior_s=0.1,
        return_prior_s=0.1,
        autoscale=_autoscaler(r) if r.random() < 0.25 else None,
    )


def _autoscaler(r: random.Random) -> AutoscalerSettings:
    """Restless, and of prices at which the number that is wanted is a close call."""
    return AutoscalerSettings(
        max_slots=r.randint(0, 5), other_usd_per_hour=1.0, objective=r.choice(list(Objective)),
        cooldown_s=r.choice([0.0, 2.0]), usd_per_slot_hour=r.choice([0.0, 0.2, 0.5, 1.0]),
        max_usd_per_hour=r.choice([None, 1.0]), lifetime_prior_s=r.choice([None, 20.0]),
    )  # fmt: skip


def _applies(kind: Kind, elastic: ElasticSettings | None, checkpoints: bool) -> bool:
    if kind in (Kind.NOTICE, Kind.SLOT_LOST, Kind.SLOT_JOINS):
        return elastic is not None
    return kind is not Kind.TRAINER_LOST or checkpoints


def _fault(r: random.Random, kind: Kind) -> Fault:
    on = r.choice(TRIGGERS[kind])
    nth = 1 + int(r.expovariate(1 / (30.0 if on in OFTEN else 3.0)))
    wait_s = r.choice([0.0, 0.0, r.expovariate(2.0), r.expovariate(0.2)])
    return Fault(kind, on, nth, wait_s, r.random())
