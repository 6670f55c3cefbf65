import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from envs.chat import ChatRenderer
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.containers import LABEL, ContainerBackend
from envs.sandbox.folder import remove_tree
from envs.sandbox.process import ProcessBackend
from envs.sandbox.protocol import SandboxBackend
from envs.swebench.builder import Builder, BuiltTask
from pearl.config.environment import SandboxConfig
from pearl.config.swebench import SwebenchConfig
from pearl.models import resolve_model
from tests.envs.podman import podman_image
from tests.envs.swebench.conftest import RUNNER, TESTS, WRONG, record


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not pytest's tmp_path: as root, commands run as a user who must be able to pass through."""
    path = Path(tempfile.mkdtemp(prefix="pearl-test-"))
    path.chmod(0o711 if os.getuid() == 0 else 0o700)
    yield path
    remove_tree(path)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    for name, text in (("src/sums.py", WRONG), ("tests/test_sums.py", TESTS), ("tools/run.py", RUNNER)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Not below pytest's directory: as root, commands run as a user who must be able to pass through."""
    path = Path(tempfile.mkdtemp(prefix="pearl-cache-"))
    path.chmod(0o711 if os.getuid() == 0 else 0o700)
    yield path
    remove_tree(path)


@pytest.fixture(scope="session")
def builder(cache: Path) -> Iterator[Builder]:
    made = Builder(SwebenchConfig(cache=str(cache)))
    yield made
    made.close()


@pytest.fixture(scope="session")
def built(builder: Builder, source: Path) -> BuiltTask:
    return builder.build(record(source))


@pytest.fixture(scope="session")
def podman() -> Iterator[str]:
    """An image for podman; skips, with the reason, where podman runs no containers."""
    with tempfile.TemporaryDirectory(prefix="pearl-podman-") as name, podman_image(Path(name)) as image:
        yield image


def backend_of(request: pytest.FixtureRequest, limits: SandboxConfig, directory: Path) -> SandboxBackend:
    """Of the kind that `request` has as its parameter."""
    if request.param == "bubblewrap":
        return BubblewrapBackend(limits, directory=directory)
    if request.param == "process":
        return ProcessBackend(limits.model_copy(update={"backend": "process", "unsafe": True}), directory=directory)
    image = request.getfixturevalue("podman")
    return ContainerBackend(limits.model_copy(update={"backend": "podman", "image": image}), directory=directory)


async def left_by(backend: ContainerBackend) -> list[str]:
    """Containers and images that bear its label."""
    found = [item for kind in ("container", "image") for item in (await backend.engine.labelled(kind, LABEL)).items()]
    return [one for one, owner in found if f"{backend.directory}/" in owner]


@pytest.fixture(params=["bubblewrap", "podman", "process"])
async def sandboxes(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[SandboxBackend]:
    """All kinds that this machine has."""
    made = backend_of(request, SandboxConfig(), directory)
    yield made
    await made.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert processes_with(str(directory)) == []
    if isinstance(made, ContainerBackend):
        assert await left_by(made) == []


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


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Poll what only the kernel knows: which processes there are."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
