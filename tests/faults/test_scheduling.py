"""Public faults of this field, replayed on the real machine in virtual time.

Each docstring says what happened there, then what PEARL must do.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.trajectory import FinishReason, SampleId, TrajectoryId
from pearl.sim.search.case import Case, Fault, Kind
from pearl.sim.search.world import DriverDied, World
from tests.core.test_pipeline import Bench, kinds
from tests.core.virtual import Virtual, settings

STRAGGLER = SampleId(0, 0)


class Straggling(World):
    """The engine of one sample never answers; at the deadline it is ended (others had long answered)."""

    dies_when_it_ends = False

    def fate(self, i: Instruction) -> tuple[Kind | None, Fault | None]:
        if isinstance(i, ev.Generate) and i.trajectory.sample == STRAGGLER:
            return Kind.ANSWER_LOST, None
        return super().fate(i)

    def _entry(self, entry: Event | Instruction) -> None:
        last = self.log[-1][1] if self.log else None
        if self.dies_when_it_ends and isinstance(last, ev.EndSample) and last.sample == STRAGGLER:
            self.dies_when_it_ends = False
            self.mark = len(self.log)
            raise DriverDied
        super()._entry(entry)

    def of(self, kind: type, since: int = 0) -> list[Any]:
        return [entry for _, entry in self.log[since:] if isinstance(entry, kind)]


def straggling() -> Straggling:
    return Straggling(Case(0, settings(sample_attempts=1, checkpoints=True)))


def test_nemo_rl_3238_a_straggler_ends_and_its_group_trains_without_it() -> None:
    """NVIDIA-NeMo/RL#3238: one sample of a group never came back and the step waited for ever; a resume drew it again.

    In PEARL every request has a deadline, a sample under which engines keep being lost ends as failed, and its group
    trains with the rest.
    """
    run = straggling()
    end = run.run()
    assert not end.failed, end.reason
    (failed,) = [e for e in run.of(ev.EndSample) if e.sample == STRAGGLER]
    assert failed.outcome is Outcome.FAILED and "engines died under it" in failed.reason
    (group,) = [g for batch in run.of(ev.TrainBatch) for g in batch.groups if g[0].group == 0]
    assert {t.member for t in group} == {1, 2}


def test_nemo_rl_3238_a_resume_does_not_draw_the_straggler_again() -> None:
    """See above: in PEARL the journal says that the sample has ended, so a resumed run does not begin it again."""
    run = straggling()
    run.dies_when_it_ends = True
    end = run.run()
    assert not end.failed, end.reason
    assert run.driver == 1
    opened = [*run.of(ev.OpenEnvironment, run.mark), *run.of(ev.ReopenEnvironment, run.mark)]
    assert opened and STRAGGLER not in {i.trajectory.sample for i in opened}
    batches = run.of(ev.TrainBatch, run.mark)
    assert any(t.group == 0 for batch in batches for g in batch.groups for t in g)


class Poisoned(World):
    """Task 1 always fails, by its own doing."""

    def fate(self, i: Instruction) -> tuple[Kind | None, Fault | None]:
        if isinstance(i, ev.OpenEnvironment) and i.task == 1:
            return Kind.REFUSED, Fault(Kind.REFUSED, "OpenEnvironment", 1, pick=0.0)
        return super().fate(i)


@pytest.mark.parametrize("in_drawn_order", [True, False])
def test_nemo_rl_3938_a_prompt_that_always_fails_is_quarantined(in_drawn_order: bool) -> None:
    """NVIDIA-NeMo/RL PR#3938: a prompt that always failed left a gap that was filled with itself, a deadlock.

    PEARL replaces the group by one of another task, takes the task out after `quarantine_after` groups, and ends all
    steps.
    """
    changes = {"steps": 8, "sample_attempts": 2, "quarantine_after": 2, "in_drawn_order": in_drawn_order}
    run = Poisoned(Case(0, settings(**changes), tasks=4))
    assert run.run() == ev.FinishRun(False, "8 steps done")
    entries = [entry for _, entry in run.log]
    (quarantine,) = [entry for entry in entries if isinstance(entry, ev.QuarantineTask)]
    assert quarantine.task == 1
    drawn = [entry.task for entry in entries[entries.index(quarantine) :] if isinstance(entry, ev.DrawGroup)]
    assert drawn and 1 not in drawn


def test_verl_6076_an_abort_without_tokens_costs_nothing() -> None:
    """verl-project/verl PR#6076: an abort that came before the first token returned an empty list, which broke `zip`.

    In PEARL such a turn simply goes on, with all its room, and no attempt is charged
    (`test_engine.py` gets such an answer from a real engine).
    """
    bench = Bench(sample_attempts=1)
    sent = bench.opened(TrajectoryId(0, 0, 0))
    for _ in range(10):
        (sent_again,) = kinds(bench.generated(sent, 0, FinishReason.ABORT), ev.Generate)
        assert (sent_again.trajectory, sent_again.max_new_tokens) == (sent.trajectory, sent.max_new_tokens)
        sent = sent_again
    assert not kinds(bench.out, ev.EndSample) and not kinds(bench.out, ev.DiscardTrajectory)


def test_miles_1724_a_recovered_engine_serves_only_the_newest_synced_weights() -> None:
    """radixark/miles#1724: a restarted engine was put back into routing before it had the weights.

    In PEARL it gets its first request after it has verified the newest version, also if one is published meanwhile.
    """
    bench = Bench(worker_restarts=5, max_staleness_steps=3)
    for member in (0, 1):
        bench.finish(TrajectoryId(0, member, 0))
    for worker in ("w0", "w1"):
        bench.send(ev.WorkerLost(worker, 1, "killed"))
    for member in (0, 1):
        new = bench.send(ev.EnvironmentOpened(TrajectoryId(1, member, 0), 10))
        assert not kinds(new, ev.Generate), "nobody is there to serve"
    new = bench.send(ev.EngineLoaded("w0", 2))
    assert [(i.worker, i.version) for i in kinds(new, ev.SyncWeights)] == [("w0", 0)]
    assert not kinds(new, ev.Generate), "loaded is not synced"
    bench.send(ev.BatchTrained(1))
    assert not kinds(bench.send(ev.SnapshotPublished(1)), ev.Generate)
    new = bench.send(ev.WeightsSynced("w0", 2, 0))
    assert not kinds(new, ev.Generate), "what it has is old by now"
    assert [(i.worker, i.version) for i in kinds(new, ev.SyncWeights)] == [("w0", 1)]
    new = bench.send(ev.WeightsSynced("w0", 2, 1))
    assert {(i.worker, i.incarnation, i.version) for i in kinds(new, ev.Generate)} == {("w0", 2, 1)}


@pytest.mark.parametrize("seed", range(5))
def test_miles_2244_versions_only_grow_over_failures(seed: int) -> None:
    """radixark/miles PR#2244: after a failover the version counter fell from 57 to 1 and the staleness filter broke.

    In PEARL a version is never used twice, whatever is rolled back, and no engine ever goes back to an older one; how
    stale a token is follows from the step of its version, which may well be done again.
    """
    lost = tuple(Fault(Kind.TRAINER_LOST, kind, nth) for nth in (2, 5, 8) for kind in ("TrainBatch", "PublishSnapshot"))
    changes = {"steps": 8, "checkpoints": True, "worker_restarts": 500}
    run = Virtual(Case(seed, settings(**changes), faults=lost, fault_rate=0.02))
    assert not run.end.failed, run.end.reason
    asked = [i.version for i in run.of(ev.PublishSnapshot)] + [i.version for i in run.of(ev.RestartTrainer)]
    assert run.of(ev.RestartTrainer), "no failover, no test"
    assert len(asked) == len(set(asked)), "a version was used twice"
    published = [e.version for _, e in run.log if isinstance(e, ev.SnapshotPublished | ev.TrainerReady)]
    assert all(a < b for a, b in itertools.pairwise(published)), published
    held: dict[str, int] = {}
    for sync in run.of(ev.SyncWeights):
        assert sync.version >= held.get(sync.worker, 0)
        held[sync.worker] = sync.version
    steps = [run.pipeline.lineage.step_of[version] for version in published]
    assert any(a >= b for a, b in itertools.pairwise(steps)), "a step was done again under a newer version"
