"""Every wait of the driver, blocked on purpose: it ends at its deadline and says who waited for whom.

Real Dask workers hold actors that are alive and never answer. What happens below the actors (engines, sandboxes,
ranks) is in `test_blocked_components.py`; `test_wait_table.py` sees to it that no wait is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pearl.cluster.errors import ActorError
from pearl.cluster.identity import HOST
from pearl.cluster.local import LocalCluster
from pearl.core import events as ev
from pearl.core.layout import Role
from pearl.core.trajectory import FinishReason, SegmentKind, StopReason, TrajectoryId
from pearl.live.pair import serve_pair
from pearl.live.tokens import LiveTrajectory
from tests.live.blocking import LATE_S, LIMIT_S, LONG_S, Stage, ends_at
from tests.live.hanging_actors import HANGING, Willing

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("no_margin")]
ID = TrajectoryId(0, 0, 0)


def played() -> LiveTrajectory:
    """A trajectory with one turn."""
    live = LiveTrajectory(ID, "t")
    live.add_context(SegmentKind.PROMPT, [5, 5])
    live.add_response([1], [-1.0], [(0, 1)])
    return live


async def rollout(stage: Stage) -> None:
    await stage.rollout.start(ev.StartEngine("rollout-0", stage.life))


async def sync(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.sync(ev.SyncWeights("rollout-0", stage.life, 0))


async def abort(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.abort(ev.AbortRequests("rollout-0", stage.life))


async def generate(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.generate(ev.Generate(ID, "rollout-0", stage.life, 0, 8), played())


async def release_memory(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.release(ev.ReleaseEngine("rollout-0", stage.life))


async def switch_role(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.switch(ev.SwitchRole("rollout-0", stage.life, Role.DECODE))


async def resume_memory(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.resume(ev.ResumeEngine("rollout-0", stage.life))


async def serve_as_pair(stage: Stage) -> None:
    """Both halves in one worker."""
    await rollout(stage)
    ref, deadlines = stage.rollout.refs["rollout-0"][1], stage.config.deadlines
    request = {"rid": "r", "token_ids": [5], "timeout_s": deadlines.generate_s}
    with contextlib.suppress(ActorError):  # of the decode half
        await serve_pair(
            stage.actors,
            ref,
            ref,
            request,
            {},
            interrupt_s=deadlines.abort_s,
            waiter=str(ID),
            handed_on=lambda: None,
        )


async def stop_rollout(stage: Stage) -> None:
    await rollout(stage)
    await stage.rollout.stop(stage.config.deadlines.shutdown_s)


async def environment(stage: Stage) -> None:
    await stage.environments.start(ev.StartEnvironmentWorker("environment-0", stage.life))


async def open_environment(stage: Stage) -> None:
    await environment(stage)
    await stage.environments.open(ev.OpenEnvironment(ID, "environment-0", 0), LiveTrajectory(ID, "t"))


async def reopen(stage: Stage) -> None:
    await environment(stage)
    await stage.environments.reopen(ev.ReopenEnvironment(ID, "environment-0", 0), played())


async def step(stage: Stage) -> None:
    await environment(stage)
    await stage.environments.step(ev.StepEnvironment(ID, "environment-0"), played())


async def score(stage: Stage) -> None:
    await environment(stage)
    instruction = ev.ScoreTrajectory(ID, "environment-0", StopReason.SUBMITTED, 1)
    await stage.environments.score(instruction, played(), lambda _: None)


async def close_environment(stage: Stage) -> None:
    await environment(stage)
    await stage.environments.close(ev.CloseEnvironment(ID, "environment-0"))


async def stop_environment(stage: Stage) -> None:
    await environment(stage)
    await stage.environments.stop(stage.config.deadlines.shutdown_s)


async def start_trainer(stage: Stage) -> None:
    await stage.trainer.start()


async def load(stage: Stage) -> None:
    await stage.trainer.start(step=2, version=3)


async def train(stage: Stage) -> None:
    await stage.trainer.start()
    await stage.trainer.train(ev.TrainBatch(1, ()), [])


async def publish(stage: Stage) -> None:
    await stage.trainer.start()
    await stage.trainer.publish(ev.PublishSnapshot(1), 1)


async def offload(stage: Stage) -> None:
    await stage.trainer.start()
    await stage.trainer.offload(ev.OffloadTrainer(("overlap-0",)))


async def reload(stage: Stage) -> None:
    await offload(stage)
    await stage.trainer.reload(ev.ReloadTrainer(("overlap-0",)))


async def stop_trainer(stage: Stage) -> None:
    await stage.trainer.start()
    await stage.trainer.stop(stage.config.deadlines.shutdown_s)


@dataclass(frozen=True)
class Call:
    """One call to an actor that never answers. `answer`: the event that tells, None where the slot is killed next."""

    caller: str
    method: str
    key: str
    act: Callable[[Stage], Awaitable[None]]
    waiter: str
    answer: type[ev.Event] | None

    def actor(self, life: int) -> str:
        kinds = {
            "environments.py": "environment",
            "rollout.py": "rollout",
            "pair.py": "rollout",
            "trainer.py": "trainer",
        }
        kind = kinds[self.caller]
        return f"{kind}-0#{life}.{self.method}"


CALLS = [
    Call("rollout.py", "start", "engine_start_s", rollout, "driver", ev.WorkerLost),
    Call("rollout.py", "sync", "sync_s", sync, "driver", ev.WorkerLost),
    Call("rollout.py", "abort", "abort_s", abort, "driver", ev.WorkerLost),
    Call("rollout.py", "generate", "generate_s", generate, "g0.0.0", ev.WorkerLost),
    Call("rollout.py", "switch_role", "role_switch_s", switch_role, "driver", ev.WorkerLost),
    Call("rollout.py", "release_memory", "memory_s", release_memory, "driver", ev.WorkerLost),
    Call("rollout.py", "resume_memory", "memory_s", resume_memory, "driver", ev.WorkerLost),
    Call("rollout.py", "stop", "shutdown_s", stop_rollout, "driver", None),
    Call("pair.py", "prefill", "generate_s", serve_as_pair, "g0.0.0", None),
    Call("pair.py", "generate", "generate_s", serve_as_pair, "g0.0.0", None),
    Call("pair.py", "interrupt", "abort_s", serve_as_pair, "g0.0.0", None),
    Call("environments.py", "start", "worker_start_s", environment, "driver", ev.EnvironmentWorkerLost),
    Call("environments.py", "prepare", "environment_build_s", environment, "driver", ev.EnvironmentWorkerLost),
    Call("environments.py", "open", "environment_start_s", open_environment, "g0.0.0", ev.EnvironmentWorkerLost),
    Call("environments.py", "reopen", "environment_start_s", reopen, "g0.0.0", ev.EnvironmentWorkerLost),
    Call("environments.py", "advance", "environment_step_s", step, "g0.0.0", ev.EnvironmentWorkerLost),
    Call("environments.py", "score", "score_s", score, "g0.0.0", ev.EnvironmentWorkerLost),
    Call("environments.py", "close", "environment_step_s", close_environment, "g0.0.0", ev.EnvironmentWorkerLost),
    Call("environments.py", "stop", "shutdown_s", stop_environment, "driver", None),
    Call("trainer.py", "rendezvous", "", start_trainer, "driver", ev.TrainerLost),
    Call("trainer.py", "start", "trainer_start_s", start_trainer, "trainer", ev.TrainerLost),
    Call("trainer.py", "load", "checkpoint_s", load, "trainer", ev.TrainerLost),
    Call("trainer.py", "train", "train_s", train, "trainer", ev.TrainerLost),
    Call("trainer.py", "export", "publish_s", start_trainer, "trainer", ev.TrainerLost),
    Call("trainer.py", "save", "checkpoint_s", publish, "trainer", ev.TrainerLost),
    Call("trainer.py", "offload", "offload_s", offload, "trainer", ev.TrainerLost),
    Call("trainer.py", "reload", "offload_s", reload, "trainer", ev.TrainerLost),
    Call("trainer.py", "stop", "shutdown_s", stop_trainer, "driver", None),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.caller[:-3]} {call.method}")
async def test_a_call_that_is_never_answered(call: Call, cluster: LocalCluster, tmp_path: Path) -> None:
    deadlines = {call.key: LIMIT_S} if call.key else {}
    stage = Stage(cluster, tmp_path, HANGING[call.method], deadlines=deadlines, checkpoint={"every_steps": 1})
    try:
        async with asyncio.timeout(LONG_S):
            await call.act(stage)
        actor = call.actor(stage.life)
        wait = stage.ended(actor)
        assert wait.waiter == call.waiter and wait.timeout_s == LIMIT_S
        assert LIMIT_S * 0.9 <= wait.seconds < LIMIT_S + LATE_S
        if call.answer is not None:
            (told,) = [event for event in stage.events if isinstance(event, call.answer)]
            expected = f"{call.waiter} waited in vain: {actor} did not answer within {LIMIT_S:g} s"
            assert expected in told.reason  # type: ignore[attr-defined]
            if call.answer is not ev.TrainerLost:  # its ranks are ended by the restart
                assert not cluster.workers, "the silent worker is ended"
    finally:
        await stage.close()


async def test_a_request_in_a_silent_engine_keeps_its_place_in_the_order(cluster: LocalCluster, tmp_path: Path) -> None:
    """The loss is told before the turn, which would else go straight back to the dead."""
    stage = Stage(cluster, tmp_path, HANGING["generate"], deadlines={"generate_s": LIMIT_S})
    try:
        await generate(stage)
        lost, turn = stage.events[-2:]
        assert isinstance(lost, ev.WorkerLost) and isinstance(turn, ev.TurnGenerated)
        assert (turn.finish, turn.tokens) == (FinishReason.LOST, 0)
    finally:
        await stage.close()


async def test_weights_that_never_come_to_another_host(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has them, and the fetch ends with its deadline."""
    stage = Stage(cluster, tmp_path, Willing, deadlines={"sync_s": 2.0})
    monkeypatch.setenv(HOST, "another-host")
    try:
        await rollout(stage)
        with ends_at(2.0):
            await stage.rollout.sync(ev.SyncWeights("rollout-0", stage.life, 0))
        assert stage.ended("rollout-0 to fetch the weights of version 0").timeout_s == 2.0
        lost = stage.events[-1]
        assert isinstance(lost, ev.WorkerLost) and "version 0 did not come to another-host" in lost.reason
    finally:
        await stage.close()
