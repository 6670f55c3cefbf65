"""Half of a pair dies while KV is on its way."""

from __future__ import annotations

import asyncio

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.process import PART_TITLE
from tests.engine.support import paired, request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_prefill_engine_killed_before_its_kv_is_handed_on(engine: RolloutWorker, partner: RolloutWorker) -> None:
    """The last test of the partner, which does not come back. It is halted first, so that nothing can arrive."""
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
    await engine.switch_role("colocated")
    assert (await engine.generate(request("on")))["finish"] == "length"
