"""The tiny repository of the SWE-bench tests, and sandboxes with limits that a cheat meets quickly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import SandboxConfig
from tests.envs.conftest import backend_of, processes_with
from tests.envs.swebench.conftest import builder, built, cache, source

__all__ = ["builder", "built", "cache", "source"]

LIMITS = SandboxConfig(memory_mb=400, processes=48, cpu_s=2, file_mb=16, disk_mb=48, output_chars=20_000)


@pytest.fixture(params=["bubblewrap", "podman"])
async def guarded(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[SandboxBackend]:
    made = backend_of(request, LIMITS, directory)
    yield made
    await made.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert processes_with(str(directory)) == []
