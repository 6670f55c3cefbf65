"""The driver's waits for processes, for the last work of a run and for its close, blocked on purpose."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from pearl.cluster import cluster as cluster_module
from pearl.cluster import processes
from pearl.cluster.errors import ActorError, ActorTimeout
from pearl.cluster.local import LocalCluster
from pearl.core import events as ev
from pearl.live import actors, trainer
from pearl.live import rollout as rollout_module
from pearl.live.frozen import FrozenWeights, Subject
from pearl.live.slots import PreemptibleSlots
from tests.live.blocking import LATE_S, LIMIT_S, LIVES, LONG_S, Stage, ends_at
from tests.live.hanging_actors import HANGING, NeverMade, Willing
from tests.live.test_blocked_waits import publish, rollout

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("no_margin")]


async def test_a_worker_that_does_not_join(cluster: LocalCluster, tmp_path: Path) -> None:
    stage = Stage(cluster, tmp_path, Willing)
    (tmp_path / "distributed.py").write_text("import signal; signal.pause()")
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    stage.actors.worker_start_s = LIMIT_S
    said = r"driver waited in vain: rollout-0 did not join within 0\.3 s \(deadlines\.worker_start_s\)"
    try:
        with ends_at(), pytest.raises(ActorTimeout, match=said):
            await stage.actors.start("rollout-0", stage.life, Willing, path)
        assert stage.ended("rollout-0 to join the cluster").timeout_s == LIMIT_S
        assert not cluster.workers
    finally:
        await stage.close()


async def test_an_actor_that_is_never_made(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "CREATE_S", LIMIT_S)
    stage = Stage(cluster, tmp_path, NeverMade)
    try:
        await rollout(stage)
        (lost,) = stage.events
        said = f"driver waited in vain: rollout-0#{stage.life}-NeverMade was not created within 0.3 s"
        assert isinstance(lost, ev.WorkerLost) and lost.reason == said
        assert stage.ended("the actor of rollout-0").seconds < LIMIT_S + LATE_S
    finally:
        await stage.close()


async def test_a_stopped_process(cluster: LocalCluster, tmp_path: Path) -> None:
    """Not even its event loop runs; the connection stays up."""
    stage = Stage(cluster, tmp_path, Willing, deadlines={"abort_s": LIMIT_S})
    try:
        await rollout(stage)
        os.kill(cluster.workers["rollout-0"].process.pid, signal.SIGSTOP)
        with ends_at():
            await stage.rollout.abort(ev.AbortRequests("rollout-0", stage.life))
        lost = stage.events[-1]
        assert isinstance(lost, ev.WorkerLost)
        assert f"driver waited in vain: rollout-0#{stage.life}.abort did not answer within 0.3 s" in lost.reason
        assert not cluster.workers, "a stopped process is killed too"
    finally:
        await stage.close()


async def test_a_process_that_survives_its_kill(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its devices are taken, so no other life of the slot may start."""
    stage = Stage(cluster, tmp_path, Willing)
    try:
        await rollout(stage)
        pid = cluster.workers["rollout-0"].process.pid
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(processes, "KILL_S", LIMIT_S)
            patch.setattr(os, "killpg", lambda *_: None)
            with ends_at():
                await stage.actors.kill("rollout-0", stage.life)
            with ends_at():
                await stage.rollout.start(ev.StartEngine("rollout-0", next(LIVES)))
        lost = stage.events[-1]
        assert isinstance(lost, ev.WorkerLost)
        assert lost.reason == f"driver waited in vain: rollout-0: process {pid} is still there 0.3 s after SIGKILL"
    finally:
        await stage.close()


async def test_the_cause_of_death_of_a_living_process(cluster: LocalCluster, tmp_path: Path) -> None:
    stage = Stage(cluster, tmp_path, Willing)
    try:
        await rollout(stage)
        with ends_at(cluster_module.REAP_S):
            assert await cluster.cause_of_death("rollout-0", stage.life) is None
    finally:
        await stage.close()


