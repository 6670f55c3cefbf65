"""What a command in a sandbox can see and reach."""

import os
import socket
from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from tests.envs.conftest import processes_with


async def output(backend: BubblewrapBackend, command: str) -> str:
    sandbox = await backend.create({"a.txt": b"a\n"})
    return (await sandbox.exec(command, timeout_s=10)).output


async def test_there_is_no_network(backend: BubblewrapBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = await output(backend, f"tail -n +3 /proc/net/dev | cut -d: -f1; echo > /dev/tcp/127.0.0.1/{port}")
    assert said.split()[0] == "lo" and "Connection refused" in said
    said = await output(backend, "echo > /dev/tcp/1.1.1.1/53")
    assert "Network is unreachable" in said


async def test_sockets_of_the_host_are_out_of_reach(backend: BubblewrapBackend) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0pearl-{os.getpid()}")
        server.listen()
        code = f'import socket; socket.socket(socket.AF_UNIX).connect("\\0pearl-{os.getpid()}")'
        assert "ConnectionRefusedError" in await output(backend, f"{backend.python} -c '{code}'")


async def test_no_secret_is_in_the_environment_or_in_proc(
    backend: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEARL_TEST_TOKEN", "hunter2")
    said = await output(backend, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ls -la /proc/*/fd")
    assert "HOME=/tmp" in said
    assert "hunter2" not in said and "PEARL_TEST_TOKEN" not in said


async def test_only_standard_streams_are_open(backend: BubblewrapBackend) -> None:
    # Descriptor 3 is ls's own, of the folder that it lists.
    assert (await output(backend, "exec ls /proc/self/fd")).split() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "path", ["/new", "/usr/new", "/etc/new", "/usr/bin/new", "/proc/sys/kernel/hostname", "/bin/bash", "/opt"]
)
async def test_nothing_outside_can_be_written(backend: BubblewrapBackend, path: str) -> None:
    existed = Path(path).exists()
    said = await output(backend, f"echo x > {path}")
    assert any(word in said for word in ("Read-only", "denied", "Is a directory", "No such file", "Operation not"))
    assert Path(path).exists() == existed


async def test_the_host_is_not_visible(backend: BubblewrapBackend) -> None:
    said = await output(backend, "cat /etc/passwd /etc/shadow; ls /root /home /var /sys; ls /")
    assert said.count("No such file") == 6
    assert set(said.splitlines()[-1].split() if "  " in said.splitlines()[-1] else said.splitlines()[6:]) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "tmp", "usr", "workspace",
    } | set(Path(backend.python).parts)  # fmt: skip


async def test_links_lead_nowhere(backend: BubblewrapBackend) -> None:
    sandbox = await backend.create({})
    await sandbox.exec("ln -s /etc/passwd file; ln -s / folder", timeout_s=10)
    assert await sandbox.read("file", timeout_s=10) is None
    assert {path: entry.kind for path, entry in (await sandbox.snapshot()).items()} == {
        "file": "other",
        "folder": "other",
    }


async def test_commands_are_unprivileged(backend: BubblewrapBackend, directory: Path) -> None:
    said = await output(
        backend, "id -u; touch new; grep CapEff /proc/self/status; unshare -Ur id; mount -t tmpfs x /tmp"
    )
    assert said.splitlines()[0] == "1000"
    assert "CapEff:\t0000000000000000" in said
    assert "unshare failed" in said and "mount: /tmp:" in said
    if os.getuid() == 0:
        (made,) = directory.glob("*/*/upper/new")
        assert made.stat().st_uid != 0


async def test_processes_of_the_host_cannot_be_signalled(backend: BubblewrapBackend) -> None:
    said = await output(
        backend, f"ls /proc | grep -c '^[0-9]'; kill -9 {os.getpid()}; kill -9 1; echo alive; kill -9 -1"
    )
    assert int(said.split()[0]) < 10 and "No such process" in said and "alive" in said


async def test_sandboxes_share_nothing(backend: BubblewrapBackend) -> None:
    one, two = await backend.create({"a": b"1"}), await backend.create({"a": b"1"})
    await one.exec("echo one > a; echo one > /tmp/b; echo one > /dev/shm/c", timeout_s=10)
    assert (await one.exec("cat a /tmp/b", timeout_s=10)).output == "one\none\n"
    assert (await two.exec("cat a; ls /tmp /dev/shm", timeout_s=10)).output == "1/dev/shm:\n\n/tmp:\n"


async def test_commands_leave_no_process(backend: BubblewrapBackend) -> None:
    sandbox = await backend.create({})
    result = await sandbox.exec(
        "setsid nohup sleep 98431 > /dev/null 2>&1 & (setsid sleep 98431 &) ; sleep 98431 & echo started", timeout_s=10
    )
    assert (result.exit_code, result.output) == (0, "started\n")
    assert processes_with("98431") == []
