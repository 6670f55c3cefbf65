"""What must hold in a run, as seen from outside: by what the machine is told and by what it asks for.

What must hold inside of the machines is in `pearl/core/invariants.py`. Raises AssertionError.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.trajectory import FinishReason, SampleId, TrajectoryId
from pearl.sim.search.case import Case
from pearl.sim.search.deadlines import TIMER_LATE_S, return_grace_s

if TYPE_CHECKING:
    from pearl.sim.search.engines import Engine, Slot

LAG_S = 1.0
"""The driver may be this late to hear of something."""
OF_ENGINES = (
    ev.SyncWeights, ev.AbortRequests, ev.SwitchRole, ev.ReleaseEngine, ev.ResumeEngine, ev.StopEngine, ev.Generate,
)  # fmt: skip


class Rules:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.drawn: set[SampleId] = set()
        self.ended: dict[SampleId, tuple[Outcome, int]] = {}
        """How, and after which step."""
        self.trained: dict[int, tuple[TrajectoryId, ...]] = {}
        """By step, in the surviving lineage."""
        self.opened: set[TrajectoryId] = set()
        self.tokens: Counter[TrajectoryId] = Counter()
        """All that came back, prompts and observations too."""
        self.turn_tokens: Counter[TrajectoryId] = Counter()
        self.responded: set[TrajectoryId] = set()
        """Their present response is whole."""
        self.doomed: set[TrajectoryId] = set()
        """Their last turn failed or was empty."""
        self.turns: Counter[TrajectoryId] = Counter()
        """Whole responses."""
        self.cut: set[TrajectoryId] = set()
        """Their last response was cut off by the limit of all tokens."""
        self.oldest_step: dict[TrajectoryId, int] = {}
        self.scored: set[TrajectoryId] = set()
        self.discarded: set[TrajectoryId] = set()
        self.step_of: dict[int, int] = {}
        self.may_fail = False
        """The trainer was lost before it ever was ready, of which a run may fail."""
        self._task_of: dict[int, int] = {}
        self._own_failures: defaultdict[int, set[int]] = defaultdict(set)
        """Groups that failed by their task's own fault, by task."""
        self._quarantined: set[int] = set()
        self._may_grow = case.elastic is not None and case.elastic.inter_scale
        self.new_driver()

    def new_driver(self) -> None:
        """What is known of workers and of the trainer ends with the driver."""
        self._batch: tuple[TrajectoryId, ...] = ()
        self._trainer_ready = False
        self.retired = -1
        """Snapshots up to this version are removed."""
        self._complete_s: float | None = None
        self._version = -1
        self._lost: set[tuple[str, int]] = set()
        self._losses: Counter[str] = Counter()
        self._stopped: set[tuple[str, int]] = set()
        self._life: dict[str, int] = {}
        self._gone: set[str] = set()
        self._losses_of_slots = 0
        self._noticed: dict[str, tuple[int, float, float]] = {}
        """Life, and from when to when."""
        self._touched: TrajectoryId | None = None

    # --- what comes back, before the driver hears of it -------------------------------------------

    def posted(self, event: Event) -> None:
        match event:
            case ev.EnvironmentOpened():
                self.tokens[event.trajectory] = event.prompt_tokens
                self.turn_tokens[event.trajectory] = 0
            case ev.TurnGenerated():
                self.tokens[event.trajectory] += event.tokens
                self.turn_tokens[event.trajectory] += event.tokens
                full = self.tokens[event.trajectory] >= self.case.pipeline.max_trajectory_tokens
                interrupted = event.finish in (FinishReason.ABORT, FinishReason.LOST)
                empty = not interrupted and not self.turn_tokens[event.trajectory]
                if empty or event.finish is FinishReason.FAILED:
                    self.doomed.add(event.trajectory)
                if not interrupted or self.room(event.trajectory) <= 0:
                    self.turns[event.trajectory] += 1
                    self.responded.add(event.trajectory)
                if full and event.finish is not FinishReason.STOP:
                    self.cut.add(event.trajectory)
                if event.tokens:
                    step, before = self.step_of[event.version], self.oldest_step.get(event.trajectory)
                    self.oldest_step[event.trajectory] = step if before is None else min(step, before)
            case ev.EnvironmentStepped() if event.stop is None:
                self.tokens[event.trajectory] += event.observation_tokens
                self.turn_tokens[event.trajectory] = 0
                self.responded.discard(event.trajectory)
            case ev.TrajectoryScored():
                self.scored.add(event.trajectory)

    # --- events -----------------------------------------------------------------------------------

    def heard(self, event: Event, now: float, pipeline: Pipeline) -> None:
        """Before the machine takes the event."""
        self._touched = None
        match event:
            case ev.TurnGenerated() | ev.EnvironmentOpened() | ev.EnvironmentStepped():
                if event.trajectory in pipeline.attempts:
                    self._touched = event.trajectory
            case ev.TrainerReady():
                self._trainer_ready = True
                self._published(event.version, event.step)
            case ev.SnapshotPublished():
                self._published(event.version, max(self.trained, default=0))
            case ev.BatchTrained():
                self.trained[event.step] = self._batch
            case ev.TrainerLost():
                self._losses["the trainer"] += 1
                self.may_fail |= self._version < 0
                self._complete_s, self._trainer_ready, self._batch = None, False, ()
            case ev.WorkerLost():
                self._losses[event.worker] += (event.worker, event.incarnation) not in self._lost
                self._lost.add((event.worker, event.incarnation))
            case ev.EnvironmentWorkerLost():
                self._losses[event.worker] += 1
            case ev.RunStarted():
                self._life = dict.fromkeys(event.rollout_workers, 1)
            case ev.SlotJoined() if event.life > self._life.get(event.slot.name, 0):
                self._life[event.slot.name] = event.life
                self._gone.discard(event.slot.name)
                self._noticed.pop(event.slot.name, None)
            case ev.SlotLost() if event.life == self._life.get(event.worker):
                self._gone.add(event.worker)
                self._losses_of_slots += 1
            case ev.SlotNotice() if event.life == self._life.get(event.worker) and event.worker not in self._noticed:
                self._losses_of_slots += 1
                self._noticed[event.worker] = (event.life, now, now + event.seconds_left)

    def _published(self, version: int, step: int) -> None:
        assert version > max(self.step_of, default=-1), f"version {version} is published after {max(self.step_of)}"
        self.step_of[version] = step
        self._version = version

    def taken_away(self, slot: Slot, engine: Engine, now: float) -> None:
        """The slot goes, with this engine on it."""
        life, since_s, until_s = self._noticed.get(slot.info.name, (0, 0.0, 0.0))
        assert self.case.elastic is not None
        due_s = max(since_s, until_s - self.case.elastic.notice_margin_s) + TIMER_LATE_S + LAG_S
        if life == slot.life and engine.alive and now > due_s:
            stopped = (engine.worker, engine.incarnation) in self._stopped
            assert stopped, f"{engine.worker} has an engine when its notice is over, and nobody ends it"

    # --- instructions -----------------------------------------------------------------------------

    def asked(self, i: Instruction, now: float) -> None:
        if isinstance(i, OF_ENGINES):
            self._of_engine(i)
        match i:
            case ev.StartEngine():
                assert i.worker not in self._gone, f"{i.worker} is gone and is to start an engine"
                assert (i.worker, i.incarnation) not in self._lost, f"{i.worker}: a dead life is started"
            case ev.Generate():
                self._generate(i)
            case ev.SyncWeights():
                assert i.version == self._version, f"{i.worker} is to load v{i.version}, the newest is v{self._version}"
            case ev.StopEngine():
                self._stopped.add((i.worker, i.incarnation))
            case ev.RetireSnapshots():
                assert i.version < self._version, f"v{i.version} is retired and is the newest"
                self.retired = i.version
            case ev.DrawGroup():
                members = {SampleId(i.group, m) for m in range(self.case.pipeline.group_size)}
                assert not members & self.drawn, f"group {i.group} is drawn twice"
                self.drawn |= members
                assert i.task not in self._quarantined, f"task {i.task} is drawn and is quarantined"
                self._task_of[i.group] = i.task
            case ev.OpenEnvironment():
                assert i.trajectory not in self.opened, f"{i.trajectory} is opened twice"
                self.opened.add(i.trajectory)
            case ev.StepEnvironment():
                assert self.turn_tokens[i.trajectory], f"{i.trajectory}: an empty response for its environment"
                assert i.trajectory not in self.cut, f"{i.trajectory}: a response that is cut off for its environment"
            case ev.ScoreTrajectory():
                turns = self.turns[i.trajectory]
                assert i.turns == turns > 0, f"{i.trajectory} is scored with {i.turns} turns, it took {turns}"
            case ev.QuarantineTask():
                failed = len(self._own_failures[i.task])
                assert failed >= self.case.pipeline.quarantine_after, f"task {i.task}: {failed} groups, quarantined"
                self._quarantined.add(i.task)
            case ev.DiscardTrajectory():
                self.discarded.add(i.trajectory)
                if not i.infrastructure:
                    self._own_failures[self._task_of[i.trajectory.group]].add(i.trajectory.group)
            case ev.EndSample():
                self._end(i)
            case ev.TrainBatch():
                self._train(i)
            case ev.PublishSnapshot():
                assert i.version > max(self.step_of, default=-1), f"version {i.version} is used again"
            case ev.RestartTrainer():
                self._complete_s = None
                assert i.version > max(self.step_of, default=-1), f"version {i.version} is used again"
                self.roll_back(i.step)

    def _of_engine(self, i: Instruction) -> None:
        lives = [(i.worker, i.incarnation)]  # type: ignore[attr-defined]
        if isinstance(i, ev.Generate) and i.prefill_worker:
            lives.append((i.prefill_worker, i.prefill_incarnation))
        for worker, incarnation in lives:
            what = type(i).__name__
            assert (worker, incarnation) not in self._lost, f"{worker}: {what} for a life that is known to be over"
            assert worker not in self._gone, f"{worker}: {what} for a slot that is known to be gone"

    def _generate(self, i: ev.Generate) -> None:
        id = i.trajectory
        assert i.version == self._version, f"{i.worker} is asked for v{i.version}, the newest is v{self._version}"
        for worker in filter(None, (i.worker, i.prefill_worker)):
            life, *_ = self._noticed.get(worker, (0,))
            assert life != self._life[worker], f"{worker} gets a request and has a notice"
        room = self.room(id)
        assert id not in self.responded, f"{id} has answered this turn and is asked again"
        assert 0 < i.max_new_tokens == room, f"{id} may generate {i.max_new_tokens} tokens, there is room for {room}"

    def room(self, id: TrajectoryId) -> int:
        """Tokens that its turn may still generate."""
        s = self.case.pipeline
        return min(s.max_response_tokens - self.turn_tokens[id], s.max_trajectory_tokens - self.tokens[id])

    def _end(self, i: ev.EndSample) -> None:
        assert i.sample in self.drawn, f"{i.sample} ends and was never drawn"
        assert i.sample not in self.ended, f"{i.sample} ends twice"
        step = max(self.trained, default=0)
        if i.outcome is Outcome.TRAINED:
            assert i.trajectory in self.trained[step], f"{i.sample} ends as trained and was not in step {step}"
        elif i.outcome is Outcome.STALE:
            assert self._overtaken(i.sample.group, step + 1), f"{i.sample} ends as stale and its group is not"
        else:
            failed = any(t.group == i.sample.group for t in self.discarded)
            assert failed, f"{i.sample} ends as failed and nothing of its group failed"
        self.ended[i.sample] = (i.outcome, step)

    def _overtaken(self, group: int, step: int) -> bool:
        """Whether a scored sample of the group is too old for the step."""
        bound = self.case.pipeline.max_staleness_steps
        return any(step - 1 - self.oldest_step[t] > bound for t in self.scored if t.group == group)

    def _train(self, i: ev.TrainBatch) -> None:
        s, done = self.case.pipeline, max(self.trained, default=0)
        assert i.step == done + 1 <= s.steps, f"step {i.step} after step {done}"
        assert len(i.groups) == s.groups_per_batch, f"step {i.step} has {len(i.groups)} groups"
        before = {t.sample for batch in self.trained.values() for t in batch}
        for group in i.groups:
            assert s.min_group_size <= len(group), f"a group of {len(group)} is trained"
            assert len({t.group for t in group}) == 1, f"{group} are not one group"
            for t in group:
                assert t.sample not in before, f"{t.sample} is trained twice"
                assert t.sample not in self.ended, f"{t.sample} is trained and has ended"
                assert t in self.scored, f"{t} is trained and was not scored"
                assert t not in self.discarded, f"{t} is trained and was discarded"
                lag = i.step - 1 - self.oldest_step[t]
                assert lag <= s.max_staleness_steps, f"{t} is {lag} steps stale"
        self._batch = tuple(t for group in i.groups for t in group)
        assert len(set(self._batch)) == len(self._batch), f"step {i.step} trains a sample twice"
        self._complete_s = None

    def roll_back(self, step: int) -> None:
        self.trained = {s: batch for s, batch in self.trained.items() if s <= step}
        undone = [s for s, (o, at) in self.ended.items() if o is Outcome.TRAINED and at > step]
        for sample in undone:
            del self.ended[sample]
        self._batch = ()

    def resumed(self, pipeline: Pipeline) -> None:
        """After a driver was restored: whatever was begun goes on."""
        kept = {attempt.id for attempt in pipeline.suspended}
        over = self.scored | self.discarded | self.doomed
        lost = [id for id in self.opened - over - kept if self.tokens[id]]
        assert not lost, f"begun, and forgotten by the restored run: {sorted(map(str, lost))}"

    # --- after every event ------------------------------------------------------------------------

    def check(self, now: float, pipeline: Pipeline) -> None:
        id = self._touched
        if id is not None and (attempt := pipeline.attempts.get(id)):
            assert attempt.tokens == self.tokens[id], f"{id} holds {attempt.tokens} tokens of {self.tokens[id]}"
        if self.batch_waits(pipeline):
            self._complete_s = now if self._complete_s is None else self._complete_s
            deadline_s = self.case.elastic.return_deadline_s if self.case.elastic else 0.0
            waited_s = now - self._complete_s
            assert waited_s <= deadline_s + return_grace_s(), f"the trainer has waited {waited_s:.1f} s for its GPUs"
        else:
            self._complete_s = None

    def batch_waits(self, pipeline: Pipeline) -> bool:
        """A batch is complete, and the trainer has nothing else to do."""
        s = self.case.pipeline
        if not self._trainer_ready or pipeline.training or pipeline.publishing or len(self.trained) >= s.steps:
            return False
        if not s.in_drawn_order:
            return len(pipeline.ready) >= s.groups_per_batch
        first = list(pipeline.groups.values())[: s.groups_per_batch]
        return len(first) == s.groups_per_batch and not any(group.open_members for group in first)

    def finished(self, end: ev.FinishRun, pipeline: Pipeline) -> None:
        if end.failed:
            too_often = [name for name, count in self._losses.items() if count > self.case.pipeline.worker_restarts]
            none_left = "no rollout worker is left" in end.reason and not self._may_grow and self._losses_of_slots
            no_tasks = len(self._quarantined) == self.case.tasks
            assert self.may_fail or too_often or none_left or no_tasks, f"the run failed: {end.reason}"
            return
        left = self.drawn - self.ended.keys()
        assert not left, f"lost: {sorted(map(str, left))}"
        assert not pipeline.samples_unfinished, f"{pipeline.samples_unfinished} samples are unfinished"
        counts = Counter(outcome for outcome, _ in self.ended.values())
        assert counts == +Counter(pipeline.ended), f"{dict(counts)} ended, the machine counts {pipeline.ended}"
        assert sorted(self.trained) == list(range(1, self.case.pipeline.steps + 1)), f"steps {sorted(self.trained)}"
