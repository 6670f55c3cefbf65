"""Half of a pair dies while KV is on its way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.process import PART_TITLE
from tests.engine.support import Snapshots, paired, request, serve, start

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_prefill_engine_killed_before_its_kv_is_handed_on(
    engine: RolloutWorker, partner: RolloutWorker, snapshots: Snapshots, tiny_model: Path, tmp_path: Path
) -> None:
    """It is halted first, so that nothing can arrive. The decode engine serves on, first with its successor."""
    await engine.switch_role("decode")
    await partner.switch_role("prefill")
    process = partner._process
    assert process is not None
    scheduler = next(p for p in process.processes() if p.cmdline()[0].startswith(PART_TITLE + "scheduler"))
    scheduler.suspend()
    both = paired(partner, "cut", range(5, 600))
    halves = asyncio.gather(partner.prefill(both), engine.generate(both))

    async def reserved() -> bool:
        return (await engine.metrics())["used_tokens"] >= 595

    while not await reserved():
        assert not halves.done()
    scheduler.kill()
    prefilled, decoded = await halves
    assert (prefilled["handed_on"], prefilled["finish"], prefilled["peer_lost"]) == (False, "lost", False)
    assert (decoded["token_ids"], decoded["finish"], decoded["peer_lost"]) == ([], "lost", True)
    pid = engine._process.pid if engine._process else 0
    await partner.stop()
    await start(partner, tiny_model, tmp_path, role="prefill")
    snapshot = snapshots.publish()
    await asyncio.gather(*(w.sync(str(snapshot.directory), snapshot.version) for w in (engine, partner)))
    handed_on, decoded = await serve(partner, engine, "on", range(5, 60))
    assert handed_on["handed_on"] and decoded["finish"] == "length"
    await engine.switch_role("colocated")
    assert (await engine.generate(request("alone", range(5, 60))))["token_ids"] == decoded["token_ids"]
    assert engine._process is not None and engine._process.pid == pid, "it was not restarted"