async def test_a_cluster_that_does_not_start_or_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Driver.run` bounds the start; what had started by then is closed, within a bound of its own."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster_module, "CLOSE_S", LIMIT_S)
    monkeypatch.setattr(Client, "register_plugin", never)
    starting = LocalCluster(tmp_path, lambda *_: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0), starting:
            raise AssertionError("it has started")
    assert starting.scheduler.status.name == "closed"
    monkeypatch.undo()
    monkeypatch.setattr(cluster_module, "CLOSE_S", LIMIT_S)
    closing = LocalCluster(tmp_path, lambda *_: None)
    await closing.__aenter__()
    closing._stack.push_async_callback(never)
    with ends_at():
        await closing.__aexit__()
    await closing._stack.aclose()


async def come(stage: Stage) -> None:
    """The adapter's part: the process of a preemptible slot is there."""
    binding = stage.actors.bindings["preemptible-0"]
    await stage.actors.cluster.start_worker("preemptible-0", stage.life, binding.zone, binding.environment(), LONG_S)


async def test_an_engine_that_does_not_end_in_good_order(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed; and where the cluster does not say that it is gone, that is said of the engine."""
    monkeypatch.setattr(rollout_module, "DEPARTURE_S", LIMIT_S)
    elastic = {"policy": "elastic", "preemptible_slots": 1}
    stage = Stage(cluster, tmp_path, HANGING["stop"], deadlines={"engine_stop_s": LIMIT_S}, elastic=elastic)
    try:
        await come(stage)
        await stage.rollout.start(ev.StartEngine("preemptible-0", 1))
        with ends_at(2 * LIMIT_S):
            await stage.rollout.end(ev.StopEngine("preemptible-0", 1, "it is taken away"))
        assert stage.ended(f"preemptible-0#{stage.life}.stop").timeout_s == LIMIT_S
        assert stage.ended("word that preemptible-0 is lost").timeout_s == LIMIT_S
        lost = stage.events[-1]
        assert isinstance(lost, ev.WorkerLost) and lost.reason.startswith("it is taken away; driver waited in vain")
        assert not cluster.workers
    finally:
        await stage.close()


async def test_an_actor_that_is_never_made_in_a_process_that_came(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "CREATE_S", LIMIT_S)
    monkeypatch.setattr(rollout_module, "DEPARTURE_S", LIMIT_S)
    stage = Stage(cluster, tmp_path, NeverMade, elastic={"policy": "elastic", "preemptible_slots": 1})
    try:
        await come(stage)
        await stage.rollout.start(ev.StartEngine("preemptible-0", 1))
        (lost,) = stage.events
        assert isinstance(lost, ev.WorkerLost) and "NeverMade was not created within 0.3 s" in lost.reason
        assert stage.ended("the actor of preemptible-0").seconds < LIMIT_S + LATE_S
    finally:
        await stage.close()


async def test_slots_that_do_not_go_at_the_end(cluster: LocalCluster, tmp_path: Path) -> None:
    stage = Stage(cluster, tmp_path, Willing, elastic={"policy": "elastic", "preemptible_slots": 1})
    slots = PreemptibleSlots(
        cluster, stage.actors.bindings, stage.config, stage.waits, stage.events.append, lambda *_: None
    )

    async def never() -> None:
        await asyncio.Event().wait()

    slots.adapter.close = never  # type: ignore[method-assign]
    try:
        said = "driver waited in vain for the preemptible slots to end: 0.3 s passed"
        with ends_at(), pytest.raises(TimeoutError, match=re.escape(said)):
            await slots.close(LIMIT_S)
    finally:
        await stage.close()


# --- the trainer's files --------------------------------------------------------------------------------------------


async def test_weights_that_are_never_copied(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead disk under the run directory: the turn must not be held for ever."""
    never = threading.Event()
    monkeypatch.setattr(trainer.TrainerGroup, "_keep_weights", lambda *_: never.wait())
    stage = Stage(cluster, tmp_path, Willing, deadlines={"checkpoint_s": LIMIT_S}, pipeline={"steps": 1})
    try:
        await publish(stage)
        told = stage.events[-1]
        said = "trainer waited in vain for the copy of the weights of version 1 (deadlines.checkpoint_s): 0.3 s passed"
        assert isinstance(told, ev.TrainerFailed) and said in told.reason
        assert not stage.trainer._turn.locked()
    finally:
        never.set()
        await stage.close()


async def test_weights_that_are_never_read(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(FrozenWeights, "_write", lambda *_: never.wait())
    stage = Stage(cluster, tmp_path, Willing, deadlines={"publish_s": LIMIT_S})
    try:
        frozen = FrozenWeights(stage.trainer, [Subject("tiny", tmp_path)])
        with ends_at():
            await frozen.start()
        told = stage.events[-1]
        said = "driver waited in vain for the weights of tiny (deadlines.publish_s): 0.3 s passed"
        assert isinstance(told, ev.TrainerFailed) and said in told.reason
    finally:
        never.set()
        await stage.close()


async def test_the_last_work_of_a_trainer(cluster: LocalCluster, tmp_path: Path) -> None:
    stage = Stage(cluster, tmp_path, Willing)
    try:
        async with stage.trainer._turn:
            said = "driver waited in vain for the trainer's last work: 0.3 s passed"
            with ends_at(), pytest.raises(TimeoutError, match=re.escape(said)):
                await stage.trainer.idle(LIMIT_S)
    finally:
        await stage.close()


async def test_the_turn_of_a_trainer_is_free_after_a_call_that_was_never_answered(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    stage = Stage(cluster, tmp_path, HANGING["train"], deadlines={"train_s": LIMIT_S})
    try:
        await stage.trainer.start()
        both = (stage.trainer.train(ev.TrainBatch(n, ()), []) for n in (1, 2))
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*both)
        with pytest.raises(ActorError):
            await stage.actors.call(stage.trainer.refs[0], "train", timeout_s=LIMIT_S)
    finally:
        await stage.close()
