"""From a journal's records back to the state of an interrupted run.

`Replay` reads records in order, each a dict with a `kind` (see `pearl/live/journal.py` for who writes them), and holds
what they add up to: groups with their members, live trajectories with their counts, what was trained since which
checkpoint. A `rollback` record undoes the steps after a checkpoint, also those of an earlier resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pearl.core.events import Outcome
from pearl.core.groups import Attempt, Group, Member, Phase
from pearl.core.pipeline import Pipeline
from pearl.core.trajectory import FinishReason, SampleId, TrajectoryId

INTERRUPTED = (FinishReason.ABORT, FinishReason.LOST)
"""After one of these a turn is not over."""


@dataclass
class Replay:
    groups: dict[int, Group] = field(default_factory=dict)
    """All groups ever drawn, by number."""
    attempts: dict[TrajectoryId, Attempt] = field(default_factory=dict)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Group numbers by step, in the present lineage."""
    step_of: dict[int, int] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Groups in the order in which they were completed."""
    cursor: int = 0
    quarantined: set[int] = field(default_factory=set)
    group_size: int = 0
    trace_s: float = 0.0
    """How far the availability trace had been played."""

    def read(self, records: Iterable[Mapping[str, Any]]) -> Replay:
        for record in records:
            getattr(self, "_" + record["kind"])(record)
        return self

    def roll_back(self, step: int) -> None:
        """Undo every step after `step`."""
        for later in sorted((s for s in self.trained if s > step), reverse=True):
            for number in self.trained.pop(later):
                for member in self.groups[number].members:
                    if member.outcome is Outcome.TRAINED:
                        member.outcome = None
        self.checkpoints = [c for c in self.checkpoints if c <= step]

    def apply(self, pipeline: Pipeline, step: int) -> None:
        """Put the state into a fresh machine, as of the checkpoint of `step`."""
        self.roll_back(step)
        trained = {number for numbers in self.trained.values() for number in numbers}
        pipeline.tasks.drawn = self.cursor
        pipeline.tasks.quarantined |= self.quarantined
        pipeline.samples.drawn_groups = max(self.groups, default=-1) + 1
        pipeline.lineage.step_of.update(self.step_of)
        pipeline.lineage.checkpoint_step = step
        live = {attempt.id.sample: attempt for attempt in self.attempts.values()}
        for number, group in sorted(self.groups.items()):
            for member in group.members:
                if member.outcome is not None:
                    pipeline.ended[member.outcome] += 1
            if number in trained:
                continue
            if all(member.ended for member in group.members):
                pipeline.samples.dropped_groups += 1
                continue
            pipeline.groups[number] = group
            group.open_members = 0
            for member in group.members:
                if member.ended or member.finished is not None:
                    continue
                group.open_members += 1
                attempt = live.get(member.sample)
                if attempt is not None and attempt.resume_at is not None:
                    pipeline.suspended.append(attempt)
                else:
                    pipeline.waiting.append(member)
            if not group.open_members and number not in self.order:
                self.order.append(number)
        back = [n for n in self.order if n in pipeline.groups and not pipeline.groups[n].open_members]
        pipeline.ready.extend(back)

    @property
    def newest_version(self) -> int:
        """-1 if none was ever published."""
        return max(self.step_of, default=-1)

    # --- records ----------------------------------------------------------------------------------

    def _trace(self, r: Mapping[str, Any]) -> None:
        self.trace_s = r["seconds"]

    def _draw(self, r: Mapping[str, Any]) -> None:
        members = [Member(SampleId(r["group"], i)) for i in range(r["members"])]
        self.groups[r["group"]] = Group(r["group"], r["task"], members, r["members"])
        self.cursor = r["cursor"]

    def _open(self, r: Mapping[str, Any]) -> None:
        trajectory = TrajectoryId(*r["trajectory"])
        member = self._member(trajectory)
        member.attempts = trajectory.attempt + 1
        self.attempts[trajectory] = Attempt(trajectory, self.groups[trajectory.group].task, "")

    def _prompt(self, r: Mapping[str, Any]) -> None:
        if attempt := self.attempts.get(TrajectoryId(*r["trajectory"])):
            attempt.tokens = len(r["token_ids"])
            attempt.resume_at = Phase.QUEUED

    def _turn(self, r: Mapping[str, Any]) -> None:
        attempt = self.attempts.get(TrajectoryId(*r["trajectory"]))
        if attempt is None:
            return
        count = len(r["token_ids"])
        attempt.tokens += count
        attempt.turn_tokens += count
        attempt.generated_tokens += count
        for version, _ in r["versions"]:
            step = self.step_of[version]
            attempt.oldest_step = step if attempt.oldest_step is None else min(step, attempt.oldest_step)
        finish = FinishReason(r["finish"])
        over = finish not in INTERRUPTED or r["full"]
        if finish is FinishReason.FAILED or (over and not attempt.turn_tokens):
            del self.attempts[attempt.id]  # the driver died before it discarded the attempt
            self._member(attempt.id).own_failures += 1
        elif over:
            attempt.turns += 1
            attempt.resume_at = Phase.STEPPING
            attempt.cut = finish is not FinishReason.STOP

    def _observation(self, r: Mapping[str, Any]) -> None:
        if attempt := self.attempts.get(TrajectoryId(*r["trajectory"])):
            attempt.tokens += len(r["token_ids"])
            attempt.turn_tokens = 0
            attempt.resume_at = Phase.QUEUED

    def _discard(self, r: Mapping[str, Any]) -> None:
        trajectory = TrajectoryId(*r["trajectory"])
        self.attempts.pop(trajectory, None)
        member = self._member(trajectory)
        if member.finished == trajectory:  # its score came back, but behind the loss of its environment
            member.finished = None
            self._unsettle(trajectory.group)
        if r["infrastructure"]:
            member.infrastructure_failures += 1
        else:
            member.own_failures += 1

    def _finished(self, r: Mapping[str, Any]) -> None:
        trajectory = TrajectoryId(*r["trajectory"]["id"])
        attempt = self.attempts.pop(trajectory, None)
        if attempt is None:
            return  # it was discarded before its score came back
        member = self._member(trajectory)
        member.finished, member.reward = trajectory, r["trajectory"]["reward"]
        member.oldest_step = attempt.oldest_step or 0
        self._settle(trajectory.group)

    def _end(self, r: Mapping[str, Any]) -> None:
        sample = SampleId(*r["sample"])
        member = self.groups[sample.group].members[sample.member]
        member.outcome = Outcome(r["outcome"])
        if member.finished is None:
            self._settle(sample.group)

    def _settle(self, number: int) -> None:
        group = self.groups[number]
        group.open_members -= 1
        if not group.open_members:
            self.order.append(number)

    def _unsettle(self, number: int) -> None:
        group = self.groups[number]
        if not group.open_members:
            self.order.remove(number)
        group.open_members += 1

    def _trained(self, r: Mapping[str, Any]) -> None:
        self.trained[r["step"]] = tuple(r["groups"])

    def _published(self, r: Mapping[str, Any]) -> None:
        self.step_of[r["version"]] = r["step"]

    def _checkpoint(self, r: Mapping[str, Any]) -> None:
        self.checkpoints.append(r["step"])

    def _rollback(self, r: Mapping[str, Any]) -> None:
        self.roll_back(r["step"])

    def _quarantine(self, r: Mapping[str, Any]) -> None:
        self.quarantined.add(r["task"])

    def _member(self, trajectory: TrajectoryId) -> Member:
        return self.groups[trajectory.group].members[trajectory.member]
