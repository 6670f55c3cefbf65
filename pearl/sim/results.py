"""What a simulated run comes to, in numbers; an observer."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Zone
from pearl.core.trajectory import TrajectoryId


class Results:
    """`throughput` is the source's: tokens generated plus trained, over the time from first dispatch to last step.

    Trained tokens are all tokens of the trained trajectories, generated ones those of the responses.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.drawn_samples = self.ended_samples = 0
        self.began_s: float | None = None
        self.step_s: list[float] = []
        """When each step was done."""
        self.generated = 0
        self.generated_at_step: list[int] = []
        self.trained = 0
        self.makespans: list[float] = []
        self.borrowed_gpu_s = self.preemptible_gpu_s = 0.0
        self.role_switches = self.mode_switches = self.borrowings = self.preemptions = 0
        self.turns = self.prompt_tokens = self.cached_tokens = 0
        self.rewards: list[float] = []
        self.now = 0.0
        self._gpus: dict[str, int] = {}
        self._present: dict[str, float] = {}
        self._noticed: set[str] = set()
        self._lent: dict[str, float] = {}
        self._dispatched: dict[int, float] = {}
        """First dispatch of each group that is not trained yet."""
        self._scored: dict[int, float] = {}
        self._tokens: dict[TrajectoryId, int] = {}
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.RunStarted: self._run_started,
            ev.SlotJoined: self._slot_joined,
            ev.SlotNotice: self._slot_notice,
            ev.SlotLost: self._slot_gone,
            ev.ReleaseSlot: self._slot_gone,
            ev.Generate: self._generate,
            ev.TurnGenerated: self._turn_generated,
            ev.EnvironmentOpened: self._environment_opened,
            ev.EnvironmentStepped: self._environment_stepped,
            ev.TrajectoryScored: self._trajectory_scored,
            ev.DiscardTrajectory: lambda i: self._tokens.pop(i.trajectory, None),
            ev.DrawGroup: self._draw_group,
            ev.EndSample: self._end_sample,
            ev.TrainBatch: self._train_batch,
            ev.BatchTrained: self._batch_trained,
            ev.TrainerOffloaded: self._offloaded,
            ev.ReloadTrainer: self._reload,
            ev.SwitchRole: self._switch_role,
            ev.RecordDecision: self._decided,
        }

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.now = now
        handler = self._handlers.get(type(entry))
        if handler is not None:
            handler(entry)

    def _run_started(self, event: ev.RunStarted) -> None:
        for slot in event.slots:
            self._gpus[slot.name] = len(slot.gpus)

    def _draw_group(self, i: ev.DrawGroup) -> None:
        self.drawn_samples += self.group_size

    def _end_sample(self, i: ev.EndSample) -> None:
        self.ended_samples += 1
        if i.trajectory is not None:
            self._tokens.pop(i.trajectory, None)

    def _slot_joined(self, event: ev.SlotJoined) -> None:
        self._gpus[event.slot.name] = len(event.slot.gpus)
        if event.slot.zone is Zone.PREEMPTIBLE:
            self._present[event.slot.name] = self.now

    def _slot_notice(self, event: ev.SlotNotice) -> None:
        if event.worker in self._present and event.worker not in self._noticed:
            self._noticed.add(event.worker)
            self.preemptions += 1

    def _slot_gone(self, entry: ev.SlotLost | ev.ReleaseSlot) -> None:
        noticed = entry.worker in self._noticed
        self._noticed.discard(entry.worker)
        self.preemptions += isinstance(entry, ev.SlotLost) and entry.worker in self._present and not noticed
        if (since := self._present.pop(entry.worker, None)) is not None:
            self.preemptible_gpu_s += (self.now - since) * self._gpus[entry.worker]

    def _offloaded(self, event: ev.TrainerOffloaded) -> None:
        self.borrowings += 1
        self._lent |= dict.fromkeys(event.slots, self.now)

    def _reload(self, i: ev.ReloadTrainer) -> None:
        for name in i.slots:
            if (since := self._lent.pop(name, None)) is not None:
                self.borrowed_gpu_s += (self.now - since) * self._gpus[name]

    def _switch_role(self, i: ev.SwitchRole) -> None:
        self.role_switches += 1

    def _decided(self, i: ev.RecordDecision) -> None:
        self.mode_switches += i.current is not None and i.current.whole and i.current.mode is not i.decision.layout.mode

    def _generate(self, i: ev.Generate) -> None:
        if self.began_s is None:
            self.began_s = self.now
        self._dispatched.setdefault(i.trajectory.group, self.now)

    def _turn_generated(self, event: ev.TurnGenerated) -> None:
        self.generated += event.tokens
        if event.trajectory in self._tokens:
            self._tokens[event.trajectory] += event.tokens
        if (told := event.telemetry) is not None:
            self.turns += 1
            self.prompt_tokens += told.prompt_tokens
            self.cached_tokens += told.cached_tokens

    def _environment_opened(self, event: ev.EnvironmentOpened) -> None:
        self._tokens[event.trajectory] = event.prompt_tokens

    def _environment_stepped(self, event: ev.EnvironmentStepped) -> None:
        if event.trajectory in self._tokens:
            self._tokens[event.trajectory] += event.observation_tokens

    def _trajectory_scored(self, event: ev.TrajectoryScored) -> None:
        self._scored[event.trajectory.group] = self.now
        self.rewards.append(event.reward)

    def _train_batch(self, i: ev.TrainBatch) -> None:
        groups = {members[0].group for members in i.groups}
        first = min(self._dispatched.pop(group) for group in groups)
        self.makespans.append(max(self._scored.pop(group) for group in groups) - first)
        self.trained += sum(self._tokens[trajectory] for members in i.groups for trajectory in members)

    def _batch_trained(self, event: ev.BatchTrained) -> None:
        self.step_s.append(self.now)
        self.generated_at_step.append(self.generated)

    def summary(self) -> dict[str, Any]:
        """With the names of the command's JSON output."""
        window = self.step_s[-1] - self.began_s if self.step_s and self.began_s is not None else 0.0
        lent = sum((self.now - since) * self._gpus[name] for name, since in self._lent.items())
        present = sum((self.now - since) * self._gpus[name] for name, since in self._present.items())
        return {
            "steps": len(self.step_s),
            "step_s_mean": round(window / len(self.step_s), 3) if self.step_s else None,
            "throughput_tokens_s": round((self.generated_at_step[-1] + self.trained) / window, 2) if window else 0.0,
            "generated_tokens": self.generated,
            "trained_tokens": self.trained,
            "makespan_s_mean": round(fmean(self.makespans), 3) if self.makespans else None,
            "turns": self.turns,
            "prefix_cached_ratio": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None,
            "borrowed_gpu_s": round(self.borrowed_gpu_s + lent, 1),
            "borrowings": self.borrowings,
            "preemptible_gpu_s": round(self.preemptible_gpu_s + present, 1),
            "preemptions": self.preemptions,
            "role_switches": self.role_switches,
            "mode_switches": self.mode_switches,
        }
