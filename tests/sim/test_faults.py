"""The fault search: schedules break nothing, faults that it found stay mended, and it finds, shrinks and replays."""

from __future__ import annotations

import pytest

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.fleet import Fleet
from pearl.core.layout import Role
from pearl.core.rollout import Rollout
from pearl.core.routing import Router
from pearl.core.settings import ElasticSettings
from pearl.core.state import Awaited
from pearl.sim.faults import play, play_seed, report, shrink
from pearl.sim.search.case import Case, Fault, Kind, draw, small_run


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + 25):
        _, broken = play_seed(seed)
        assert broken is None, report(broken)


def test_a_seed_is_one_run() -> None:
    for seed in (3, 34):
        assert draw(seed) == draw(seed)
        assert play_seed(seed)[0].log == play_seed(seed)[0].log


def test_the_schedules_reach_what_is_rare() -> None:
    seen: set[str] = set()
    for seed in range(60):
        world, _ = play_seed(seed)
        seen |= {type(entry).__name__ for _, entry in world.log} | {str(fault.kind) for fault in world.struck}
    rare = {"SwitchRole", "ReleaseEngine", "ResumeEngine", "StopEngine", "RestartTrainer", "ReopenEnvironment",
            "ReleaseSlot", "SlotNotice", "PrefillDone", "AbortRequests", "DiscardTrajectory"}  # fmt: skip
    assert rare | {str(kind) for kind in Kind} <= seen


def case(*faults: Fault, elastic: ElasticSettings | None = None, **changes: object) -> Case:
    return Case(0, small_run(checkpoints=True, **changes), elastic, faults=faults)


def test_a_run_whose_last_worker_leaves_on_notice_says_so_and_ends() -> None:
    """Found by the search: only a loss was followed by the question whether anybody is left."""
    notices = [Fault(Kind.NOTICE, "SlotNotice", n) for n in (1, 2)]
    leave = [Fault(Kind.NOTICE, "StepEnvironment", n, pick=pick) for n, pick in ((1, 0.0), (2, 0.9))]
    world, broken = play(case(*leave, *notices, elastic=ElasticSettings()))
    end = world.log[-1][1]
    assert broken is None and isinstance(end, ev.FinishRun)
    assert end.failed and "no rollout worker is left" in end.reason


def test_a_repeated_word_of_an_environment_worker_changes_nothing() -> None:
    """Found by the search: its count of live environments began at zero again."""
    repeated = Fault(Kind.REPEATED, "EnvironmentWorkerReady", 1)
    world, broken = play(case(repeated))
    assert broken is None and world.struck == [repeated]


def test_a_repeated_change_of_role_answers_no_later_one() -> None:
    """Found by the search: it was taken for the answer to the next SwitchRole, with the engine still at it."""
    table = Fleet(lambda i: None, Router(4), abort_on_update=True, restarts=1)
    table.start_all(("w0",))
    table.settle(0.0)
    table.loaded(ev.EngineLoaded("w0", 1), 0.0)
    worker = table.workers["w0"]
    table.assign(worker, Role.PREFILL)
    table.settle(0.0)
    table.assign(worker, Role.DECODE)
    table.switched(ev.RoleSwitched("w0", 1, Role.PREFILL), 0.0)
    table.settle(0.0)
    assert worker.awaits is Awaited.SWITCH and worker.role is Role.PREFILL
    table.switched(ev.RoleSwitched("w0", 1, Role.PREFILL), 0.0)
    assert worker.awaits is Awaited.SWITCH
    table.switched(ev.RoleSwitched("w0", 1, Role.DECODE), 0.0)
    assert worker.awaits is None and worker.role is Role.DECODE


def test_snapshots_go_when_the_last_one_that_read_them_is_lost() -> None:
    """Found by the search: they stayed until some engine had loaded newer ones."""
    out: list[Instruction] = []
    table = Fleet(out.append, Router(4), abort_on_update=True, restarts=1)
    table.start_all(("w0", "w1"))
    table.published(0)
    table.settle(0.0)
    for name in ("w0", "w1"):
        table.loaded(ev.EngineLoaded(name, 1), 0.0)
    table.settle(0.0)
    table.synced(ev.WeightsSynced("w0", 1, 0), 0.0)
    table.published(1)
    table.settle(0.0)
    table.synced(ev.WeightsSynced("w0", 1, 1), 0.0)
    assert not [i for i in out if isinstance(i, ev.RetireSnapshots)], "w1 reads the first ones"
    table.lost(ev.WorkerLost("w1", 1, "killed"), 0.0)
    assert out[-1] == ev.RetireSnapshots(0)


def test_a_fault_of_the_machine_is_found_shrunk_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that came back with an abort are forgotten."""
    right = Rollout.generated

    def wrong(self: Rollout, event: ev.TurnGenerated) -> None:
        attempt = self.attempts[event.trajectory]
        right(self, event)
        if event.finish == "abort":
            attempt.tokens -= event.tokens

    monkeypatch.setattr(Rollout, "generated", wrong)
    found = next(broken for seed in range(200) if (broken := play_seed(seed)[1]) is not None)
    small = shrink(found)
    assert small.where == found.where and play(small.case)[1] == small
    assert len(small.case.faults) <= len(found.case.faults) and small.case.fault_rate == 0.0
    text = report(small)
    assert f"seed {found.case.seed}" in text and "TurnGenerated" in text and small.what in text
