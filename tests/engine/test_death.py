"""Engines that do not start, die, or lose their owner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.rollout import RolloutWorker
from actors.sglang.errors import EngineDied, EngineError, EngineTimeout
from actors.sglang.leftovers import shared_files
from actors.sglang.process import PART_TITLE, group_members
from pearl.errors import UserError
from tests.engine.support import progress, request, start, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

OWNER = """
import asyncio, sys
from pathlib import Path
from actors.rollout import RolloutWorker
from actors.sglang.leftovers import shared_files
from tests.engine.support import start
asyncio.run(start(RolloutWorker(), Path(sys.argv[1]), Path(sys.argv[2])))
"""


def launchers(owner: int) -> list[int]:
    """Engines that a process started."""
    children = psutil.Process(owner).children()
    return [child.pid for child in children if "actors.sglang.launch" in child.cmdline()]


async def test_killed_engine_leaves_its_tokens_and_one_error(engine: RolloutWorker) -> None:
    """The next test that wants an engine starts this one again, in the same actor."""
    process = engine._process
    assert process is not None
    calls = [asyncio.create_task(engine.generate(request(f"k{i}", [i + 1], tokens=1500))) for i in range(3)]
    await until(lambda: len(progress(engine)) == 3 and min(progress(engine).values()) > 0)
    before = progress(engine)
    scheduler = next(p for p in process.processes() if p.cmdline()[0].startswith(PART_TITLE + "scheduler"))
    began = time.monotonic()
    scheduler.kill()
    results = await asyncio.gather(*calls)
    assert time.monotonic() - began < 5.0
    for index, result in enumerate(results):
        assert result["finish"] == "lost"
        assert len(result["token_ids"]) == len(result["logprobs"]) >= before[f"k{index}"]
        assert result["reason"].startswith("the engine ") and "batch" in result["reason"]
    for call in (engine.health(), engine.generate(request("after")), engine.abort(), engine.metrics()):
        with pytest.raises(EngineDied, match="its log ends"):
            await call
    await engine.stop()
    assert process.processes() == []


async def test_a_notice_to_all_processes_of_a_host_ends_no_engine(engine: RolloutWorker) -> None:
    """Slurm signals every process of a step before it takes the node away: the worker drains its engine meanwhile."""
    process = engine._process
    assert process is not None
    call = asyncio.create_task(engine.generate(request("notice", tokens=300)))
    await until(lambda: progress(engine).get("notice", 0) > 0)
    os.killpg(process.pid, signal.SIGTERM)
    result = await call
    assert (result["finish"], len(result["token_ids"])) == ("length", 300)
    assert process.returncode is None


async def test_no_process_outlives_a_killed_owner(tiny_model: Path, tmp_path: Path) -> None:
    """The owner is killed while the engine starts, once its children are there: the hardest moment."""
    shared = set(Path("/dev/shm").glob("sglang_*"))
    command = [sys.executable, "-c", OWNER, str(tiny_model), str(tmp_path)]
    owner = await asyncio.create_subprocess_exec(*command, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    groups: list[int] = []
    scratch = Path()

    def engine_has_children() -> bool:
        groups[:] = launchers(owner.pid)
        return bool(groups) and len(group_members(groups[0])) >= 3

    try:
        await until(engine_has_children, timeout_s=120.0)
        line = psutil.Process(groups[0]).cmdline()
        scratch = Path(line[line.index("--scratch") + 1])
        assert scratch.is_dir()
    finally:
        owner.kill()
        await owner.wait()
    await until(lambda: group_members(groups[0]) == [], timeout_s=20.0)
    assert not scratch.exists()
    in_use = {path for pid in psutil.pids() for path in shared_files(pid)}
    assert set(Path("/dev/shm").glob("sglang_*")) <= shared | in_use


async def test_launcher_killed_while_starting(tiny_model: Path, tmp_path: Path) -> None:
    before = set(launchers(os.getpid()))
    starting = asyncio.create_task(start(RolloutWorker(), tiny_model, tmp_path))
    await until(lambda: len(launchers(os.getpid())) > len(before))
    os.kill((set(launchers(os.getpid())) - before).pop(), signal.SIGKILL)
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        await starting


async def test_early_death_is_one_error_with_the_log(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="no-such-flag") as raised:
        await start(RolloutWorker(), tiny_model, tmp_path, engine={"extra_args": ("--no-such-flag",)})
    assert "ended with status 2" in str(raised.value)


async def test_start_has_a_deadline_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    before = set(launchers(os.getpid()))
    with pytest.raises(EngineTimeout, match="did not answer within 1 s"):
        await start(RolloutWorker(), tiny_model, tmp_path, timeout_s=1.0)
    assert set(launchers(os.getpid())) == before


async def test_taken_port_is_the_users_error(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port = {port} cannot be used"):
            await start(RolloutWorker(), tiny_model, tmp_path, port=port)


async def test_calls_before_start_and_after_stop(tiny_model: Path, tmp_path: Path) -> None:
    worker = RolloutWorker()
    for call in (worker.health(), worker.generate(request("x")), worker.abort()):
        with pytest.raises(EngineError, match="no engine was started"):
            await call
    assert await worker.stop() == {"returncode": None}


async def test_second_start_is_refused(engine: RolloutWorker, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="running already"):
        await start(engine, tiny_model, tmp_path)
