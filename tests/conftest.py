"""What several test folders share: the tiny model, snapshots of it, and one real engine for the whole session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from actors.rollout import RolloutWorker
    from tests.engine.support import Snapshots

MODEL = "tiny-random-llama"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-attacks", action="store_true", help="play cheats by files in containers, too")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of the two-layer random model; made once and cached."""
    from pearl.models import resolve_model

    return resolve_model(MODEL)


@pytest.fixture(scope="session")
def snapshots(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshots:
    """Publishes snapshots of the tiny model with ever higher versions."""
    from tests.engine.support import Snapshots

    return Snapshots(tiny_model, tmp_path_factory.mktemp("snapshots"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutWorker]:
    """The session's engine (float32), started on first use. Tests use `engine`, which hands it over ready."""
    from actors.rollout import RolloutWorker
    from tests.engine.support import start

    worker = RolloutWorker()
    await start(worker, tiny_model, tmp_path_factory.mktemp("engine"))
    yield worker
    await worker.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(
    engine_session: RolloutWorker, snapshots: Snapshots, tiny_model: Path, tmp_path: Path
) -> RolloutWorker:
    """A running, synced, colocated engine; tests that use it run in the session's event loop
    (`pytest.mark.asyncio(loop_scope="session")`). Started again if a test before killed it."""
    from actors.sglang.errors import EngineError
    from tests.engine.support import start

    try:
        health = await engine_session.health()
    except EngineError:
        await engine_session.stop()
        await start(engine_session, tiny_model, tmp_path)
        health = await engine_session.health()
    await engine_session.switch_role("colocated")
    if health["version"] is None:
        snapshot = snapshots.publish()
        await engine_session.sync(str(snapshot.directory), snapshot.version)
    return engine_session


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """More than one OpenMP thread per process makes a shared machine slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
