"""Borrowing training GPUs and giving them back, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.settings import Borrowing
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId
from tests.core.elastic_bench import FIRST, SECOND, Bench, Says, kinds


def borrowing(overlap: int = 1, policy: Borrowing = Borrowing.ALWAYS, **changes: Any) -> Bench:
    elastic = {"intra_scale": policy, "return_deadline_s": 20.0, **changes.pop("elastic", {})}
    return Bench(2, overlap, elastic=elastic, **{"max_staleness_steps": 0, **changes})


def lend(bench: Bench, *names: str) -> None:
    """From the offload to the admission, with engines that start."""
    bench.answer(kinds(bench.out, ev.OffloadTrainer)[-1])
    bench.answer_all(ev.StartEngine, *names)
    bench.answer_all(ev.SyncWeights, *names)


def give_back(bench: Bench, *names: str) -> list[Instruction]:
    bench.answer_all(ev.ReleaseEngine, *names)
    return [i for reload in kinds(bench.out, ev.ReloadTrainer) for i in bench.answer(reload)]


def test_a_waiting_trainer_lends_its_gpus_and_they_serve() -> None:
    bench = borrowing()
    (offload,) = kinds(bench.out, ev.OffloadTrainer)
    assert offload.slots == ("o0",)
    assert not [i for i in kinds(bench.out, ev.StartEngine) if i.worker == "o0"], "the trainer has not let go"
    lend(bench, "o0")
    assert "o0" in bench.roles()
    assert [phase for phase, _, _ in bench.operations("borrow")] == ["began", "prepared", "admitted"]


def test_the_return_is_complete_before_training_begins() -> None:
    bench = borrowing()
    lend(bench, "o0")
    bench.finish(FIRST)
    new = bench.finish(SECOND)
    assert [i.worker for i in kinds(new, ev.ReleaseEngine)] == ["o0"] and not kinds(new, ev.TrainBatch)
    new = bench.answer_all(ev.ReleaseEngine, "o0")
    assert kinds(new, ev.ReloadTrainer) and not kinds(new, ev.TrainBatch)
    assert kinds(bench.answer(kinds(new, ev.ReloadTrainer)[0]), ev.TrainBatch)


def test_the_next_borrowing_resumes_the_process_that_was_kept_and_fetches_weights_again() -> None:
    bench = borrowing()
    lend(bench, "o0")
    bench.finish(FIRST)
    bench.finish(SECOND)
    give_back(bench, "o0")
    bench.send(ev.BatchTrained(1))
    (offload,) = kinds(bench.send(ev.SnapshotPublished(1)), ev.OffloadTrainer)
    (resume,) = kinds(bench.answer(offload), ev.ResumeEngine)
    assert (resume.worker, resume.incarnation) == ("o0", 1)
    (sync,) = kinds(bench.answer(resume), ev.SyncWeights)
    assert sync.version == 1


def test_requests_on_a_borrowed_worker_are_interrupted_when_it_goes_back() -> None:
    bench = borrowing(max_staleness_steps=1)
    lend(bench, "o0")
    sent = [bench.opened(t) for t in (FIRST, SECOND, TrajectoryId(1, 0, 0))]
    assert sent[2].worker == "o0"
    for g in sent[:2]:
        bench.generated(g, 5, FinishReason.STOP)
        bench.send(ev.EnvironmentStepped(g.trajectory, 0, StopReason.SUBMITTED))
        new = bench.send(ev.TrajectoryScored(g.trajectory, 1.0))
    assert [i.worker for i in kinds(new, ev.AbortRequests)] == ["o0"] and not kinds(new, ev.ReleaseEngine)
    (again,) = kinds(bench.generated(sent[2], 1, FinishReason.ABORT), ev.Generate)
    assert again.worker != "o0"
    assert [i.worker for i in kinds(bench.answer_all(ev.AbortRequests, "o0"), ev.ReleaseEngine)] == ["o0"]


def test_at_the_return_deadline_a_worker_that_is_not_asleep_is_ended_by_force() -> None:
    bench = borrowing()
    lend(bench, "o0")
    bench.finish(FIRST)
    (timer,) = kinds(bench.finish(SECOND), ev.SetTimer)
    assert timer.at_s == 20.0
    bench.now = 20.0
    (stop,) = kinds(bench.send(ev.TimerFired(timer.name)), ev.StopEngine)
    assert stop.worker == "o0"
    (reload,) = kinds(bench.answer(stop), ev.ReloadTrainer)
    assert kinds(bench.answer(reload), ev.TrainBatch)


def test_a_return_that_is_done_in_time_hears_nothing_of_its_deadline() -> None:
    bench = borrowing()
    lend(bench, "o0")
    bench.finish(FIRST)
    (timer,) = kinds(bench.finish(SECOND), ev.SetTimer)
    give_back(bench, "o0")
    assert bench.send(ev.TimerFired(timer.name)) == []


def test_borrowing_is_abandoned_when_the_batch_completes_while_the_trainer_leaves() -> None:
    bench = borrowing()
    bench.finish(FIRST)
    assert not kinds(bench.finish(SECOND), ev.TrainBatch)
    assert "cancelled" in [phase for phase, _, _ in bench.operations("borrow")]
    new = bench.answer(kinds(bench.out, ev.OffloadTrainer)[0])
    assert not kinds(new, ev.StartEngine)
    (reload,) = kinds(new, ev.ReloadTrainer)
    assert kinds(bench.answer(reload), ev.TrainBatch)


def test_an_engine_that_is_starting_when_its_gpus_go_back_is_put_to_sleep_once_it_is_up() -> None:
    bench = borrowing(elastic={"preparation_prior_s": 15.0})
    bench.answer(kinds(bench.out, ev.OffloadTrainer)[0])
    bench.finish(FIRST)
    assert not kinds(bench.finish(SECOND), ev.ReleaseEngine)
    new = bench.answer_all(ev.StartEngine, "o0")
    assert kinds(new, ev.ReleaseEngine) and not kinds(new, ev.SyncWeights)


def test_an_overlap_engine_that_fails_starts_again_only_when_it_may_own_the_gpu() -> None:
    bench = borrowing(2)
    lend(bench, "o0", "o1")
    assert not kinds(bench.send(ev.WorkerLost("o0", 1, "died")), ev.StartEngine)
    assert "o1" in bench.roles()
    bench.finish(FIRST)
    bench.finish(SECOND)
    give_back(bench, "o1")
    bench.send(ev.BatchTrained(1))
    (offload,) = kinds(bench.send(ev.SnapshotPublished(1)), ev.OffloadTrainer)
    new = bench.answer(offload)
    assert [(i.worker, i.incarnation) for i in kinds(new, ev.StartEngine)] == [("o0", 2)]
    assert [i.worker for i in kinds(new, ev.ResumeEngine)] == ["o1"]


def test_a_lost_trainer_gets_its_gpus_back_before_it_restarts() -> None:
    bench = borrowing(checkpoints=True)
    lend(bench, "o0")
    new = bench.send(ev.TrainerLost("a rank died"))
    assert not kinds(new, ev.RestartTrainer) and kinds(new, ev.ReleaseEngine)
    new = bench.answer_all(ev.ReleaseEngine, "o0")
    assert kinds(new, ev.RestartTrainer) and not kinds(new, ev.ReloadTrainer)


def test_nothing_is_lent_while_a_checkpoint_is_written() -> None:
    bench = borrowing(checkpoints=True, checkpoint_every_steps=1)
    lend(bench, "o0")
    bench.finish(FIRST)
    bench.finish(SECOND)
    give_back(bench, "o0")
    bench.send(ev.BatchTrained(1))
    assert not kinds(bench.send(ev.SnapshotPublished(1)), ev.OffloadTrainer)
    assert kinds(bench.send(ev.CheckpointWritten(1)), ev.OffloadTrainer)


def test_the_gate_decides_and_its_terms_are_recorded() -> None:
    priors = {"borrow_prior_s": 6.26, "return_prior_s": 3.18, "preparation_prior_s": 0.0}
    for saved, borrow in ((9.43, False), (9.45, True)):
        engine = Says({}, {2: 100.0, 3: 100.0 - saved})
        bench = borrowing(policy=Borrowing.GATED, engine=engine, elastic=priors)
        (gate,) = kinds(bench.out, ev.RecordGate)[:1]
        assert gate.decision.borrow is borrow and gate.decision.toggle_s == pytest.approx(9.44)
        assert (gate.decision.remaining, gate.decision.batch) == (2, 2)
        assert bool(kinds(bench.out, ev.OffloadTrainer)) is borrow


def test_only_as_many_slots_are_borrowed_as_pay() -> None:
    priors = {"borrow_prior_s": 1.0, "return_prior_s": 1.0, "preparation_prior_s": 0.0}
    engine = Says({}, {2: 100.0, 3: 60.0, 4: 50.0, 5: 55.0})
    bench = borrowing(3, Borrowing.GATED, engine=engine, elastic=priors)
    (offload,) = kinds(bench.out, ev.OffloadTrainer)
    assert len(offload.slots) == 2
    assert sum(owner == "trainer" for owner in bench.fleet.gpus.owner.values()) == 3


def test_an_engine_that_was_started_before_the_trainer_is_borrowed_by_resuming_it() -> None:
    bench = borrowing()
    bench.send(ev.EngineAsleep("o0", 1))
    (resume,) = kinds(bench.answer(kinds(bench.out, ev.OffloadTrainer)[-1]), ev.ResumeEngine)
    assert (resume.worker, resume.incarnation) == ("o0", 1)
    bench.send(ev.EngineAsleep("o0", 2))
    assert bench.fleet.workers["o0"].incarnation == 1, "nobody starts it beside the one there is"


def test_an_early_engine_that_was_lost_is_started_when_its_gpus_are_lent() -> None:
    bench = borrowing()
    bench.send(ev.EngineAsleep("o0", 1))
    bench.send(ev.WorkerLost("o0", 1, "it did not come up"))
    new = bench.answer(kinds(bench.out, ev.OffloadTrainer)[-1])
    assert [(i.worker, i.incarnation) for i in kinds(new, ev.StartEngine)] == [("o0", 2)]


@pytest.mark.parametrize(("preparation_s", "waits"), [(60.0, False), (15.0, True)])
def test_the_return_does_not_wait_for_a_start_that_takes_longer_than_its_deadline(
    preparation_s: float, waits: bool
) -> None:
    bench = borrowing(elastic={"preparation_prior_s": preparation_s})
    bench.answer(kinds(bench.out, ev.OffloadTrainer)[-1])
    bench.finish(FIRST)
    new = bench.finish(SECOND)
    assert [i.worker for i in kinds(new, ev.StopEngine)] == ([] if waits else ["o0"])
    if not waits:
        assert kinds(bench.answer(kinds(new, ev.StopEngine)[0]), ev.ReloadTrainer)


def test_a_start_that_the_deadline_cut_off_is_not_waited_for_again() -> None:
    """Else a machine on which it never comes up in time would lose the whole deadline at every step."""
    bench = borrowing(elastic={"preparation_prior_s": 15.0})
    bench.answer(kinds(bench.out, ev.OffloadTrainer)[-1])
    bench.now = 5.0
    bench.finish(FIRST)
    (timer,) = kinds(bench.finish(SECOND), ev.SetTimer)
    bench.now = timer.at_s
    (stop,) = kinds(bench.send(ev.TimerFired(timer.name)), ev.StopEngine)
    bench.answer(stop)
    bench.answer(kinds(bench.out, ev.ReloadTrainer)[-1])
    bench.send(ev.BatchTrained(1))
    (offload,) = kinds(bench.send(ev.SnapshotPublished(1)), ev.OffloadTrainer)
    bench.answer_all(ev.SyncWeights, "w0", "w1")
    bench.answer(offload)
    bench.finish(TrajectoryId(1, 0, 0))
    new = bench.finish(TrajectoryId(1, 1, 0))
    assert [i.worker for i in kinds(new, ev.StopEngine)] == ["o0"]
