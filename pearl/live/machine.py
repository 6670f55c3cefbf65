"""The schedulers of a live run, as its configuration says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pearl.config import RunConfig
from pearl.core.autoscaler import AutoscalerSettings, Objective
from pearl.core.drain import DrainAware
from pearl.core.elastic import Elastic
from pearl.core.pipeline import Pipeline
from pearl.core.policies import POLICIES, Policy
from pearl.core.profile import RuntimeTracker
from pearl.core.scheduler import Scheduler
from pearl.core.settings import ElasticSettings, OnCancel, PipelineSettings, Roles
from pearl.core.tasks import TaskCursor
from pearl.core.workload import Profile
from pearl.observe.profile import live_prior
from pearl.profiles import load_profile, read_profile

TAKEN_OVER = (
    "fixed_ratio", "join_window_s", "preparation_prior_s", "lifetime_factor", "notice_margin_s", "return_deadline_s",
    "borrow_prior_s", "return_prior_s", "cold_start_windows", "average_factor",
)  # fmt: skip
"""Keys of `elastic:` that the machine knows by the same name."""


def pipeline_settings(config: RunConfig) -> PipelineSettings:
    p = config.pipeline
    return PipelineSettings(
        steps=p.steps,
        groups_per_batch=p.groups_per_batch,
        group_size=p.group_size,
        max_staleness_steps=p.max_staleness_steps,
        in_drawn_order=p.batch_order == "drawn",
        abort_on_update=p.on_weight_update == "abort",
        max_response_tokens=p.max_response_tokens,
        max_trajectory_tokens=p.max_trajectory_tokens,
        max_concurrent_trajectories=p.max_concurrent_trajectories,
        requests_per_worker=config.engine.max_running_requests,
        sample_attempts=p.sample_attempts,
        min_group_size=p.min_group_size,
        quarantine_after=p.quarantine_after,
        worker_restarts=p.worker_restarts,
        checkpoints=config.checkpoint.every_steps > 0,
        checkpoint_every_steps=config.checkpoint.every_steps,
    )


def inelastic(settings: PipelineSettings, tasks: TaskCursor) -> Scheduler:
    """Lost workers are replaced; nothing else changes."""
    pipeline = Pipeline(settings, tasks)
    return Scheduler(pipeline, Elastic(pipeline, ElasticSettings()))


def make_scheduler(config: RunConfig, model_directory: Path, tasks: int) -> Scheduler:
    """Raises UserError for a profile that cannot be read."""
    settings = pipeline_settings(config)
    cursor = TaskCursor(tasks, config.seed, shuffled=config.pipeline.task_order == "shuffled")
    if config.elastic.policy == "colocated":
        return inelastic(settings, cursor)
    return live_policy(config).machine(settings, cursor, prior(config, model_directory), DrainAware())


def live_policy(config: RunConfig) -> Policy:
    """The policy that is named, with the keys under `elastic:`."""
    e = config.elastic
    named = POLICIES[e.policy]
    elastic = replace(named.elastic, **{name: getattr(e, name) for name in TAKEN_OVER})
    if not e.prefill_decode:
        elastic = replace(elastic, roles=Roles.COLOCATED)
    if e.on_cancel != "policy":
        elastic = replace(elastic, on_cancel=OnCancel(e.on_cancel))
    if e.autoscale.on:
        elastic = replace(elastic, autoscale=_autoscaler(config))
    thresholds = replace(named.decision, mode_threshold=e.mode_threshold, ratio_threshold=e.ratio_threshold)
    return replace(named, elastic=elastic, decision=thresholds)


def _autoscaler(config: RunConfig) -> AutoscalerSettings:
    a = config.elastic.autoscale
    assert a.usd_per_slot_hour is not None
    return AutoscalerSettings(
        max_slots=config.elastic.preemptible_slots,
        max_usd_per_hour=a.max_usd_per_hour,
        other_usd_per_hour=a.other_usd_per_hour,
        objective=Objective(a.objective),
        cooldown_s=a.cooldown_s,
        usd_per_slot_hour=a.usd_per_slot_hour,
        lifetime_prior_s=a.lifetime_prior_s,
    )


def prior(config: RunConfig, model_directory: Path) -> Profile:
    """What is expected before anything is measured. Raises UserError for a profile that is not there."""
    name, guessed = config.elastic.profile, live_prior(config, model_directory)
    if name is None:
        return guessed
    model, at, gpu = name.partition("@")
    if at:
        return Profile(load_profile(model, gpu, config.engine.tensor_parallel), guessed.workload)
    return read_profile(Path(name))


def tracker_of(scheduler: Scheduler) -> RuntimeTracker | None:
    """The one that the scheduler feeds, if it has one."""
    tracker = scheduler.elastic.tracker
    return tracker if isinstance(tracker, RuntimeTracker) else None
