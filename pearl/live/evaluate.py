"""`pearl eval`: play tasks with real engines and sandboxes, without a trainer, and say how well it went.

It is a run of the Pipeline machine whose trainer is `FrozenWeights`: one step per model, every task once in each. Held
out are tasks whose prompt a run did not train on: prompts are compared token by token with the run's trajectories, and
those that were met there are left out of all figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from envs.sandbox.folder import default_directory, sweep
from pearl.config import ElasticConfig, RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.core.pipeline import Pipeline
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import Trajectory
from pearl.errors import UserError
from pearl.kept import CONFIG, is_run
from pearl.live.driver import Driver
from pearl.live.frozen import FrozenWeights, Subject
from pearl.live.machine import inelastic, pipeline_settings
from pearl.live.play import Play, report
from pearl.live.preflight import Preflight, preflight
from pearl.live.run_directory import RunDirectory
from pearl.live.train import INTERRUPTED, Result, stop_on_signals
from pearl.observe.console import RunConsole
from pearl.observe.event_log import EventLog

NOTICES = 8
"""Lines of progress per model."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks `first` to `first + count - 1` of `environment.seed`, `samples` answers to each."""

    first: int
    count: int
    samples: int


class InTurn(TaskCursor):
    """The tasks of a set in order, again and again."""

    def __init__(self, tasks: TaskSet) -> None:
        super().__init__(tasks.count, 0)
        self.first = tasks.first

    def draw(self) -> int | None:
        self.drawn += 1
        return self.first + (self.drawn - 1) % self.tasks


