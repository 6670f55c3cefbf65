"""Waits of a whole driver, blocked on purpose."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.binding import bind
from pearl.cluster.local import LocalCluster
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.errors import RunFailed
from pearl.live import actors
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.rollout import RolloutWorkers
from pearl.live.run_directory import RunDirectory
from tests.live.blocking import LIMIT_S, RecordingWaits, ends_at
from tests.live.hanging_actors import HANGING, Willing
from tests.live.test_driver import Seen


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_MARGIN_S", 0.0)


def driver(folder: Path, cls: type, **deadlines: float) -> tuple[Driver, Seen]:
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "pipeline": {"steps": 1, "groups_per_batch": 1, "group_size": 2, "worker_restarts": 0},
        "cluster": {"rollout_workers": 1},
        "engine": {"device": "cpu"},
        "checkpoint": {"keep_weights": False},
        "deadlines": deadlines,
    }
    config = make_config(tree, "test")
    classes, seen = ActorClasses(cls, cls, cls), Seen()
    made = Driver(config, folder, 8, bind(config, 0), RunDirectory.create(config), [seen], classes=classes)
    made.waits = made.rollout.actors.waits = RecordingWaits()
    return made, seen


async def close(run: Driver) -> None:
    await run.close(finish_writing=False)
    run.directory.close()


async def test_a_scheduler_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LocalCluster, "__aenter__", never)
    run, _ = driver(tmp_path, Willing, worker_start_s=LIMIT_S)
    with ends_at(), pytest.raises(RunFailed, match=r"driver waited in vain for the Dask scheduler .*: 0\.3 s passed"):
        await run.run()
    (wait,) = run.waits.ended  # type: ignore[attr-defined]
    assert (wait.waiter, wait.awaited, wait.timeout_s) == (
        "driver",
        "the Dask scheduler (deadlines.worker_start_s)",
        LIMIT_S,
    )
    await close(run)


async def test_standing_still_with_nothing_awaited_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor of ours forgot to answer: no deadline can pass, so the watchdog must end it."""

    async def forgets(*_: Any) -> None:
        pass

    monkeypatch.setattr(RolloutWorkers, "generate", forgets)
    run, _ = driver(tmp_path, Willing, no_progress_s=LIMIT_S)
    try:
        end = await run.run()
    finally:
        await close(run)
    assert end == ev.FinishRun(True, "no progress for 0.3 s (deadlines.no_progress_s): nothing is awaited")


async def test_standing_still_within_a_deadline_names_waiter_and_awaited(tmp_path: Path) -> None:
    run, seen = driver(tmp_path, HANGING["generate"], no_progress_s=1.0, generate_s=3.0)
    try:
        end = await run.run()
    finally:
        await close(run)
    waits = [text for text in seen.notices if "no progress for 1 s" in text]
    assert any("g0.0.0 waits for rollout-0#1.generate since" in text for text in waits)
    assert "waited in vain: rollout-0#1.generate did not answer within 3 s" in end.reason


async def test_a_last_checkpoint_that_does_not_become_whole_is_told(tmp_path: Path) -> None:
    run, seen = driver(tmp_path, Willing, checkpoint_s=LIMIT_S)
    try:
        end = await run.run()
        await run.trainer._turn.acquire()  # as one who writes it
    finally:
        await run.close(finish_writing=True)
        run.directory.close()
    assert not end.failed, end.reason
    (told,) = [text for text in seen.notices if "checkpoint" in text]
    assert told == (
        "the last checkpoint may be missing: driver waited in vain for the trainer's last work: 0.3 s passed "
        "(deadlines.checkpoint_s)"
    )


async def test_actors_that_do_not_stop_are_killed_at_the_deadline(tmp_path: Path) -> None:
    run, _ = driver(tmp_path, HANGING["stop"], shutdown_s=LIMIT_S)
    processes: list[asyncio.subprocess.Process] = []
    try:
        end = await run.run()
        processes += [worker.process for worker in run.cluster.workers.values()]
    finally:
        with ends_at():
            await run.close(finish_writing=True)
        run.directory.close()
    assert not end.failed, end.reason
    assert len(processes) == 3 and all(process.returncode is not None for process in processes)
    stops = {w.awaited for w in run.waits.ended if "stop" in w.awaited}  # type: ignore[attr-defined]
    assert stops == {"rollout-0#1.stop", "environment-0#1.stop", "trainer-0#1.stop"}
