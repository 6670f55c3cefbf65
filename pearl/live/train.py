"""`pearl train`: one run from a configuration to its summary."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from rich.console import Console

from envs.sandbox.folder import default_directory, sweep
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.live.driver import Driver, Observer
from pearl.live.machine import tracker_of
from pearl.live.preflight import Preflight
from pearl.live.resume import Resume, load_resume
from pearl.live.run_directory import RunDirectory
from pearl.observe.console import RunConsole
from pearl.observe.elastic import ElasticCounts
from pearl.observe.event_log import EventLog
from pearl.observe.metrics import Metrics
from pearl.observe.profile import ProfileObserver, live_prior

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


class Watcher(Observer, Protocol):
    driver: Driver | None


@dataclass(frozen=True, slots=True)
class Result:
    exit_code: int
    summary: dict[str, Any]
    failure: str | None


async def train(
    config: RunConfig,
    ready: Preflight,
    console: Console,
    *,
    resume: bool = False,
    validate: bool = False,
    watch: Watcher | None = None,
) -> Result:
    """Run to the end. Raises UserError if the run directory cannot be made; all else is in the result.

    `resume`: go on with the interrupted run in `run_dir` (or the newest one of this name under `run_root`).
    `watch`: one more observer, which is given the driver.
    """
    directory = RunDirectory.reopen(config) if resume else RunDirectory.create(config)
    start = load_resume(directory) if resume else None
    log = EventLog(directory.events, directory.trajectories)
    driver = Driver(
        config, ready.model_directory, ready.tasks, ready.bindings, directory, [], validate=validate, resume=start
    )
    screen = RunConsole(console, driver.pipeline)
    metrics = Metrics(directory.metrics, directory.tensorboard, driver.pipeline, screen.step_line)
    prior, tracker = live_prior(config, ready.model_directory), tracker_of(driver.scheduler)
    profile, counts = (
        ProfileObserver(directory.profile, prior, tracker),
        ElasticCounts(config.elastic.return_deadline_s),
    )
    driver.observers = [log, metrics, screen, profile, counts]
    if watch is not None:
        watch.driver = driver
        driver.observers.append(watch)
    console.print(f"run directory {directory.path}", highlight=False, soft_wrap=True)
    if start is not None:
        metrics.resume(start.step, start.tokens_generated)
        console.print(_resumed(driver, start), highlight=False, soft_wrap=True)
    for text in ready.notices:
        screen.notice(text)
    stop_on_signals(driver, screen)
    end = ev.FinishRun(True, "the driver stopped")
    try:
        end = await driver.run()
    finally:
        screen.close()
        done = not end.failed and driver.pipeline.steps_done >= config.pipeline.steps
        await driver.close(finish_writing=done)
        await asyncio.to_thread(sweep, _sandboxes(config))
        directory.close()
        log.close()
        metrics.close()
        profile.close()
    summary = _summary(config, driver, metrics, directory) | {"elastic": counts.summary()}
    summary["stopped"] = None if done else end.reason
    directory.summary.write_text(json.dumps(summary, indent=1))
    code = 0 if done else 1 if end.failed else INTERRUPTED
    return Result(code, summary, end.reason if end.failed else None)


def _resumed(driver: Driver, start: Resume) -> str:
    machine = driver.pipeline
    return (
        f"resuming after step {start.step} as weight version {driver.first[1]}: {machine.samples_drawn} samples drawn, "
        f"{sum(machine.ended.values())} ended, {len(driver.finished)} finished and not trained, "
        f"{len(machine.suspended)} to go on from their tokens, {len(machine.waiting)} to start again"
    )


def _sandboxes(config: RunConfig) -> Any:
    return getattr(config.environment.sandbox, "directory", None) or default_directory()


def _summary(config: RunConfig, driver: Driver, metrics: Metrics, directory: RunDirectory) -> dict[str, Any]:
    totals = metrics.summary()
    lost = 0 if totals["steps"] < config.pipeline.steps else totals["trajectories_unfinished"]
    engines = {slot: {"version": v, "checksum": c} for slot, (v, c) in driver.rollout.checksums.items()}
    return {
        "engine": f"sglang {version('sglang')}",
        "model": config.model.path,
        **totals,
        "trajectories_lost": lost,
        "trainer_checksums": {str(v): c for v, c in driver.trainer.checksums.items()},
        "engine_checksums": engines,
        "run_dir": str(directory.path),
    }


def stop_on_signals(driver: Driver, screen: RunConsole) -> None:
    """The first Ctrl-C or SIGTERM ends the run cleanly, the second one at once."""
    asked: list[int] = []

    def stop(number: int) -> None:
        if asked:
            for worker in driver.cluster.workers.values():
                worker.process.end()
            os._exit(INTERRUPTED)
        asked.append(number)
        screen.notice("stopping; once more to stop at once")
        driver.post(ev.StopRequested(f"stopped by {signal.Signals(number).name}"))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
