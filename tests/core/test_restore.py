"""A run that is interrupted anywhere and restored from its records ends as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.restore import Replay
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, TrajectoryId
from tests.core.virtual import Virtual, settings


class Recorded(Virtual):
    """Keeps the records that the live driver's journal would hold, and stops after `crash_at` events."""

    records: list[dict[str, Any]]
    crash_at: int = 10**9
    first: tuple[int, int] = (0, 0)

    def run(self) -> ev.FinishRun | None:  # type: ignore[override]
        self.at(0.0, ev.RunStarted(self.workers, self.environments))
        self.at(1.0, ev.TrainerReady(self.first[1], self.first[0]))
        for _ in range(self.crash_at):
            assert self.heap, "nothing is left to happen and the run is not finished"
            self.budget -= 1
            assert self.budget > 0, "the run does not end"
            self.now, _, event = self.pop()
            if end := self.deliver(event):
                return end
        return None

    def deliver(self, event: Event) -> ev.FinishRun | None:
        sent = None
        if isinstance(event, ev.TurnGenerated):
            sent = self.in_flight[event.worker].get((event.trajectory, event.incarnation))
            if sent is not None:
                self.turn_record(event, sent)
        self.record(event)
        mark = len(self.log)
        end = super().deliver(event)
        for _, entry in self.log[mark:]:
            if isinstance(entry, Instruction):
                self.record(entry)
        return end

    def write(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    def turn_record(self, event: ev.TurnGenerated, sent: ev.Generate) -> None:
        self.write(
            "turn",
            trajectory=event.trajectory,
            token_ids=[1] * event.tokens,
            versions=[[event.version, event.tokens]] if event.tokens else [],
            finish=event.finish,
            full=event.tokens >= sent.max_new_tokens,
        )

    def record(self, entry: Event | Instruction) -> None:
        live = self.pipeline.attempts
        match entry:
            case ev.DrawGroup():
                size = self.pipeline.settings.group_size
                self.write("draw", group=entry.group, task=entry.task, cursor=entry.cursor, members=size)
            case ev.OpenEnvironment():
                self.write("open", trajectory=entry.trajectory)
            case ev.EnvironmentOpened() if entry.trajectory in live:
                self.write("prompt", trajectory=entry.trajectory, token_ids=[0] * entry.prompt_tokens)
            case ev.EnvironmentStepped() if entry.stop is None and entry.trajectory in live:
                self.write("observation", trajectory=entry.trajectory, token_ids=[2] * entry.observation_tokens)
            case ev.DiscardTrajectory():
                self.write("discard", trajectory=entry.trajectory, infrastructure=entry.infrastructure)
            case ev.TrajectoryScored() if entry.trajectory in live:
                self.write("finished", trajectory={"id": entry.trajectory, "reward": entry.reward})
            case ev.EndSample():
                self.write("end", sample=entry.sample, outcome=entry.outcome, reason=entry.reason)
            case ev.BatchTrained():
                self.write("trained", step=entry.step, groups=[g.number for g in self.pipeline.training])
            case ev.TrainerReady():
                self.write("published", version=entry.version, step=entry.step)
            case ev.SnapshotPublished():
                self.write("published", version=entry.version, step=self.pipeline.steps_done)
            case ev.CheckpointWritten():
                self.write("checkpoint", step=entry.step)
            case ev.RestartTrainer():
                self.write("rollback", step=entry.step)
            case ev.QuarantineTask():
                self.write("quarantine", task=entry.task)


def machine(changes: dict[str, Any]) -> Pipeline:
    return Pipeline(settings(checkpoints=True, **changes), TaskCursor(8, 0))


def life(records: list[dict[str, Any]], seed: int, fault_rate: float, crash_at: int, changes: dict) -> Recorded:
    """One life of the driver, restored from `records` if there are any; appends to them."""
    pipeline = machine(changes)
    run = Recorded(pipeline, seed=seed, fault_rate=fault_rate)
    run.records, run.crash_at = records, crash_at
    if records:
        replay = Replay().read(records)
        step = max(replay.checkpoints, default=0)
        replay.apply(pipeline, step)
        run.write("rollback", step=step)
        run.first = (step, replay.newest_version + 1)
    run.end = run.run()  # type: ignore[attr-defined]
    return run


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    fault_rate=st.sampled_from([0.0, 0.03, 0.1]),
    crashes=st.lists(st.integers(1, 250), min_size=1, max_size=4),
    changes=st.fixed_dictionaries({"max_staleness_steps": st.integers(0, 2), "in_drawn_order": st.booleans()}),
)
def test_an_interrupted_run_loses_and_repeats_nothing(
    seed: int, fault_rate: float, crashes: list[int], changes: dict
) -> None:
    records: list[dict[str, Any]] = []
    for number, crash_at in enumerate([*crashes, 10**9]):
        run = life(records, seed + number, fault_rate, crash_at, changes)
        if run.end is not None:  # type: ignore[attr-defined]
            break
    assert run.end is not None and not run.end.failed  # type: ignore[attr-defined]
    assert run.pipeline.samples_unfinished == 0
    final = Replay().read(records)
    outcomes = Counter(m.outcome for g in final.groups.values() for m in g.members)
    assert outcomes[None] == 0, "a sample is lost"
    assert outcomes == {o: n for o, n in run.pipeline.ended.items() if n}, "the journal and the machine disagree"
    assert sorted(final.trained) == [1, 2, 3, 4]
    numbers = [number for groups in final.trained.values() for number in groups]
    assert len(numbers) == len(set(numbers)), "a group was trained twice in the surviving line"
    opened = Counter(tuple(r["trajectory"]) for r in records if r["kind"] == "open")
    assert all(count == 1 for count in opened.values()), "two attempts under one name"
    cursor = TaskCursor(8, 0)
    if not final.quarantined:
        assert [g.task for g in final.groups.values()] == [cursor.draw() for _ in final.groups], "a task was skipped"
    versions = [r["version"] for r in records if r["kind"] == "published"]
    assert versions == sorted(set(versions)), "a weight version was used again"


