"""The books of all samples: groups from their draw to their end, and how each sample ended.

Fates that are decided here:
* A group with failed members trains with the rest if `min_group_size` are left, else it is dropped and replaced.
* A sample overtaken by the staleness bound ends as stale; what is left of its group follows the same rule.
* A task whose groups keep failing is quarantined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from pearl.core import events as ev
from pearl.core.events import Instruction, Outcome
from pearl.core.groups import Group, Member
from pearl.core.settings import PipelineSettings
from pearl.core.staleness import is_stale
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import SampleId, TrajectoryId


class Samples:
    """`emit` takes each instruction."""

    def __init__(self, settings: PipelineSettings, tasks: TaskCursor, emit: Callable[[Instruction], None]) -> None:
        self.settings, self.tasks, self.emit = settings, tasks, emit
        self.groups: dict[int, Group] = {}
        """Groups that are neither trained nor dropped, by number, in draw order."""
        self.ready: deque[int] = deque()
        """Complete groups in the order in which they were completed."""
        self._incomplete = False
        """The next batch was looked for in vain, and nothing has happened since."""
        self.drawn_groups = 0
        self.dropped_groups = 0
        self.task_failures: dict[int, int] = {}
        self.ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def draw(self) -> Group | None:
        """One more group, or None if every task is quarantined."""
        task = self.tasks.draw()
        if task is None:
            return None
        group = Group(self.drawn_groups, task, open_members=self.settings.group_size)
        group.members = [Member(SampleId(group.number, i)) for i in range(self.settings.group_size)]
        self.drawn_groups += 1
        self.groups[group.number] = group
        self.emit(ev.DrawGroup(group.number, task, self.tasks.drawn))
        return group

    def of(self, trajectory: TrajectoryId) -> tuple[Group, Member]:
        group = self.groups[trajectory.group]
        return group, group.members[trajectory.member]

    def end(self, member: Member, trajectory: TrajectoryId | None, outcome: Outcome, reason: str) -> None:
        assert not member.ended, f"{member.sample} ends twice"
        member.outcome = outcome
        self.ended[outcome] += 1
        self.emit(ev.EndSample(member.sample, trajectory, outcome, reason))

    def settle(self, group: Group) -> None:
        """One more member is finished or ended; the last one completes the group."""
        group.open_members -= 1
        if group.open_members:
            return
        if group.task_failed:
            failures = self.task_failures[group.task] = self.task_failures.get(group.task, 0) + 1
            if failures >= self.settings.quarantine_after and group.task not in self.tasks.quarantined:
                self.tasks.quarantined.add(group.task)
                self.emit(ev.QuarantineTask(group.task, f"{failures} groups in a row lost members to it"))
        else:
            self.task_failures.pop(group.task, None)
        self._incomplete = False
        if self._large_enough(group, Outcome.FAILED):
            self.ready.append(group.number)

    def _large_enough(self, group: Group, outcome: Outcome) -> bool:
        """Whether the group can train; if not, it ends here and another is drawn in its place."""
        left = group.finished
        if len(left) >= self.settings.min_group_size:
            return True
        for member in left:
            reason = f"its group was left with {len(left)} of {self.settings.group_size} members"
            self.end(member, member.finished, outcome, reason)
        del self.groups[group.number]
        self.dropped_groups += 1
        return False

    def drop_stale(self, group: Group, step: int) -> bool:
        """End the complete group's samples that step `step` overtook; whether the group can still train."""
        for member in group.finished:
            if is_stale(member.oldest_step, step, self.settings.max_staleness_steps):
                reason = f"oldest token of the weights after step {member.oldest_step}, now step {step}"
                self.end(member, member.finished, Outcome.STALE, reason)
        if self._large_enough(group, Outcome.STALE):
            return True
        self.ready.remove(group.number)
        return False

    def next_batch(self) -> list[Group] | None:
        """The groups of the next step, if all are complete."""
        size = self.settings.groups_per_batch
        if self._incomplete or len(self.ready) < size:
            return None
        if self.settings.in_drawn_order:
            first = list(islice(self.groups.values(), size))
        else:
            first = [self.groups[number] for number in islice(self.ready, size)]
        self._incomplete = len(first) < size or any(group.open_members for group in first)
        return None if self._incomplete else first

    def take(self, batch: list[Group]) -> tuple[Group, ...]:
        for group in batch:
            self.ready.remove(group.number)
        return tuple(batch)

    def trained(self, batch: tuple[Group, ...], step: int) -> None:
        for group in batch:
            for member in group.finished:
                self.end(member, member.finished, Outcome.TRAINED, f"step {step}")
            del self.groups[group.number]
        self._incomplete = False

    def give_back(self, trained: list[Group], training: tuple[Group, ...]) -> None:
        """A rollback: trained groups and the ones in training are complete ones again, first in line."""
        for group in trained:
            for member in group.members:
                if member.outcome is Outcome.TRAINED:
                    member.outcome = None
                    self.ended[Outcome.TRAINED] -= 1
            self.groups[group.number] = group
        self._incomplete = False
        self.groups = dict(sorted(self.groups.items()))
        self.ready.extendleft(group.number for group in reversed([*trained, *training]))

    @property
    def remaining(self) -> int:
        """R: trajectories that the next batch still waits for. Groups that are not drawn yet count whole."""
        size, s = self.settings.group_size, self.settings
        if s.in_drawn_order:
            waits = [group.open_members for group in islice(self.groups.values(), s.groups_per_batch)]
        else:
            missing = max(0, s.groups_per_batch - len(self.ready))
            nearest = sorted(group.open_members for group in self.groups.values() if group.open_members)
            waits = [0] * len(self.ready) + nearest[:missing]
        return sum(waits) + size * max(0, s.groups_per_batch - len(waits))

    @property
    def drawn(self) -> int:
        return self.drawn_groups * self.settings.group_size

    @property
    def unfinished(self) -> int:
        """Samples that have not ended in any way (yet)."""
        return self.drawn - sum(self.ended.values())
