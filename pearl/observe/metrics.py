"""One record per optimizer step: `metrics.jsonl` and TensorBoard scalars, plus the totals of the run."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.trajectory import StopReason, Trajectory
from pearl.observe.utilisation import Utilisation

RATE_WINDOW_S = 30.0
"""Steps can follow each other at once; tokens/s is taken since the last step that is at least this old."""
TRUNCATED = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT)


class Metrics:
    """Observer. `on_step` gets each finished record."""

    def __init__(
        self, metrics: Path, tensorboard: Path, pipeline: Pipeline, on_step: Callable[[dict[str, Any]], None]
    ) -> None:
        self._path = metrics
        self._file = metrics.open("a")
        self._writer = SummaryWriter(str(tensorboard), max_queue=1000, flush_secs=5)
        self.pipeline, self.on_step = pipeline, on_step
        self.utilisation = Utilisation()
        self.began = time.monotonic()
        self.tokens_generated = 0
        self._trained: dict[int, int] = {}
        """Tokens by step."""
        self.rewards: dict[int, float] = {}
        """By step; a step that is done again replaces itself."""
        self._ended_before = self._failed_before = 0
        """Samples that had ended, and failed, at the last step."""
        self._ended_before = sum(pipeline.ended.values())
        """Samples that had ended at the last step."""
        self._failed_before = pipeline.ended[Outcome.FAILED]
        self._marks: deque[tuple[float, int]] = deque()
        """(time, tokens generated) at the first dispatch and at each step."""

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.utilisation.saw(now, entry)
        if isinstance(entry, ev.TurnGenerated):
            self.tokens_generated += entry.tokens
        elif isinstance(entry, ev.Generate) and not self._marks:
            self._marks.append((now, self.tokens_generated))

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        pass  # the machine counts

    def notice(self, text: str) -> None:
        pass

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        step = int(metrics["step"])
        if not self._marks:  # a resumed run can train before it generates
            self._marks.append((self.began, self.tokens_generated))
        seconds = now - self._marks[-1][0]
        while len(self._marks) > 1 and self._marks[1][0] <= now - RATE_WINDOW_S:
            self._marks.popleft()
        since, before = self._marks[0]
        rate = (self.tokens_generated - before) / (now - since)
        self._marks.append((now, self.tokens_generated))
        self._trained[step] = sum(len(t.token_ids) for t in trajectories)
        reward = fmean(t.reward for t in trajectories)
        self.rewards[step] = reward
        step_of = self.pipeline.lineage.step_of
        staleness = [step - 1 - min(step_of[v] for v in t.versions) for t in trajectories]
        record = {
            **metrics,
            "step": step,
            "reward": reward,
            "reward_max": max(t.reward for t in trajectories),
            "turns": fmean(t.turns for t in trajectories),
            "response_tokens": fmean(t.generated_tokens for t in trajectories),
            "tokens_per_s": rate,
            "seconds_since_last": seconds,
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            "staleness_histogram": [staleness.count(age) for age in range(max(staleness) + 1)],
            "staleness_bound": self.pipeline.settings.max_staleness_steps,
            "truncation_rate": fmean(t.stop in TRUNCATED for t in trajectories),
            "failure_rate": self._failure_rate(),
            "trainer_idle_ratio": self.utilisation.trainer_idle_ratio,
            "rollout_idle_ratio": self.utilisation.rollout_idle_ratio,
            "queue": len(self.pipeline.queue) + len(self.pipeline.waiting),
            "live_trajectories": len(self.pipeline.attempts),
            "weight_version": self.pipeline.version,
            "trajectories_failed": self.pipeline.ended[Outcome.FAILED],
            "trajectories_stale": self.pipeline.ended[Outcome.STALE],
        }
        for reason in {t.stop for t in trajectories}:
            record[f"stop_{reason}"] = fmean(t.stop is reason for t in trajectories)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self.on_step(record)

    def resume(self, step: int, tokens_generated: int) -> None:
        """Take up the totals of an interrupted run, as far as they belong to steps up to `step`."""
        self.tokens_generated = tokens_generated
        for line in self._path.read_text().splitlines():
            record = json.loads(line)
            if record["step"] <= step:
                self.rewards[record["step"]] = record["reward"]
                self._trained[record["step"]] = int(record["tokens_trained"])

    def _failure_rate(self) -> float:
        """Share of failed among the samples that ended since the last step; 0 if none did."""
        ended, failed = sum(self.pipeline.ended.values()), self.pipeline.ended[Outcome.FAILED]
        # A rollback takes ends back, never failures.
        rate = min(1.0, (failed - self._failed_before) / max(1, ended - self._ended_before))
        self._ended_before, self._failed_before = ended, failed
        return rate

    def summary(self) -> dict[str, Any]:
        """Totals so far, with the names of the command's JSON output."""
        return {
            "steps": self.pipeline.steps_done,
            "seconds": round(time.monotonic() - self.began, 2),
            "trajectories_completed": self.pipeline.ended[Outcome.TRAINED],
            "trajectories_failed": self.pipeline.ended[Outcome.FAILED],
            "trajectories_stale": self.pipeline.ended[Outcome.STALE],
            "trajectories_unfinished": self.pipeline.samples_unfinished,
            "tokens_generated": self.tokens_generated,
            "tokens_trained": sum(self._trained.values()),
            "reward_by_step": [round(self.rewards[step], 4) for step in sorted(self.rewards)],
            "weight_version": max(self.pipeline.version, 0),
            "trainer_idle_ratio": round(self.utilisation.trainer_idle_ratio, 4),
            "rollout_idle_ratio": round(self.utilisation.rollout_idle_ratio, 4),
        }

    def close(self) -> None:
        self._file.close()
        self._writer.close()
