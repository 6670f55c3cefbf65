"""Sandboxes with limits that a cheat meets quickly."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.containers import LABEL, ContainerBackend
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import SandboxConfig
from tests.envs.conftest import processes_with

LIMITS = SandboxConfig(memory_mb=400, processes=48, cpu_s=2, file_mb=16, disk_mb=48, output_chars=20_000)


@pytest.fixture(scope="session")
def contained(podman: str) -> Iterator[ContainerBackend]:
    """One for all cheats: the layer with the repository is made once."""
    with tempfile.TemporaryDirectory(prefix="pearl-test-") as directory:
        limits = LIMITS.model_copy(update={"backend": "podman", "image": podman})
        made = ContainerBackend(limits, directory=Path(directory))
        yield made
        asyncio.run(made.close())
        assert [entry.name for entry in Path(directory).iterdir()] == [".lock"]


@pytest.fixture(params=["bubblewrap", "podman"])
async def guarded(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[SandboxBackend]:
    if request.param == "podman":
        contained: ContainerBackend = request.getfixturevalue("contained")
        before = await contained.engine.labelled("container", LABEL)  # another test's fault
        yield contained
        assert await contained.engine.labelled("container", LABEL) == before
        return
    made = BubblewrapBackend(LIMITS, directory=directory)
    yield made
    await made.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert processes_with(str(directory)) == []
