"""Plain processes: only on request, bounded in time and output, and gone with their owner."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.sandbox.folder import sweep
from envs.sandbox.process import ProcessBackend
from envs.swebench.builder import BuiltTask
from envs.swebench.grade import grade_changes
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError
from tests.envs.conftest import processes_with, until

UNSAFE = SandboxConfig(backend="process", unsafe=True, memory_mb=1024, cpu_s=1, disk_mb=2, output_chars=200)
OWNER = """
import asyncio, sys
from pathlib import Path
from envs.sandbox.process import ProcessBackend
from pearl.config.environment import SandboxConfig

async def main():
    backend = ProcessBackend(SandboxConfig(backend="process", unsafe=True), directory=Path(sys.argv[1]))
    await (await backend.create({})).exec("setsid sleep 98448 & exec sleep 98448", timeout_s=600)

asyncio.run(main())
"""


def test_they_are_refused_unless_asked_for(directory: Path) -> None:
    with pytest.raises(UserError, match="unprotected") as caught:
        ProcessBackend(SandboxConfig(backend="process"), directory=directory)
    assert "environment.sandbox.unsafe" in caught.value.remedy


async def test_bounds(directory: Path) -> None:
    backend = ProcessBackend(UNSAFE, directory=directory)
    try:
        sandbox = await backend.create({})
        stubborn = "trap '' TERM HUP INT; setsid sleep 98449 & (setsid nohup sleep 98449 &); sleep 98449; sleep 98449"
        assert (await sandbox.exec(stubborn, timeout_s=0.5)).timed_out
        assert processes_with("98449") == []
        assert (await sandbox.exec("exec yes", timeout_s=60)).over_output
        assert (await sandbox.exec("while :; do :; done", timeout_s=60)).exit_code in (128 + 9, 128 + 24)
        assert (await sandbox.exec("env", timeout_s=10)).output.count("=") < 10
        assert (await sandbox.exec("head -c 3000000 /dev/zero > big", timeout_s=10)).over_disk
    finally:
        await backend.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


async def test_a_killed_owner_leaves_nothing(directory: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(directory)])  # noqa: ASYNC220
    try:
        await until(lambda: len(processes_with("sleep\0" + "98448")) >= 2)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await until(lambda: not processes_with("98448"))
    assert len(sweep(directory)) == 1


async def test_a_task_of_the_benchmark_is_graded(built: BuiltTask, directory: Path) -> None:
    backend = ProcessBackend(UNSAFE.model_copy(update={"cpu_s": 60, "disk_mb": 64}), directory=directory)
    try:
        agent = await backend.create_from(built.image)
        fix = "python -c 'import sums; print(sums.double(4))'; sed -i 's/n + 3/2 * n/' src/sums.py"
        assert (await agent.exec(fix, timeout_s=30)).output == "7\n"
        limits: dict[str, Any] = {"reward": "resolved", "test_s": 30.0, "attempts": 1, "timeout_s": 120.0}
        changes = await agent.diff()
        assert (await grade_changes(built, backend, changes, **limits)).reward == 1.0
    finally:
        await backend.close()
