"""Waits below the actors, blocked on purpose: real components with peers that are there and never answer."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.environment import EnvironmentWorker
from actors.sglang import update
from actors.sglang.client import EngineClient
from actors.sglang.errors import EngineTimeout
from actors.sglang.generation import GenerateRequest
from actors.sglang.http import EngineHttp
from actors.sglang.process import EngineProcess
from envs import agent
from envs.chat import ChatRenderer
from envs.errors import InfrastructureError
from envs.protocol import Observation, Score, StepResult, Task
from envs.sandbox import backend as sandbox_backend
from envs.sandbox import command as sandbox_command
from envs.sandbox import folder as sandbox_folder
from envs.sandbox.backend import BubblewrapBackend
from pearl import models
from pearl.cluster import membership, notices
from pearl.config.environment import EnvironmentConfig, SandboxConfig
from pearl.core.trajectory import FinishReason
from pearl.errors import UserError
from pearl.live.waits import WaitTable, in_own_thread
from pearl.locks import locked
from tests.envs.conftest import until
from tests.live.blocking import LATE_S, LIMIT_S, LONG_S, ends_at, peer
from tests.trainer.ranks import RankError, RankProcess
from tests.trainer.samples import MODEL as RANK_MODEL
from tests.trainer.samples import config as rank_config
from tests.trainer.samples import free_port
from trainer import universal

SLEEPER = "#!/bin/sh\ntrap '' TERM INT HUP\nwhile :; do sleep 3600; done\n"
COLLECTIVE_S = 12.0
"""Loading and the first handshakes of two ranks on a busy machine fit in."""


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """A program that ignores its arguments and every polite signal."""
    path = tmp_path / "sleeper"
    path.write_text(SLEEPER)
    path.chmod(0o755)
    return str(path)


# --- engine ---------------------------------------------------------------------------------------------------------


def request(rid: str = "r", timeout_s: float = LONG_S) -> GenerateRequest:
    return GenerateRequest(rid, [1, 2, 3], 8, timeout_s=timeout_s)


class Client:
    """An EngineClient whose server is a `peer`."""

    def __init__(self, port: int, report: Path) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.http = EngineHttp(f"http://127.0.0.1:{port}", self.died)
        self.client = EngineClient(self.http, config_hash="", vocabulary=10, report=report / "load")
        self.client.version = 0

    async def __aenter__(self) -> EngineClient:
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()


async def test_http_that_is_never_answered(tmp_path: Path) -> None:
    async with peer() as (_, port), Client(port, tmp_path) as client:
        with ends_at(), pytest.raises(EngineTimeout, match=r"/health did not return within 0\.3 s"):
            await client.health(timeout_s=LIMIT_S)


async def test_an_answer_that_never_comes_ends_with_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes neither the request nor its abort; the caller hears of it within the grace."""
    monkeypatch.setattr("actors.sglang.flight.ABORT_GRACE_S", LIMIT_S)
    async with peer() as (_, port), Client(port, tmp_path) as client:
        with ends_at(2 * LIMIT_S):
            result = await client.generate(request(timeout_s=LIMIT_S))
        assert result.finish is FinishReason.LOST
        assert result.reason == "the deadline of 0.3 s passed and the engine does not answer"


def test_a_silent_engine_is_told_of_within_the_margin_of_the_call() -> None:
    """Else the call is given up first, and the tokens that had arrived with it."""
    from actors.sglang import flight
    from pearl.live import actors

    assert flight.ABORT_GRACE_S < actors.ANSWER_MARGIN_S
    assert update.SESSION_END_S < actors.ANSWER_MARGIN_S
    assert agent.GRACE_S < actors.ANSWER_MARGIN_S


async def test_a_request_behind_a_shut_gate(tmp_path: Path) -> None:
    async with peer() as (_, port), Client(port, tmp_path) as client:
        client._gate.clear()
        with ends_at():
            result = await client.generate(request(timeout_s=LIMIT_S))
        assert (result.finish, result.reason) == (FinishReason.ABORT, "the deadline of 0.3 s passed")