def test_drawn_order_is_the_same_with_and_without_an_interruption() -> None:
    def batches(crashes: list[int]) -> dict[int, tuple[int, ...]]:
        records: list[dict[str, Any]] = []
        for number, crash_at in enumerate([*crashes, 10**9]):
            life(records, number, 0.0, crash_at, {})
        return Replay().read(records).trained

    assert batches([]) == batches([40]) == batches([25, 60])


def test_a_trajectory_goes_on_from_where_it_was() -> None:
    id = TrajectoryId(0, 0, 0)
    records: list[dict[str, Any]] = [
        {"kind": "published", "version": 0, "step": 0},
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        {"kind": "open", "trajectory": id},
        {"kind": "prompt", "trajectory": id, "token_ids": [0] * 10},
        {
            "kind": "turn",
            "trajectory": id,
            "token_ids": [1] * 4,
            "versions": [[0, 4]],
            "finish": "abort",
            "full": False,
        },
    ]
    for extra, (resume_at, room) in (
        ([], ("queued", 16)),
        ([{**records[4], "finish": FinishReason.STOP}], ("stepping", 12)),
        (
            [{**records[4], "finish": "stop"}, {"kind": "observation", "trajectory": id, "token_ids": [2] * 7}],
            ("queued", 20),
        ),
    ):
        pipeline = machine({})
        Replay().read([*records, *extra]).apply(pipeline, 0)
        (attempt,) = pipeline.suspended
        assert attempt.resume_at == resume_at
        assert pipeline.rollout.room(attempt) == room


@pytest.mark.parametrize("discarded_first", [True, False])
def test_a_score_that_crosses_the_loss_of_its_environment_counts_for_nothing(discarded_first: bool) -> None:
    """Whoever scores writes the record; whether the machine hears of the loss before or behind that is chance."""
    first, second = TrajectoryId(0, 0, 0), TrajectoryId(0, 0, 1)
    discard = {"kind": "discard", "trajectory": first, "infrastructure": True}
    finished = {"kind": "finished", "trajectory": {"id": first, "reward": 1.0}}
    records: list[dict[str, Any]] = [
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        *({"kind": "open", "trajectory": TrajectoryId(0, m, 0)} for m in (0, 1)),
        {"kind": "finished", "trajectory": {"id": TrajectoryId(0, 1, 0), "reward": 1.0}},
        *([discard, finished] if discarded_first else [finished, discard]),
        {"kind": "open", "trajectory": second},
    ]
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert pipeline.groups[0].members[0].finished is None and not pipeline.ready
    records.append({"kind": "finished", "trajectory": {"id": second, "reward": 0.5}})
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert pipeline.groups[0].members[0].finished == second and list(pipeline.ready) == [0]


def test_a_rollback_gives_trained_samples_back() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "draw", "group": 0, "task": 3, "cursor": 1, "members": 2},
        *({"kind": "open", "trajectory": TrajectoryId(0, m, 0)} for m in (0, 1)),
        *({"kind": "finished", "trajectory": {"id": TrajectoryId(0, m, 0), "reward": 1.0}} for m in (0, 1)),
        {"kind": "trained", "step": 1, "groups": [0]},
        *({"kind": "end", "sample": (0, m), "outcome": Outcome.TRAINED, "reason": ""} for m in (0, 1)),
    ]
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 0)
    assert list(pipeline.ready) == [0] and pipeline.ended[Outcome.TRAINED] == 0
    pipeline = machine({"groups_per_batch": 1})
    Replay().read(records).apply(pipeline, 1)
    assert not pipeline.ready and pipeline.ended[Outcome.TRAINED] == 2
