"""Prefill-decode serving: what a pair answers, and what becomes of a request when half of the pair is gone."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.errors import EngineError
from tests.engine.support import Snapshots, check_same_answer, paired, progress, request, serve, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]
LONG = 600
TRIES = 5
"""On a busy machine an answer may be whole before this process gets to interrupt it."""


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(5, 1000) for _ in range(rng.randint(2, 90))] for _ in range(6)]


async def test_pair_answers_as_a_colocated_engine(
    engine: RolloutWorker, partner: RolloutWorker, prompts: list[list[int]]
) -> None:
    alone = [await engine.generate(request(f"a{i}", prompt)) for i, prompt in enumerate(prompts)]
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    halves = await asyncio.gather(*(serve(engine, partner, f"p{i}", prompt) for i, prompt in enumerate(prompts)))
    for whole, (prefilled, decoded), prompt in zip(alone, halves, prompts, strict=True):
        assert decoded["token_ids"] == whole["token_ids"]
        assert decoded["logprobs"] == pytest.approx(whole["logprobs"], abs=1e-4)
        assert decoded["versions"] == whole["versions"]
        assert decoded["finish"] == whole["finish"]
        assert prefilled["handed_on"] and prefilled["prompt_tokens"] == len(prompt)


async def test_next_turn_transfers_only_what_the_decode_engine_lacks(
    engine: RolloutWorker, partner: RolloutWorker
) -> None:
    """It has the whole last turn but its last token; the prefill engine lacks the response and computes it again."""
    first = list(range(5, 60))
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    _, turn = await serve(engine, partner, "one", first, 40)
    second = first + turn["token_ids"] + list(range(100, 120))
    prefilled, decoded = await serve(engine, partner, "two", second, 20)
    assert decoded["cached_tokens"] == len(first) + 40 - 1
    assert prefilled["cached_tokens"] == len(first)
    await partner.switch_role("colocated")
    assert (await partner.generate(request("alone", second, 20)))["token_ids"] == decoded["token_ids"]


async def test_thirty_answers_interrupted_and_resumed_in_another_role(
    engine: RolloutWorker, partner: RolloutWorker
) -> None:
    """Ten are cut colocated and go on as a pair; ten as a pair, and go on as the pair turned round; ten so, and go on
    colocated. How far an answer has come when its cut takes effect is the machine's affair."""
    rng = random.Random(2)
    prompts = [[rng.randrange(5, 1000) for _ in range(rng.randint(2, 30))] for _ in range(30)]
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]

    def keep(case: int, part: dict) -> None:
        tokens[case] += part["token_ids"]
        logprobs[case] += part["logprobs"]

    async def ask(case: int, role: str, count: int) -> dict:
        rid, prompt = f"{role}{case}", prompts[case] + tokens[case]
        if role == "alone":
            return await engine.generate(request(rid, prompt, count))
        halves = (engine, partner) if role == "pair" else (partner, engine)
        return (await serve(*halves, rid, prompt, count))[1]

    async def cut(case: int, role: str) -> None:
        decoder = partner if role == "pair" else engine
        least = rng.randint(1, 60)
        for _ in range(TRIES):
            call = asyncio.create_task(ask(case, role, LONG))
            await until(lambda: call.done() or progress(decoder).get(f"{role}{case}", 0) >= least)  # noqa: B023
            await decoder.interrupt(f"{role}{case}")
            part = await call
            if part["finish"] != "length":
                break
        assert part["finish"] == "abort", part
        keep(case, part)
        assert len(tokens[case]) >= least

    async def finish(case: int, role: str) -> None:
        keep(case, await ask(case, role, 40))

    for role, cuts, ends in (
        ("alone", range(10), ()),
        ("pair", range(10, 20), range(10)),
        ("turned", range(20, 30), range(10, 20)),
        ("alone", (), range(20, 30)),
    ):
        await engine.switch_role({"alone": "colocated", "pair": "prefill", "turned": "decode"}[role])
        await partner.switch_role("decode" if role == "pair" else "prefill")
        for case in ends:
            await finish(case, role)
        for case in cuts:
            await cut(case, role)
    for case, prompt in enumerate(prompts):
        whole = await engine.generate(request(f"whole{case}", prompt, len(tokens[case])))
        check_same_answer(tokens[case], logprobs[case], whole)


async def test_sync_ends_both_halves_and_serves_the_new_weights(
    engine: RolloutWorker, partner: RolloutWorker, snapshots: Snapshots
) -> None:
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    call = asyncio.create_task(serve(engine, partner, "old", [1, 2, 3], LONG))
    waiting = asyncio.create_task(engine.prefill(paired(engine, "lonely", [4, 5, 6])))
    await until(lambda: progress(partner).get("old", 0) > 0 and "lonely" in progress(engine))
    snapshot = snapshots.publish()
    await asyncio.gather(*(w.sync(str(snapshot.directory), snapshot.version) for w in (engine, partner)))
    old = (await call)[1]
    assert old["finish"] == "abort" and old["versions"][-1][0] < snapshot.version
    assert not (await waiting)["handed_on"]
    _, new = await serve(engine, partner, "new", [1, 2, 3], 20, version=snapshot.version)
    assert new["versions"] == [[snapshot.version, 20]]
    await engine.switch_role("colocated")
    assert (await engine.generate(request("alone", [1, 2, 3], 20)))["token_ids"] == new["token_ids"]


async def test_halves_of_different_weights_do_not_meet(
    engine: RolloutWorker, partner: RolloutWorker, snapshots: Snapshots
) -> None:
    version = (await engine.health())["version"]
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    request_ = paired(engine, "mixed", [1, 2, 3], version=version)
    assert not (await engine.prefill(request_))["handed_on"]
    call = asyncio.create_task(partner.generate(request_))
    await until(lambda: "mixed" in progress(partner))
    await partner.interrupt("mixed")
    assert (await call)["finish"] == "abort"


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_half_without_its_other_half_can_be_interrupted(
    engine: RolloutWorker, partner: RolloutWorker, half: str
) -> None:
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    lonely = paired(engine, "lonely", [1, 2, 3])
    worker = engine if half == "prefill" else partner
    call = asyncio.create_task(worker.prefill(lonely) if half == "prefill" else worker.generate(lonely))
    await until(lambda: "lonely" in progress(worker))
    await worker.interrupt("lonely")
    result = await call
    assert (result["finish"], result["peer_lost"]) == ("abort", False)
    _, whole = await serve(engine, partner, "whole", [1, 2, 3])
    assert len(whole["token_ids"]) == 32


async def test_what_does_not_fit_a_role_is_refused(engine: RolloutWorker, partner: RolloutWorker) -> None:
    await engine.switch_role("prefill")
    await partner.switch_role("decode")
    pair = paired(engine, "r", [1, 2, 3])
    unequal = pair | {"pair": pair["pair"] | {"tensor_parallel": 2}}
    for call, what in (
        (engine.generate(pair), "a prefill engine does not decode"),
        (partner.prefill(pair), "a decode engine does not prefill"),
        (partner.generate(request("whole")), "a whole request came to a decode engine"),
        (partner.generate(unequal), "tensor_parallel = 2, this one 1; the halves of a pair must be equal"),
    ):
        result = await call
        assert result["finish"] == "failed" and what in result["reason"]
    with pytest.raises(EngineError, match="retract is for colocated engines"):
        await partner.pause("retract")
