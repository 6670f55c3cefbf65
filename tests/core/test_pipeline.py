"""The Pipeline Scheduler's rules, played in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core import events as ev
from pearl.core.events import Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.state import Activity
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId
from tests.core.virtual import play, settings

CONFIGURATIONS = st.fixed_dictionaries(
    {
        "max_staleness_steps": st.integers(0, 3),
        "in_drawn_order": st.booleans(),
        "abort_on_update": st.booleans(),
        "groups_per_batch": st.integers(1, 3),
        "group_size": st.integers(2, 4),
        "requests_per_worker": st.integers(1, 5),
        "max_concurrent_trajectories": st.integers(1, 12),
        "checkpoints": st.booleans(),
    }
)


def surviving_ends(log: list) -> list[ev.EndSample]:
    """Ends of samples without those that a rollback undid."""
    ends: list[ev.EndSample] = []
    for _, entry in log:
        if isinstance(entry, ev.EndSample):
            ends.append(entry)
        elif isinstance(entry, ev.RestartTrainer):
            undone = {f"step {s}" for s in range(entry.step + 1, 100)}
            ends = [e for e in ends if e.outcome is not Outcome.TRAINED or e.reason not in undone]
    return ends


def surviving_batches(log: list) -> list[ev.TrainBatch]:
    batches: list[ev.TrainBatch] = []
    for _, entry in log:
        if isinstance(entry, ev.TrainBatch):
            batches = [b for b in batches if b.step < entry.step] + [entry]
    return batches


@hypothesis_settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.0, 0.02, 0.1, 0.2]), changes=CONFIGURATIONS)
def test_every_run_ends_and_every_sample_ends_once(seed: int, fault_rate: float, changes: dict) -> None:
    virtual = play(seed, fault_rate, **changes)
    ended = Counter(e.sample for e in surviving_ends(virtual.log))
    assert all(count == 1 for count in ended.values()), "a sample ended twice in one lineage"
    if not virtual.end.failed:
        assert virtual.pipeline.samples_unfinished == 0, "a sample is lost"
        assert sum(ended.values()) == virtual.pipeline.samples_drawn
        assert [b.step for b in surviving_batches(virtual.log)] == [1, 2, 3, 4]


@hypothesis_settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.0, 0.1]), changes=CONFIGURATIONS)
def test_no_trained_token_is_staler_than_the_bound(seed: int, fault_rate: float, changes: dict) -> None:
    virtual = play(seed, fault_rate, **changes)
    oldest: dict[TrajectoryId, int] = {}
    step_of = virtual.pipeline.lineage.step_of
    for _, entry in virtual.log:
        if isinstance(entry, ev.TurnGenerated) and entry.tokens:
            step = step_of[entry.version]
            oldest[entry.trajectory] = min(step, oldest.get(entry.trajectory, step))
        if isinstance(entry, ev.TrainBatch):
            for trajectory in (t for group in entry.groups for t in group):
                assert entry.step - 1 - oldest[trajectory] <= changes["max_staleness_steps"]


@hypothesis_settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.0, 0.15]), changes=CONFIGURATIONS)
def test_a_worker_serves_only_weights_that_it_has_synced(seed: int, fault_rate: float, changes: dict) -> None:
    virtual = play(seed, fault_rate, **changes)
    synced: dict[tuple[str, int], int] = {}
    draining: set[tuple[str, int]] = set()
    for _, entry in virtual.log:
        match entry:
            case ev.WeightsSynced():
                assert entry.version >= synced.get((entry.worker, entry.incarnation), 0), "weights went backwards"
                synced[entry.worker, entry.incarnation] = entry.version
                draining.discard((entry.worker, entry.incarnation))
            case ev.AbortRequests() | ev.SyncWeights():
                draining.add((entry.worker, entry.incarnation))
            case ev.Generate():
                key = (entry.worker, entry.incarnation)
                assert key not in draining, "dispatched to a draining worker"
                assert synced[key] == entry.version


def test_batches_in_drawn_order_are_the_same_whatever_the_timing() -> None:
    def batches(seed: int) -> list:
        virtual = play(seed)
        return [[[t.sample for t in g] for g in b.groups] for b in virtual.of(ev.TrainBatch)]

    assert batches(1) == batches(2) == batches(3)


def test_synchronous_training_generates_every_token_with_the_weights_that_it_trains() -> None:
    virtual = play(3, max_staleness_steps=0)
    for batch in virtual.of(ev.TrainBatch):
        members = {t for g in batch.groups for t in g}
        versions = {e.version for e in virtual.of(ev.TurnGenerated) if e.trajectory in members and e.tokens}
        assert versions == {batch.step - 1}


# --- single rules, event by event -----------------------------------------------------------------


class Bench:
    """A machine with two serving workers, driven by hand."""

    def __init__(self, **changes: object) -> None:
        self.machine = Pipeline(settings(**{"groups_per_batch": 1, "group_size": 2, **changes}), TaskCursor(4, 0))
        self.out: list[ev.Instruction] = []
        self.send(ev.RunStarted(("w0", "w1"), ("e0",)))
        self.send(ev.EnvironmentWorkerReady("e0", 1, 16))
        self.send(ev.EngineLoaded("w0", 1))
        self.send(ev.EngineLoaded("w1", 1))
        self.send(ev.TrainerReady(0))
        for sync in [i for i in self.out if isinstance(i, ev.SyncWeights)]:
            self.send(ev.WeightsSynced(sync.worker, sync.incarnation, sync.version))

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        new = self.machine.handle(event, 0.0)
        self.machine.validate()
        self.out += new
        return new

    def opened(self, trajectory: TrajectoryId, tokens: int = 10) -> ev.Generate:
        new = self.send(ev.EnvironmentOpened(trajectory, tokens))
        return next(i for i in new if isinstance(i, ev.Generate) and i.trajectory == trajectory)

    def finish(self, trajectory: TrajectoryId) -> list[ev.Instruction]:
        """Play an open-able trajectory to its end in one turn."""
        self.generated(self.opened(trajectory), 5, FinishReason.STOP)
        self.send(ev.EnvironmentStepped(trajectory, 0, StopReason.SUBMITTED))
        return self.send(ev.TrajectoryScored(trajectory, 1.0))

    def generated(self, sent: ev.Generate, tokens: int, finish: FinishReason) -> list[ev.Instruction]:
        return self.send(
            ev.TurnGenerated(sent.trajectory, sent.worker, sent.incarnation, tokens, sent.version, finish, "why")
        )


def kinds(instructions: list[ev.Instruction], kind: type) -> list:
    return [i for i in instructions if isinstance(i, kind)]


def test_rollout_of_the_next_batch_overlaps_training() -> None:
    bench = Bench(max_staleness_steps=1)
    bench.finish(TrajectoryId(0, 0, 0))
    assert kinds(bench.finish(TrajectoryId(0, 1, 0)), ev.TrainBatch)
    assert bench.opened(TrajectoryId(1, 0, 0))


def test_synchronous_training_draws_nothing_during_an_update() -> None:
    bench = Bench(max_staleness_steps=0)
    bench.finish(TrajectoryId(0, 0, 0))
    bench.finish(TrajectoryId(0, 1, 0))
    assert {i.trajectory.group for i in kinds(bench.out, ev.OpenEnvironment)} == {0}


def test_an_aborted_turn_goes_on_with_the_room_that_is_left() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    again = kinds(bench.generated(sent, 6, FinishReason.ABORT), ev.Generate)
    assert [i.max_new_tokens for i in again] == [sent.max_new_tokens - 6]


def test_an_abort_without_tokens_is_legal() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    again = kinds(bench.generated(sent, 0, FinishReason.ABORT), ev.Generate)
    assert [i.max_new_tokens for i in again] == [sent.max_new_tokens]


def test_an_abort_on_the_last_token_ends_the_turn() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    assert kinds(bench.generated(sent, sent.max_new_tokens, FinishReason.ABORT), ev.StepEnvironment)


def test_an_empty_response_is_never_a_sample() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    new = bench.generated(sent, 0, FinishReason.STOP)
    assert kinds(new, ev.DiscardTrajectory) and not kinds(new, ev.StepEnvironment)
    assert [i.trajectory for i in kinds(new, ev.OpenEnvironment)] == [TrajectoryId(0, 0, 1)]


def test_a_lost_engine_keeps_the_tokens_and_another_worker_goes_on() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    assert kinds(bench.send(ev.WorkerLost(sent.worker, 1, "killed")), ev.StartEngine)
    again = kinds(bench.generated(sent, 4, FinishReason.LOST), ev.Generate)
    assert [(i.worker != sent.worker, i.max_new_tokens) for i in again] == [(True, sent.max_new_tokens - 4)]


def test_a_late_word_of_a_dead_life_changes_nothing() -> None:
    bench = Bench()
    bench.send(ev.WorkerLost("w0", 1, "killed"))
    bench.send(ev.EngineLoaded("w0", 1))
    bench.send(ev.WeightsSynced("w0", 1, 0))
    assert bench.machine.fleet.workers["w0"].activity is Activity.STARTING


def test_a_trajectory_that_kills_engines_is_given_up() -> None:
    bench = Bench(sample_attempts=1)
    sent = bench.opened(TrajectoryId(0, 0, 0))
    for _ in range(6):
        new = bench.generated(sent, 1, FinishReason.LOST)
        if ends := kinds(new, ev.EndSample):
            assert "engines died" in ends[0].reason
            return
        sent = kinds(new, ev.Generate)[0]
    pytest.fail("it was tried for ever")


def test_a_prompt_without_room_fails_at_once_and_says_why() -> None:
    bench = Bench()
    new = bench.send(ev.EnvironmentOpened(TrajectoryId(0, 0, 0), 120))
    (end,) = kinds(new, ev.EndSample)
    assert end.outcome is Outcome.FAILED and "max_trajectory_tokens" in end.reason


def test_a_full_trajectory_is_scored_as_token_limit() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0), tokens=110)
    assert sent.max_new_tokens == 10
    (score,) = kinds(bench.generated(sent, 10, FinishReason.LENGTH), ev.ScoreTrajectory)
    assert score.stop is StopReason.TOKEN_LIMIT


def test_a_group_trains_without_its_failed_member() -> None:
    bench = Bench(group_size=3, sample_attempts=1)
    for member in (0, 1):
        bench.finish(TrajectoryId(0, member, 0))
    bench.opened(TrajectoryId(0, 2, 0))
    new = bench.send(ev.EnvironmentFailed(TrajectoryId(0, 2, 0), "step", "broken", infrastructure=False))
    (batch,) = kinds(new, ev.TrainBatch)
    assert batch.groups == ((TrajectoryId(0, 0, 0), TrajectoryId(0, 1, 0)),)


def test_a_group_below_the_minimum_is_dropped_and_replaced() -> None:
    bench = Bench(sample_attempts=1)
    bench.finish(TrajectoryId(0, 0, 0))
    drawn = bench.machine.drawn_groups
    new = bench.send(ev.EnvironmentFailed(TrajectoryId(0, 1, 0), "open", "broken", infrastructure=False))
    assert [(e.sample.member, e.outcome) for e in kinds(new, ev.EndSample)] == [
        (1, Outcome.FAILED),
        (0, Outcome.FAILED),
    ]
    assert not kinds(new, ev.TrainBatch) and bench.machine.drawn_groups == drawn + 1


def test_an_infrastructure_fault_costs_the_task_no_attempt() -> None:
    bench = Bench(sample_attempts=1)
    new = bench.send(ev.EnvironmentFailed(TrajectoryId(0, 0, 0), "open", "disk", infrastructure=True))
    assert [i.trajectory for i in kinds(new, ev.OpenEnvironment)] == [TrajectoryId(0, 0, 1)]
    assert not kinds(new, ev.EndSample)


def test_infrastructure_faults_end_too() -> None:
    bench = Bench()
    for attempt in range(10):
        new = bench.send(ev.EnvironmentFailed(TrajectoryId(0, 0, attempt), "open", "disk", infrastructure=True))
    assert [e.reason for e in kinds(new, ev.EndSample)] == ["open: disk"]


def test_a_task_that_keeps_failing_is_quarantined_and_the_run_says_so_when_none_is_left() -> None:
    bench = Bench(sample_attempts=1, quarantine_after=1)
    for group in range(20):
        for member in (0, 1):
            failed = ev.EnvironmentFailed(TrajectoryId(group, member, 0), "open", "broken", infrastructure=False)
            bench.send(failed)
        if bench.machine.finished:
            break
    assert len(kinds(bench.out, ev.QuarantineTask)) == 4
    (end,) = kinds(bench.out, ev.FinishRun)
    assert end.failed and "quarantined" in end.reason


def test_an_environment_worker_that_dies_restarts_its_samples_elsewhere() -> None:
    bench = Bench()
    sent = bench.opened(TrajectoryId(0, 0, 0))
    new = bench.send(ev.EnvironmentWorkerLost("e0", 1, "killed"))
    assert TrajectoryId(0, 0, 0) in [d.trajectory for d in kinds(new, ev.DiscardTrajectory)]
    bench.generated(sent, 5, FinishReason.STOP)
    new = bench.send(ev.EnvironmentWorkerReady("e0", 2, 16))
    assert TrajectoryId(0, 0, 1) in [i.trajectory for i in kinds(new, ev.OpenEnvironment)]


def test_a_weight_update_waits_for_the_acknowledgement() -> None:
    bench = Bench()
    for member in (0, 1):
        bench.finish(TrajectoryId(0, member, 0))
    sent = bench.opened(TrajectoryId(1, 0, 0))
    bench.send(ev.BatchTrained(1))
    new = bench.send(ev.SnapshotPublished(1))
    assert [i.worker for i in kinds(new, ev.AbortRequests)] == [sent.worker]
    assert sent.worker not in [i.worker for i in kinds(new, ev.SyncWeights)]
    assert not kinds(bench.generated(sent, 2, FinishReason.ABORT), ev.SyncWeights)
    new = bench.send(ev.AbortAcknowledged(sent.worker, 1))
    assert [(i.worker, i.version) for i in kinds(new, ev.SyncWeights)] == [(sent.worker, 1)]


def test_a_weight_update_can_let_requests_finish() -> None:
    bench = Bench(abort_on_update=False)
    for member in (0, 1):
        bench.finish(TrajectoryId(0, member, 0))
    sent = bench.opened(TrajectoryId(1, 0, 0))
    bench.send(ev.BatchTrained(1))
    new = bench.send(ev.SnapshotPublished(1))
    assert not kinds(new, ev.AbortRequests)
    new = bench.generated(sent, 2, FinishReason.STOP)
    assert [(i.worker, i.version) for i in kinds(new, ev.SyncWeights)] == [(sent.worker, 1)]


def test_an_overtaken_sample_ends_as_stale_and_its_group_is_replaced() -> None:
    bench = Bench(in_drawn_order=False, max_staleness_steps=1, steps=6)
    slow = [bench.opened(TrajectoryId(0, member, 0)) for member in (0, 1)]
    for sent in slow:
        bench.generated(sent, 1, FinishReason.ABORT)  # a token of version 0
    group = 1
    for step in (1, 2):
        for member in (0, 1):
            bench.finish(TrajectoryId(group, member, 0))
        group += 1
        bench.send(ev.BatchTrained(step))
        bench.send(ev.SnapshotPublished(step))
        for worker in ("w0", "w1"):
            for sent in [g for g in slow if g.worker == worker]:
                bench.generated(sent, 0, FinishReason.ABORT)
            bench.send(ev.AbortAcknowledged(worker, 1))
            bench.send(ev.WeightsSynced(worker, 1, step))
        slow = [i for i in kinds(bench.out, ev.Generate) if i.trajectory.group == 0][-2:]
    for sent in slow:
        bench.generated(sent, 3, FinishReason.STOP)
        bench.send(ev.EnvironmentStepped(sent.trajectory, 0, StopReason.SUBMITTED))
        bench.send(ev.TrajectoryScored(sent.trajectory, 1.0))
    stale = [e.sample for e in kinds(bench.out, ev.EndSample) if e.outcome is Outcome.STALE]
    assert {s.group for s in stale} == {0} and len(stale) == 2


def test_a_run_without_workers_left_fails_with_the_cause() -> None:
    bench = Bench(worker_restarts=0)
    bench.send(ev.WorkerLost("w0", 1, "first"))
    (end,) = kinds(bench.send(ev.WorkerLost("w1", 1, "no memory")), ev.FinishRun)
    assert end.failed and "w1: no memory" in end.reason


def test_a_stop_request_ends_at_once_and_nothing_follows() -> None:
    bench = Bench()
    (end,) = kinds(bench.send(ev.StopRequested("Ctrl-C")), ev.FinishRun)
    assert not end.failed
    assert bench.send(ev.EnvironmentOpened(TrajectoryId(0, 0, 0), 10)) == []


def test_a_lost_trainer_goes_back_to_the_checkpoint_and_trains_the_same_groups_again() -> None:
    bench = Bench(checkpoints=True, steps=4)
    for step in (1, 2):
        for member in (0, 1):
            bench.finish(TrajectoryId(step - 1, member, 0))
        bench.send(ev.BatchTrained(step))
        bench.send(ev.SnapshotPublished(step))
        for worker in ("w0", "w1"):
            bench.send(ev.WeightsSynced(worker, 1, step))
        if step == 1:
            bench.send(ev.CheckpointWritten(1))
    first = kinds(bench.out, ev.TrainBatch)[1]
    (restart,) = kinds(bench.send(ev.TrainerLost("a rank died")), ev.RestartTrainer)
    assert (restart.step, restart.version) == (1, 3), "a version is never used again"
    assert bench.machine.ended[Outcome.TRAINED] == 2
    (again,) = kinds(bench.send(ev.TrainerReady(3, 1)), ev.TrainBatch)
    assert again == first


def test_rollout_goes_on_while_the_trainer_is_replaced() -> None:
    bench = Bench(checkpoints=True)
    for member in (0, 1):
        bench.finish(TrajectoryId(0, member, 0))
    bench.send(ev.TrainerLost("a rank died"))
    assert bench.opened(TrajectoryId(1, 0, 0))


def test_without_checkpoints_a_lost_trainer_ends_the_run_with_its_cause() -> None:
    bench = Bench()
    (end,) = kinds(bench.send(ev.TrainerLost("rank 0 was killed")), ev.FinishRun)
    assert end.failed and end.reason == "rank 0 was killed"


def test_a_trainer_that_keeps_dying_ends_the_run() -> None:
    bench = Bench(checkpoints=True, worker_restarts=1)
    assert kinds(bench.send(ev.TrainerLost("one")), ev.RestartTrainer)
    (end,) = kinds(bench.send(ev.TrainerLost("two")), ev.FinishRun)
    assert end.failed and "two" in end.reason


def test_a_version_whose_publishing_was_interrupted_is_not_used_again() -> None:
    bench = Bench(checkpoints=True)
    bench.finish(TrajectoryId(0, 0, 0))
    bench.finish(TrajectoryId(0, 1, 0))
    (publish,) = kinds(bench.send(ev.BatchTrained(1)), ev.PublishSnapshot)
    (restart,) = kinds(bench.send(ev.TrainerLost("while it wrote")), ev.RestartTrainer)
    assert restart.version > publish.version
