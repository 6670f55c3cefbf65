from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pearl.cluster.local import LocalCluster
from pearl.live import actors, trainer
from tests.envs.conftest import directory
from tests.live.blocking import LIMIT_S

__all__ = ["directory"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("workers"), lambda *_: None)
    async with made:
        yield made


@pytest.fixture
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_MARGIN_S", 0.0)
    monkeypatch.setattr(trainer, "RENDEZVOUS_S", LIMIT_S)
