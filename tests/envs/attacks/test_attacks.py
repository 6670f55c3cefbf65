"""Every cheat, in the agent's sandbox and in grading: none resolves, escapes, hangs, or leaves a process or a file."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from shutil import copy

import pytest

from envs.sandbox.containers import ContainerBackend
from envs.sandbox.protocol import CommandResult, Entry, SandboxBackend, SandboxOverLimit
from envs.swebench.builder import BuiltTask
from envs.swebench.grade import grade_changes
from tests.envs.attacks.cheat import MARK, SECRET, SENTINEL, Cheat
from tests.envs.attacks.escapes import ESCAPES
from tests.envs.attacks.grading import PLAIN, PYTEST
from tests.envs.conftest import processes_with, until
from tests.envs.swebench.conftest import RIGHT

GOLD = {"src/sums.py": Entry("file", RIGHT.encode())}
TEST_S = 20.0
HANG_S = 300.0
"""No cheat takes nearly as long; a backend whose waits did not end would."""
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.fixture(scope="session")
def with_pytest(built: BuiltTask, cache: Path) -> BuiltTask:
    """The same task, with this Python's pytest beside its environment."""
    packages = cache / "packages"
    for name in PACKAGES:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                copy(str(file.locate()), packages / file)
    path = str(packages)
    image = replace(
        built.image,
        binds=(*built.image.binds, (path, path)),
        variables={**built.image.variables, "PYTHONPATH": f"{built.image.variables['PYTHONPATH']}:{path}"},
    )
    command = ("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_sums.py")
    return replace(built, image=image, recipe=built.recipe.model_copy(update={"test_cmd": command}))


@pytest.fixture
def host(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a cheat would reach if it could, as variables for its command."""
    monkeypatch.setenv("PEARL_TEST_TOKEN", SECRET)
    sentinel = directory.parent / f"{directory.name}-sentinel"
    sentinel.write_text(SENTINEL)
    sentinel.chmod(0o666)
    abstract = f"pearl-{secrets.token_hex(4)}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        yield {
            "SENTINEL": str(sentinel),
            "PORT": str(server.getsockname()[1]),
            "ABSTRACT": abstract,
            "HOST_PID": str(os.getpid()),
        }
    assert sentinel.read_text() == SENTINEL
    sentinel.unlink()


async def score(built: BuiltTask, backend: SandboxBackend, changes: dict[str, Entry]) -> float:
    graded = await grade_changes(
        built, backend, changes, reward="fraction", test_s=TEST_S, attempts=1, timeout_s=4 * TEST_S
    )
    return graded.reward


def check_end(cheat: Cheat, result: CommandResult) -> None:
    if cheat.ends == "killed":
        assert result.exit_code is None or result.exit_code > 128
    elif cheat.ends != "any":
        assert getattr(result, cheat.ends), result
    for text in cheat.seen:
        assert text in result.output, result
    for text in (*cheat.unseen, SECRET):
        assert text not in result.output, result


async def attack(cheat: Cheat, built: BuiltTask, backend: SandboxBackend, host: dict[str, str]) -> None:
    files = {name: Entry("file", text.encode()) for name, text in cheat.files.items()}
    sandbox = await backend.create_from(built.image, files)
    if cheat.command:
        variables = "; ".join(f"{key}={value}" for key, value in {**host, "PYTHON": "python"}.items())
        result = await sandbox.exec(f"{variables}\n{cheat.command}", timeout_s=cheat.command_s)
        check_end(cheat, result)
        await until(lambda: not processes_with(MARK))  # the kernel ends them with their namespace, at its leisure
    try:
        changes = await sandbox.diff()
    except SandboxOverLimit:
        assert not cheat.heals
    else:
        assert await score(built, backend, changes) == 0.0
        if cheat.heals and (cheat.command or not isinstance(backend, ContainerBackend)):  # files are graded alike
            assert await score(built, backend, {**changes, **GOLD}) == 1.0
    await sandbox.close()
    assert processes_with(MARK) == []


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--all-attacks")


def skip_repetition(cheat: Cheat, backend: SandboxBackend, whole: bool) -> None:
    if not (whole or cheat.command) and isinstance(backend, ContainerBackend):
        pytest.skip("files are graded by the same code everywhere; --all-attacks plays this one in containers, too")


@pytest.mark.parametrize("cheat", [*PLAIN, *ESCAPES], ids=lambda cheat: cheat.name)
async def test_cheat(
    cheat: Cheat, built: BuiltTask, guarded: SandboxBackend, host: dict[str, str], whole: bool
) -> None:
    skip_repetition(cheat, guarded, whole)
    async with asyncio.timeout(HANG_S):
        await attack(cheat, built, guarded, host)


@pytest.mark.parametrize("cheat", PYTEST, ids=lambda cheat: cheat.name)
async def test_cheat_on_pytest(
    cheat: Cheat, with_pytest: BuiltTask, guarded: SandboxBackend, host: dict[str, str], whole: bool
) -> None:
    skip_repetition(cheat, guarded, whole)
    async with asyncio.timeout(HANG_S):
        await attack(cheat, with_pytest, guarded, host)


def test_no_two_cheats_have_one_name() -> None:
    names = [cheat.name for cheat in (*PLAIN, *ESCAPES, *PYTEST)]
    assert len(set(names)) == len(names) >= 25
