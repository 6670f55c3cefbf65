"""Sandboxes through SWE-ReX, against its own server on this machine: no isolation, so nothing here attacks."""

import asyncio
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.sandbox.protocol import Entry
from envs.sandbox.remote import RemoteBackend
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError
from tests.envs.conftest import processes_with, until

pytest.importorskip("swerex", reason="swe-rex is not installed")
TOKEN = "token"


@pytest.fixture
async def remote() -> AsyncIterator[RemoteBackend]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--auth-token", TOKEN]
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "swerex", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    name = f"remote-{secrets.token_hex(4)}"
    deployment = {"type": "remote", "auth_token": TOKEN, "host": "http://127.0.0.1", "port": port}
    made = RemoteBackend(SandboxConfig(backend="swerex", deployment=deployment, output_chars=200), name=name)
    try:
        await until(lambda: listens(port), 60.0)
        yield made
        await made.close()
        assert list(Path("/tmp").glob(f"{name}-*")) == []
    finally:
        server.kill()
        server.wait()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def test_the_protocol(remote: RemoteBackend) -> None:
    await remote.probe()
    sandbox = await remote.create({"a": b"1\n", "d/b": b"2\n", "e/": b""})
    assert (await sandbox.exec("cat a d/b; ls; exit 7", timeout_s=20)).exit_code == 7
    data = bytes(range(256)) * 300
    assert await sandbox.write("x/y z", data, timeout_s=20)
    assert await sandbox.read("x/y z", timeout_s=20, limit=len(data)) == data
    assert await sandbox.read("nothing", timeout_s=20) is None
    assert (await sandbox.exec("wc -c; rm d/b", timeout_s=20, stdin=data)).output == f"{len(data)}\n"
    assert await sandbox.diff() == {"x/y z": Entry("file", data), "d/b": Entry("missing")}
    assert set(await sandbox.snapshot()) == {"a", "d", "e", "x", "x/y z"}
    long = await sandbox.exec("seq 1 10000", timeout_s=20)
    assert long.output.startswith("1\n2\n") and long.output.endswith("10000\n") and "bytes cut" in long.output
    assert (await sandbox.exec("kill -9 $$", timeout_s=20)).exit_code == 128 + 9


async def test_commands_end_with_all_that_they_started(remote: RemoteBackend) -> None:
    sandbox = await remote.create({})
    daemon = "setsid sleep 98445 & (setsid nohup sleep 98445 > /dev/null 2>&1 &); echo done"
    assert (await sandbox.exec(daemon, timeout_s=20)).output == "done\n"
    assert processes_with("98445") == []
    result = await sandbox.exec(f"trap '' TERM HUP INT; {daemon}; sleep 98445; sleep 98445", timeout_s=1)
    assert result.timed_out and result.exit_code is None and result.output == "done\n"
    assert processes_with("98445") == []
    assert (await sandbox.exec("exec yes", timeout_s=30)).over_output


async def test_sandboxes_are_apart(remote: RemoteBackend) -> None:
    one, two = await asyncio.gather(remote.create({"a": b"1"}), remote.create({"a": b"2"}))
    assert [(await sandbox.exec("cat a", timeout_s=20)).output for sandbox in (one, two)] == ["1", "2"]


@pytest.mark.parametrize(
    "deployment", [None, {}, {"type": "local"}, {"type": "nothing"}, {"type": "modal", "unknown": 1}]
)
def test_what_is_no_deployment_is_refused(deployment: dict[str, object] | None) -> None:
    with pytest.raises(UserError, match=r"environment\.sandbox\.deployment"):
        RemoteBackend(SandboxConfig(backend="swerex", deployment=deployment))


async def test_a_server_that_is_not_there_is_named() -> None:
    deployment = {"type": "remote", "auth_token": TOKEN, "port": 9}
    with pytest.raises(UserError, match="does not run sandboxes"):
        await RemoteBackend(SandboxConfig(backend="swerex", deployment=deployment)).probe()


def test_a_machine_without_swe_rex_is_told_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swerex.deployment.config", None)
    with pytest.raises(UserError, match="SWE-ReX") as caught:
        RemoteBackend(SandboxConfig(backend="swerex", deployment={"type": "modal"}))
    assert "pip install swe-rex" in caught.value.remedy
