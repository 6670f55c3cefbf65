"""Memory given back and taken again, as seen from outside the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rollout import RELEASED_SHARE, RolloutWorker
from actors.sglang import memory
from actors.sglang.errors import EngineError
from tests.engine.support import Snapshots, request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_released_memory_leaves_the_process_and_comes_back_as_garbage(
    engine: RolloutWorker, snapshots: Snapshots
) -> None:
    before = await engine.generate(request("before"))
    version = (await engine.health())["version"]
    released = await engine.release_memory()
    assert released["named_bytes"] == released["weights"] + released["kv_cache"] > 40e6
    assert released["freed_bytes"] >= RELEASED_SHARE * released["named_bytes"]
    refused = "the engine has no synced weights"
    assert (await engine.generate(request("asleep")))["reason"] == refused
    again = snapshots.publish(snapshots.weights(version))
    for call, what in (
        (engine.sync(str(again.directory), again.version), "memory is released"),
        (engine.switch_role("colocated"), "has no memory"),
        (engine.release_memory(), "released already"),
    ):
        with pytest.raises(EngineError, match=what):
            await call
    resumed = await engine.resume_memory()
    assert resumed["taken_bytes"] >= RELEASED_SHARE * released["named_bytes"]
    assert (await engine.generate(request("garbage")))["reason"] == refused
    with pytest.raises(EngineError, match="was not released"):
        await engine.resume_memory()
    synced = await engine.sync(str(again.directory), again.version)
    assert synced["unverified"] == 0
    assert (await engine.generate(request("after")))["token_ids"] == before["token_ids"]


async def test_many_cycles_do_not_grow(engine: RolloutWorker, snapshots: Snapshots) -> None:
    """As often as a trainer lends its GPU; tests/trainer has the same of the other side."""
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    assert engine._process is not None
    parts = engine._process.processes()

    async def cycles(count: int) -> tuple[int, int]:
        for number in range(count):
            await engine.release_memory()
            await engine.resume_memory()
            await engine.sync(str(snapshot.directory), snapshot.version)
            await engine.generate(request(f"cycle-{number}"))
        return sum(p.memory_info().rss for p in parts), sum(p.num_fds() for p in parts)

    warm, files = await cycles(4)
    named = (await engine.release_memory())["named_bytes"]
    await engine.resume_memory()
    await engine.sync(str(snapshot.directory), snapshot.version)
    after, files_after = await cycles(20)
    assert engine._process.processes() == parts, "the same processes"
    assert files_after - files < 10, "a file a cycle would be 20"
    assert after - warm < named, "20 leaks of a twentieth of what moves would be as much"


async def test_memory_that_does_not_come_free_is_an_error(
    engine: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "used_bytes", lambda device, resident: 10**9)
    with pytest.raises(EngineError, match=r"0 MB came free of the \d+ MB that the engine released"):
        await engine.release_memory()
    await engine.resume_memory()


async def test_report_needs_every_rank(tmp_path: Path) -> None:
    report = tmp_path / "e.memory"
    report.with_name("e.memory.0").write_text('{"weights": 3, "kv_cache": 4}')
    assert memory.read_report(report, 2) == {}
    report.with_name("e.memory.1").write_text('{"weights": 3, "kv_cache": 4}')
    assert memory.read_report(report, 2) == {"weights": 6, "kv_cache": 8}
