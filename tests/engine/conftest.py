"""A second engine, for what takes two; started on first use, ended with the engine tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from actors.rollout import RolloutWorker
from actors.sglang import transfer
from tests.engine.support import Snapshots, start


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def partner_session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutWorker]:
    if lacking := transfer.missing():
        pytest.skip(f"{lacking.what}. {lacking.remedy}")
    worker = RolloutWorker()
    await start(worker, tiny_model, tmp_path_factory.mktemp("partner"))
    yield worker
    await worker.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def partner(engine: RolloutWorker, partner_session: RolloutWorker, snapshots: Snapshots) -> RolloutWorker:
    """Colocated, with the same weights as `engine`."""
    await partner_session.switch_role("colocated")
    snapshot = snapshots.publish()
    for worker in (engine, partner_session):
        await worker.sync(str(snapshot.directory), snapshot.version)
    return partner_session