async def test_an_abort_that_is_never_acknowledged(tmp_path: Path) -> None:
    async with peer(abort_request="{}") as (served, port), Client(port, tmp_path) as client:
        pending = asyncio.create_task(client.generate(request()))
        await until(lambda: "/generate" in served.asked)
        with ends_at(), pytest.raises(EngineTimeout, match=r"the engine did not acknowledge an abort within 0\.3 s"):
            await client.abort_all(timeout_s=LIMIT_S)
        pending.cancel()


async def test_a_load_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "SESSION_END_S", LIMIT_S)
    async with peer(flush_cache="{}", begin_weight_update="{}") as (served, port), Client(port, tmp_path) as client:
        with ends_at(2 * LIMIT_S), pytest.raises(EngineTimeout, match=r"did not load version 3 within 0\.3 s"):
            await client.load_snapshot(tmp_path, 3, timeout_s=LIMIT_S)
        assert served.asked[-1] == "/end_weight_update", "the session is ended, or tried to be"
        refused = await client.generate(request())
        assert refused.reason == "the engine has no synced weights"


async def test_a_control_call_behind_another_one(tmp_path: Path) -> None:
    async with peer() as (_, port), Client(port, tmp_path) as client:
        async with client._control:
            with ends_at(), pytest.raises(EngineTimeout, match=r"an abort waited 0\.3 s for another control call"):
                await client.abort_all(timeout_s=LIMIT_S)
        assert await client.abort_all(timeout_s=LIMIT_S) == 0


