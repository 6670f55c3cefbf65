"""What a person sees: a status line while things start, then one line per optimizer step.

On a terminal rich draws a live status below the lines; elsewhere the lines are plain.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Zone
from pearl.core.pipeline import Pipeline
from pearl.core.state import Activity
from pearl.core.trajectory import Trajectory
from pearl.observe import health
from pearl.observe.elastic import Lines, one_line

COLUMNS = (
    ("step", 8), ("reward", 7), ("loss", 11), ("tok/s", 7), ("s/step", 7), ("trainer idle", 13), ("rollout idle", 13),
    ("staleness", 10), ("queue", 6),
)  # fmt: skip


class RunConsole:
    """Observer that prints. `console` decides where to."""

    def __init__(self, console: Console, pipeline: Pipeline) -> None:
        self.console, self.pipeline = console, pipeline
        self.status: Status | None = None
        self.trainer_ready = False
        self.trainer_loss = ""
        self._header = False
        self._stopped: set[tuple[str, int]] = set()
        """Engines that were told to end."""
        self._going: set[str] = set()
        """Slots that have notice: that an engine ends with its slot is no news."""
        self._warned: set[str] = set()
        self._elastic = Lines()
        if console.is_terminal:
            self.status = console.status("starting")
            self.status.start()

    def saw(self, now: float, entry: Event | Instruction) -> None:
        match entry:
            case ev.RunStarted():
                lent = sum(slot.zone is Zone.OVERLAP for slot in entry.slots)
                workers, environments = len(entry.rollout_workers) - lent, len(entry.environment_workers)
                self._print(f"starting {workers} engines, the trainer and {environments} environment worker(s) ...")
            case ev.TrainerReady():
                self.trainer_ready = True
                self._print("trainer ready")
            case ev.EngineLoaded():
                self._print(f"engine {entry.worker} ready")
            case ev.StopEngine():
                self._stopped.add((entry.worker, entry.incarnation))
            case ev.WorkerLost() if (entry.worker, entry.incarnation) in self._stopped or entry.worker in self._going:
                pass  # as it was told to; the operation says why
            case ev.WorkerLost() | ev.EnvironmentWorkerLost():
                self._print(f"[yellow]{entry.worker} is lost:[/] {one_line(entry.reason)}")
            case ev.TrainerLost():
                self.trainer_loss = one_line(entry.reason)  # told with what follows from it: a restart, or the end
            case ev.RestartTrainer():
                self._print(f"[yellow]the trainer is lost:[/] {self.trainer_loss}")
                self._print(f"restarting the trainer from step {entry.step}")
            case ev.StartEngine(incarnation=life) if life > 1:
                self._print(f"restarting {entry.worker} (life {life})")
            case ev.EndSample(outcome=ev.Outcome.FAILED | ev.Outcome.STALE):
                self._print(f"[yellow]sample {entry.sample} ends as {entry.outcome}:[/] {one_line(entry.reason)}")
            case _ if text := self._elastic.line(entry):
                self._print(f"[cyan]elastic[/] {escape(text)}")
        if isinstance(entry, ev.SlotNotice):
            self._going.add(entry.worker)
        elif isinstance(entry, ev.SlotLost):
            self._going.discard(entry.worker)
        self._update()

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        pass  # `step_line` gets the whole record

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        pass

    def notice(self, text: str) -> None:
        self._print(f"[yellow]notice:[/] {text}")

    def step_line(self, record: dict[str, Any]) -> None:
        """The line of a step, and below it what `pearl.observe.health` warns of for the first time."""
        if not self._header:
            self._header = True
            self._print("[bold]" + "".join(name.rjust(width) for name, width in COLUMNS) + "[/]")
        values = (
            f"{record['step']}/{self.pipeline.settings.steps}",
            f"{record['reward']:.3f}",
            f"{record['loss']:.2e}",
            f"{record['tokens_per_s']:.1f}",
            f"{record['seconds_since_last']:.1f}",
            f"{record['trainer_idle_ratio']:.0%}",
            f"{record['rollout_idle_ratio']:.0%}",
            f"{record['staleness_mean']:.2f}",
            str(record["queue"]),
        )
        self._print("".join(v.rjust(width) for v, (_, width) in zip(values, COLUMNS, strict=True)))
        for warning in health.warnings(record):
            if warning.kind not in self._warned:
                self._warned.add(warning.kind)
                self._print(f"[yellow]warning, step {record['step']}:[/] {warning.text}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _update(self) -> None:
        if self.status:
            p = self.pipeline
            active = sum(w.activity is Activity.ACTIVE for w in p.fleet.workers.values())
            phase = "training" if p.training else "publishing" if p.publishing else "rolling out"
            self.status.update(
                f"{phase if self.trainer_ready else 'starting'} · step {p.steps_done}/{p.settings.steps} · "
                f"{active}/{len(p.fleet.workers)} engines active · {len(p.attempts)} trajectories live · "
                f"{len(p.queue)} turns queued · {len(p.ready)} groups ready"
            )

    def close(self) -> None:
        if self.status:
            self.status.stop()
            self.status = None