class PlayConsole(RunConsole):
    """Says who plays, and the mean reward now and then."""

    def __init__(self, console: Console, pipeline: Pipeline, subjects: list[Subject], tasks: TaskSet) -> None:
        super().__init__(console, pipeline)
        self.subjects, self.tasks = subjects, tasks
        self.rewards: list[float] = []

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        if isinstance(entry, ev.RunStarted):
            self._print(f"starting {len(entry.rollout_workers)} engine(s) ...")
        elif isinstance(entry, ev.TrainerReady | ev.SnapshotPublished):
            self.trainer_ready, self.rewards = True, []
            tasks, subject = self.tasks, self.subjects[entry.version]
            self._print(f"playing {subject.name}: {tasks.count} tasks, {tasks.samples} sample(s) of each")
        else:
            super().saw(now, entry)
        if isinstance(entry, ev.TrajectoryScored):
            self.rewards.append(entry.reward)
            done, all_of_them = len(self.rewards), self.tasks.count * self.tasks.samples
            if done % max(1, all_of_them // NOTICES) == 0:
                self._print(f"{done:>6}/{all_of_them} reward {fmean(self.rewards):.3f}")


class Failures:
    """Observer: why samples ended without a reward."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def saw(self, *_: Any) -> None: ...
    def stepped(self, *_: Any) -> None: ...
    def notice(self, text: str) -> None: ...

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        if end.outcome is not ev.Outcome.TRAINED:
            self.reasons.append(f"{end.sample}: {end.reason}")


def find_config(path: Path | None, models: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """The configuration in `path`, else that of the first run among `models`. Raises UserError."""
    if path is not None:
        return load_config(path, overrides)
    for run in (Path(model).expanduser() for model in models):
        if is_run(run):
            return load_config(run / CONFIG, ["run_dir=null", *overrides])
    raise UserError(f"nothing says which tasks {models[0]} is to play", "Give --config RUN.yaml, or a run directory.")


def prepare(config: RunConfig, tasks: int, samples: int, temperature: float | None, seed: int | None) -> RunConfig:
    """The configuration to play with. Held-out tasks follow those that were trained on, or are another seed's."""
    first = config.environment.tasks if seed is None else 0
    environment = {"tasks": first + tasks, **({} if seed is None else {"seed": seed})}
    sampling = config.engine.sampling
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    return config.model_copy(
        update={
            "name": f"eval-{config.name}",
            "environment": config.environment.model_copy(update=environment),
            "engine": config.engine.model_copy(update={"sampling": sampling}),
            "pipeline": config.pipeline.model_copy(update={"group_size": samples, "groups_per_batch": tasks}),
            # Nobody trains: no device and no memory is planned for it.
            "trainer": config.trainer.model_copy(update={"ranks": 0, "zero_stage": 0}),
            "elastic": ElasticConfig(),
        }
    )


async def evaluate(
    config: RunConfig, subjects: list[Subject], tasks: TaskSet, console: Console, *, bootstrap_seed: int = 0
) -> Result:
    """Play all subjects (`config` comes from `prepare`). With two, the difference is the first less the second.

    Raises UserError before anything starts; all else is in the result.
    """
    together = all(subject.computes_like(subjects[0]) for subject in subjects)
    parts = [subjects] if together else [[subject] for subject in subjects]
    plays: list[Play] = []
    failures: list[str] = []
    directories: list[str] = []
    began = time.monotonic()
    for number, part in enumerate(parts):
        place = {"model": config.model.model_copy(update={"path": str(part[0].model_directory)})}
        if config.run_dir and not together:
            place["run_dir"] = f"{config.run_dir}/{number}"  # type: ignore[assignment]
        playing = config.model_copy(update=place)
        ready = await preflight(playing)
        if ready.tasks < tasks.first + tasks.count:
            raise UserError(
                f"the family {config.environment.family!r} has {ready.tasks} tasks, so there are no {tasks.count} from "
                f"number {tasks.first} on",
                "Lower --tasks, or choose tasks of another --seed.",
            )
        directory = RunDirectory.create(playing)
        directories.append(str(directory.path))
        end, done, reasons = await _play(playing, part, tasks, ready, directory, console)
        if len(done) < len(part):
            stopped = {"run_dir": directories[-1], "stopped": end.reason}
            return Result(1 if end.failed else INTERRUPTED, stopped, end.reason if end.failed else None)
        plays += done
        failures += reasons
    summary = {
        **report(plays, bootstrap_seed),
        "family": config.environment.family,
        "environment_seed": config.environment.seed,
        "first_task": tasks.first,
        "samples": tasks.samples,
        "temperature": config.engine.sampling.temperature,
        "failed_samples": failures,
        "seconds": round(time.monotonic() - began, 1),
        "engine": f"sglang {version('sglang')}",
        "run_dir": directories[-1],
    }
    directory.summary.write_text(json.dumps(summary, indent=1))
    return Result(0, summary, None)


async def _play(
    config: RunConfig,
    subjects: list[Subject],
    tasks: TaskSet,
    ready: Preflight,
    directory: RunDirectory,
    console: Console,
) -> tuple[ev.FinishRun, list[Play], list[str]]:
    log, failures = EventLog(directory.events, directory.trajectories), Failures()
    settings = replace(
        pipeline_settings(config),
        steps=len(subjects),
        max_staleness_steps=0,
        min_group_size=0,  # no task is replaced by another one, whatever happens to its samples
        quarantine_after=tasks.count + 1,
        checkpoints=False,
    )
    machine = inelastic(settings, InTurn(tasks))
    driver = Driver(config, ready.model_directory, ready.tasks, ready.bindings, directory, [], scheduler=machine)
    driver.trainer = frozen = FrozenWeights(driver.trainer, subjects)
    screen = PlayConsole(console, driver.pipeline, subjects, tasks)
    driver.observers = [log, screen, failures]
    console.print(f"run directory {directory.path}", highlight=False, soft_wrap=True)
    stop_on_signals(driver, screen)
    end = ev.FinishRun(True, "the driver stopped")
    try:
        end = await driver.run()
    finally:
        screen.close()
        await driver.close(finish_writing=False)
        sandboxes = config.environment.sandbox.directory
        await asyncio.to_thread(sweep, Path(sandboxes) if sandboxes else default_directory())
        directory.close()
        log.close()
    plays = [
        Play.of(subject, groups, tasks.samples, frozen.checksums[number])
        for number, (subject, groups) in enumerate(zip(subjects, frozen.played, strict=False))
    ]
    return end, plays, failures.reasons
