"""What `pearl cluster scale` starts, ends and writes down before, at a provider that is a dictionary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster import standing
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.standing import StandingCluster, State
from pearl.config.cluster import ClusterConfig
from pearl.core.requests import Cause
from pearl.errors import RunFailed, UserError


class Provider:
    """Launcher and scheduler in one; workers join as soon as they are started."""

    options = ("a", "b")
    rest_s = 5.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running: dict[str, int] = {}
        self.refused: set[str] = set()
        self.stuck: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.away = False

    async def start(self, order: WorkerOrder) -> Provider:
        assert order.slot in json.loads(self.path.read_text())["slots"], "it is written down before"
        self.asked.append((order.slot, order.option))
        if order.option in self.refused:
            raise LaunchFailed("no", Cause.CAPACITY)
        self.running[order.slot] = order.life
        return self

    def failed(self) -> None:
        return None

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        for name in [name for name in self.running if slot in (None, name) and name not in self.stuck]:
            del self.running[name]

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        return [name for name in self.running if slot in (None, name)]

    async def ask(self, state: State, operation: str, **_: Any) -> Any:
        if self.away:
            raise OSError("refused")
        who = [{"slot": name, "incarnation": life} for name, life in self.running.items()]
        return {"claimed": False, "events": [{"kind": "joined", "identity": identity} for identity in who]}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StandingCluster, Provider]:
    made = StandingCluster(tmp_path, lambda text: None)
    provider = Provider(made.path)
    State("c", ClusterConfig().model_dump(mode="json"), 0, 1, "tls://127.0.0.1:1").save(made.path)
    monkeypatch.setattr(standing, "POLL_S", 0.01)
    monkeypatch.setattr(made, "_launcher", lambda state: provider)
    monkeypatch.setattr(made, "_ask", provider.ask)
    return made, provider


async def scale(cluster: StandingCluster, slots: int) -> list[str]:
    status = await cluster.scale(slots, 5.0, 0.0)
    return [slot["slot"] for slot in status["slots"] if slot["state"] == "here"]


async def test_as_many_as_are_wanted_are_there_and_what_is_gone_comes_back(
    cluster: tuple[StandingCluster, Provider],
) -> None:
    made, provider = cluster
    assert await scale(made, 3) == ["slot-0", "slot-1", "slot-2"]
    del provider.running["slot-1"]  # taken away
    assert await scale(made, 3) == ["slot-0", "slot-1", "slot-2"]
    assert [name for name, _ in provider.asked] == ["slot-0", "slot-1", "slot-2", "slot-1"]
    assert await scale(made, 1) == ["slot-0"] and list(provider.running) == ["slot-0"]
    assert await made.down() == [] and not provider.running and not made.path.exists()


async def test_a_place_that_fails_is_passed_over_and_the_next_option_asked(
    cluster: tuple[StandingCluster, Provider],
) -> None:
    made, provider = cluster
    provider.refused = {"a"}
    assert await scale(made, 1) == ["slot-1"]
    assert provider.asked == [("slot-0", "a"), ("slot-1", "b")]
    provider.refused = {"a", "b"}
    with pytest.raises(RunFailed, match="1 of 2 slots are there"):
        await scale(made, 2)
    assert list(json.loads(made.path.read_text())["slots"]) == ["slot-1"], "nothing is left in the books"


async def test_what_does_not_go_is_said_and_stays_in_the_books(cluster: tuple[StandingCluster, Provider]) -> None:
    made, provider = cluster
    await scale(made, 2)
    provider.stuck = {"slot-1"}
    with pytest.raises(RunFailed, match="slot-1 is still there"):
        await scale(made, 1)
    assert await made.down() == ["slot-1"] and made.path.exists()
    provider.stuck = set()
    assert await made.down() == []


async def test_without_a_scheduler_nothing_is_changed(cluster: tuple[StandingCluster, Provider]) -> None:
    made, provider = cluster
    await scale(made, 1)
    provider.away = True
    with pytest.raises(UserError, match="the scheduler does not answer"):
        await scale(made, 3)
    assert list(provider.running) == ["slot-0"]
