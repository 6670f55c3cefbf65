"""Waits of sandboxes and of SWE-bench tasks, blocked on purpose; see `test_wait_table`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envs.errors import InfrastructureError
from envs.sandbox import command, process, remote
from envs.sandbox.archives import Base
from envs.sandbox.container import ContainerSandbox
from envs.sandbox.engine import Engine
from envs.sandbox.process import ProcessSandbox
from envs.sandbox.remote import RemoteSandbox
from envs.swebench import interpreters
from envs.swebench.errors import BuildTimeout
from envs.swebench.tools import Tools
from pearl.config.environment import SandboxConfig
from tests.live.blocking import LIMIT_S, ends_at, peer


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def test_an_engine_of_containers_that_does_not_answer(tmp_path: Path) -> None:
    engine = Engine("podman", program(tmp_path / "podman", "exec sleep 98501"))
    with ends_at(), pytest.raises(InfrastructureError, match=r"`podman ps` did not end within 0\.3 s"):
        await engine.call("ps", timeout_s=LIMIT_S)


async def test_a_container_that_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own wall time does not count before it begins."""
    monkeypatch.setattr(command, "BEGIN_S", LIMIT_S)
    answers = 'case "$1" in start) exec sleep 98501;; container) echo 0 false 0 false 0;; esac'
    engine = Engine("podman", program(tmp_path / "podman", answers))
    sandbox = ContainerSandbox(engine, "name", "/workspace", Base(), SandboxConfig())
    with ends_at(), pytest.raises(InfrastructureError, match=r"did not start a command within 0\.3 s"):
        await sandbox.exec("true", timeout_s=LIMIT_S / 100)


async def test_a_remote_sandbox_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("swerex.deployment.config", reason="swe-rex is not installed")
    monkeypatch.setattr(remote, "ANSWER_S", 0.0)
    async with peer() as (_, port):
        deployment = config.RemoteDeploymentConfig(auth_token="x", port=port).get_deployment()
        await deployment.start()
        sandbox = RemoteSandbox(deployment, "/tmp/workspace", Base(), SandboxConfig())
        with ends_at(), pytest.raises(InfrastructureError, match="a remote sandbox did not answer: TimeoutError"):
            await sandbox.exec("true", timeout_s=LIMIT_S)
        deployment._runtime = None  # its destructor would ask the peer once more


async def test_a_supervisor_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_S", 0.0)
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", "exec sleep 98501"))
    sandbox = ProcessSandbox(tmp_path, str(tmp_path), Base(), SandboxConfig())
    with ends_at(), pytest.raises(InfrastructureError, match="did not answer: TimeoutError"):
        await sandbox.exec("true", timeout_s=LIMIT_S)


def test_a_tool_of_a_build_that_never_ends(tmp_path: Path) -> None:
    with ends_at(), pytest.raises(BuildTimeout, match="did not end within the build's deadline"):
        Tools.within(LIMIT_S).run(["/bin/sleep", "98501"], tmp_path)


def test_an_interpreter_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "QUERY_S", LIMIT_S)
    with ends_at():
        assert interpreters._prefix(Path(program(tmp_path / "python3.11", "exec sleep 98501")), "3.11") is None