async def test_a_broken_connection_waits_for_the_death_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says that the server died; the request is lost all the same."""
    monkeypatch.setattr("actors.sglang.flight.DEATH_NOTICE_S", LIMIT_S)
    async with peer(generate="") as (_, port), Client(port, tmp_path) as client:
        with ends_at():
            result = await client.generate(request())
        assert result.finish is FinishReason.LOST and "connection to the engine broke" in result.reason


async def test_a_server_that_never_answers_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    monkeypatch.setattr(sys, "executable", sleeper)
    async with peer() as (_, port):
        said = r"the engine did not answer within 0\.3 s"
        with ends_at(), pytest.raises(EngineTimeout, match=said):
            await EngineProcess.start([], {}, port=port, log=tmp_path / "log", timeout_s=LIMIT_S)


async def test_a_server_that_ignores_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: str) -> None:
    monkeypatch.setattr(sys, "executable", sleeper)
    async with peer(health="{}") as (_, port):
        process = await EngineProcess.start([], {}, port=port, log=tmp_path / "log", timeout_s=LONG_S)
        with monkeypatch.context() as patch:
            patch.setattr(process, "_signal", lambda _: None)
            with ends_at(2 * LIMIT_S), pytest.raises(EngineTimeout, match=rf"engine processes {process.pid}.* after"):
                await process.stop(grace_s=LIMIT_S, timeout_s=LIMIT_S)
        with ends_at():
            await process.stop(grace_s=LIMIT_S)
        assert process.processes() == []


# --- environments ---------------------------------------------------------------------------------------------------


class StuckFamily:
    tasks = tuple(Task(name, "stuck", "k") for name in ("reset", "step", "score", "fingerprint", "nothing"))

    def open(self, index: int) -> Stuck:
        return Stuck(self.tasks[index].name)


class Stuck:
    """An environment in which what its task names never ends."""

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def task(self) -> Task:
        return Task(self.where, "stuck", "k")

    async def _do(self, what: str) -> None:
        if what == self.where:
            await asyncio.Event().wait()

    async def reset(self, timeout_s: float) -> Observation:
        await self._do("reset")
        return Observation(())

    async def step(self, action: str, timeout_s: float) -> StepResult:
        await self._do("step")
        return StepResult("well")

    async def score(self, timeout_s: float) -> Score:
        await self._do("score")
        return Score(0.0)

    async def fingerprint(self) -> str:
        await self._do("fingerprint")
        return ""

    async def close(self) -> None:
        pass


class Letters:
    """A chat of plain characters."""

    def prompt(self, messages: Any) -> list[int]:
        return [1]

    def decode(self, ids: Any) -> str:
        return "```sh\nls\n```"

    def between(self, ids: Any, text: str) -> list[int]:
        return [2]

    def count(self, text: str) -> int:
        return len(text)

    def defuse(self, text: str) -> str:
        return text

    def truncate(self, text: str, room: int) -> str:
        return text[:room]


@pytest.fixture
async def worker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvironmentWorker]:
    monkeypatch.setattr(agent, "GRACE_S", 0.0)
    monkeypatch.setattr(ChatRenderer, "load", lambda _: Letters())
    monkeypatch.setattr("actors.environment.make_family", lambda *_: StuckFamily())
    made = EnvironmentWorker()
    sandbox = SandboxConfig(directory=str(directory))
    await made.start(EnvironmentConfig(sandbox=sandbox, max_turns=9).model_dump(mode="json"), "model", "run", "e0")
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("task", "said"), [(0, "starting"), (1, "a step"), (2, "scoring"), (3, "a fingerprint")], ids=lambda v: str(v)
)
async def test_an_environment_that_never_answers(worker: EnvironmentWorker, task: int, said: str) -> None:
    async def play() -> None:
        await worker.open([0, 0, 0], task, LIMIT_S)
        await worker.advance([0, 0, 0], [1], LIMIT_S)
        await worker.score([0, 0, 0], LIMIT_S)

    with ends_at(), pytest.raises(InfrastructureError, match=rf"{said} took longer than 0\.3 s"):
        await play()


async def test_a_command_that_ignores_everything(directory: Path) -> None:
    made = BubblewrapBackend(SandboxConfig(), directory=directory)
    sandbox = await made.create({})
    try:
        stubborn = "trap '' TERM INT HUP QUIT; exec 0<&-; while :; do sleep 98499; done"
        with ends_at():
            result = await sandbox.exec(stubborn, timeout_s=LIMIT_S)
        assert result.timed_out and result.exit_code is None
    finally:
        await made.close()


async def test_a_command_that_survives_its_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(sandbox_command, "REAP_S", LIMIT_S)
    monkeypatch.setattr(sandbox_command, "_kill", lambda process, _: killed.append(process.pid))
    try:
        with ends_at(2 * LIMIT_S), pytest.raises(InfrastructureError, match=r"was killed and did not end in 0\.3 s"):
            await sandbox_command.run_bounded(
                ["/bin/sleep", "98498"], timeout_s=LIMIT_S, keep_bytes=10, kill_after_bytes=10
            )
    finally:
        os.kill(killed[0], signal.SIGKILL)


async def test_a_probe_that_hangs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_backend, "PROBE_S", LIMIT_S)
    made = BubblewrapBackend(SandboxConfig(), directory=directory)
    made.python = "while :; do sleep 98497; done; true"
    try:
        said = r"a command that should take milliseconds did not end within 0\.3 s"
        with ends_at(), pytest.raises(UserError, match=said):
            await made.probe()
    finally:
        await made.close()


def holding(path: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock and does nothing more."""
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    return process


def test_a_lock_that_another_process_holds(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_folder, "LOCK_S", LIMIT_S)
    monkeypatch.setattr(models, "CONVERSION_S", LIMIT_S)
    said = rf"another process holds the lock {directory}/\.lock for more than 0\.3 s"
    with holding(directory / ".lock") as holder:
        with ends_at(), pytest.raises(TimeoutError, match=said), locked(directory / ".lock", LIMIT_S):
            pass
        with ends_at(), pytest.raises(UserError, match=f"sandbox directory {directory} cannot be used: {said}"):
            BubblewrapBackend(SandboxConfig(), directory=directory)
        with ends_at():
            assert sandbox_folder.sweep(directory) == [], "the next one sweeps"
        with holding(directory / "m.lock") as second:
            with ends_at(), pytest.raises(UserError, match=r"the model m cannot be made: another process holds"):
                with models._lock(directory / "m"):
                    pass
            second.kill()
        holder.kill()
    with locked(directory / ".lock", LIMIT_S), (directory / ".lock").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_users_of_a_folder_that_survive_their_kill(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = subprocess.Popen(["sleep", "98496"], executable="/bin/sleep")
    monkeypatch.setattr(sandbox_folder, "KILL_WAIT_S", LIMIT_S)
    monkeypatch.setattr(sandbox_folder, "_pids", lambda: [user.pid])
    monkeypatch.setattr(sandbox_folder, "_arguments", lambda _: [f"{directory}/x".encode()])
    said = rf"processes \[{user.pid}\] of the sandbox folder .* cannot be killed"
    try:
        with monkeypatch.context() as patch, ends_at(), pytest.raises(InfrastructureError, match=said):
            patch.setattr(os, "kill", lambda *_: None)
            sandbox_folder._kill_users_of(directory)
    finally:
        user.kill()
        user.wait()


# --- trainer --------------------------------------------------------------------------------------------------------


def test_a_conversion_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: str) -> None:
    monkeypatch.setattr(sys, "executable", sleeper)
    checkpoint = tmp_path / "step-2"
    checkpoint.mkdir()
    said = re.escape(f"converting {checkpoint} took longer than 0.3 s")
    with ends_at(), pytest.raises(universal.ConversionError, match=said):
        universal.convert(checkpoint, LIMIT_S)
    assert list(tmp_path.glob(".step-2*")) == []


