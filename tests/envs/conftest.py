import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from envs.chat import ChatRenderer
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.folder import remove_tree
from pearl.config.environment import SandboxConfig
from pearl.models import resolve_model


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not pytest's tmp_path: as root, commands run as a user who must be able to pass through."""
    path = Path(tempfile.mkdtemp(prefix="pearl-test-"))
    path.chmod(0o711 if os.getuid() == 0 else 0o700)
    yield path
    remove_tree(path)


@pytest.fixture
async def backend(directory: Path) -> AsyncIterator[BubblewrapBackend]:
    made = BubblewrapBackend(SandboxConfig(), directory=directory)
    yield made
    await made.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert processes_with(str(directory)) == []


@pytest.fixture(scope="session")
def chat() -> ChatRenderer:
    return ChatRenderer.load(resolve_model("smollm2-135m-instruct"))


def processes_with(text: str) -> list[int]:
    """Living processes whose arguments contain `text`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                if text.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
    return found