@pytest.mark.slow
def test_ranks_that_never_come_or_stop_in_the_middle() -> None:
    """One waits for a peer that was never started, then for one that is there and stands still."""
    settings = rank_config(micro_batch_tokens=64).model_dump(mode="json")

    def start(process: RankProcess, rank: int, port: int, timeout_s: float) -> None:
        model = str(models.resolve_model(RANK_MODEL))
        process.send("start", settings, model, "float32", rank, 2, "127.0.0.1", port, 0, 10, 1.0, timeout_s)

    with RankProcess() as a, RankProcess() as b, RankProcess() as alone:
        start(alone, 0, free_port(), 2.0)
        with pytest.raises(RankError, match=r"(?i)timed out|time.?out"):
            alone.receive()
        alone.kill()
        port = free_port()
        for rank, process in enumerate((a, b)):
            start(process, rank, port, COLLECTIVE_S)
        assert [process.receive()["state"] for process in (a, b)] == ["ready", "ready"]
        os.kill(b.pid, signal.SIGSTOP)
        began = time.monotonic()
        a.send("train", 1)
        with pytest.raises(RankError, match=r"(?i)timed out"):
            a.receive()
        assert time.monotonic() - began < COLLECTIVE_S + LATE_S
        assert a.call("describe")["state"] == "broken"


# --- membership -----------------------------------------------------------------------------------------------------


async def test_a_scheduler_that_does_not_say_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        scheduler: Any

        def subscribe_topic(self, *_: object) -> None:
            pass

        async def pearl_members(self, **_: object) -> None:
            await asyncio.Event().wait()

    client = Silent()
    client.scheduler = client
    monkeypatch.setattr(membership, "ANSWER_S", LIMIT_S)
    said = r"driver waited in vain for the Dask scheduler's list of members: 0\.3 s passed"
    with ends_at(), pytest.raises(TimeoutError, match=said):
        await membership.Membership(client, print).start()


async def test_a_notice_that_is_never_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent again until there is nothing left to give notice of."""
    monkeypatch.setattr(notices, "SEND_S", LIMIT_S)
    monkeypatch.setattr(notices, "RETRY_S", 0.01)
    async with peer() as (_, port):
        reporter = notices.Reporter(f"tcp://127.0.0.1:{port}", "w-0", 1)
        with ends_at():
            assert not await reporter._send(1.0, "test")
        with ends_at(2 * LIMIT_S):
            await asyncio.to_thread(reporter.report, notices.Notice(2 * LIMIT_S, "test"))


# --- the table ------------------------------------------------------------------------------------------------------


async def test_a_registered_wait_names_both_and_its_thread_holds_nobody_up() -> None:
    never = threading.Event()
    waits = WaitTable()
    said = "driver waited in vain for the disk: 0.3 s passed"
    try:
        with ends_at(), pytest.raises(TimeoutError, match=said):
            await waits.until("driver", "the disk", LIMIT_S, in_own_thread(never.wait))
        assert waits.oldest() == []
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "pearl-wait")
    finally:
        never.set()
    assert await in_own_thread(time.gmtime, 0) == time.gmtime(0)
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 / 0)
