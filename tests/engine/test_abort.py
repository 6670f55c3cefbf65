"""Aborts, pauses and deadlines: no token that was generated is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.client import PauseMode
from tests.engine.support import ENGINE, Snapshots, check_same_answer, progress, request, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]
LONG = 400


async def test_going_on_from_an_abort_gives_the_uninterrupted_answer(engine: RolloutWorker) -> None:
    prompt = [5, 6, 7, 8]
    whole = await engine.generate(request("whole", prompt, tokens=LONG))
    partial = asyncio.create_task(engine.generate(request("cut", prompt, tokens=LONG)))
    await until(lambda: progress(engine).get("cut", 0) >= 20)
    aborted = await engine.abort()
    first = await partial
    assert aborted["aborted"] == 1
    assert first["finish"] == "abort"
    tokens = first["token_ids"]
    assert 20 <= len(tokens) == len(first["logprobs"]) < LONG
    second = await engine.generate(request("rest", prompt + tokens, tokens=len(whole["token_ids"]) - len(tokens)))
    assert tokens + second["token_ids"] == whole["token_ids"]
    assert first["logprobs"] + second["logprobs"] == pytest.approx(whole["logprobs"], abs=1e-4)


async def test_twenty_answers_interrupted_at_random_equal_the_uninterrupted_ones(engine: RolloutWorker) -> None:
    rng = random.Random(0)
    interruptions = 0
    for number in range(20):
        prompt = [rng.randrange(5, 1000) for _ in range(rng.randint(2, 12))]
        whole = await engine.generate(request(f"whole{number}", prompt, tokens=120))
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < len(whole["token_ids"]):
            left = len(whole["token_ids"]) - len(tokens)
            rid = f"part{number}-{len(tokens)}"
            part = asyncio.create_task(engine.generate(request(rid, prompt + tokens, tokens=left)))
            least = rng.randint(1, 60)
            await until(lambda: part.done() or progress(engine).get(rid, 0) >= least)  # noqa: B023
            interruptions += not part.done()
            await engine.abort()
            tokens += (await part)["token_ids"]
            logprobs += (await part)["logprobs"]
        check_same_answer(tokens, logprobs, whole)
    assert interruptions >= 20


async def test_abort_of_queued_requests_returns_no_tokens(engine: RolloutWorker) -> None:
    count = ENGINE.max_running_requests + 8
    calls = [
        asyncio.create_task(engine.generate(request(f"q{i}", [i + 1, 2, 3], tokens=LONG, temperature=1.0)))
        for i in range(count)
    ]
    await until(lambda: len(progress(engine)) == count and max(progress(engine).values()) > 0)
    aborted = await engine.abort()
    results = await asyncio.gather(*calls)
    assert aborted["aborted"] == count
    assert {r["finish"] for r in results} == {"abort"}
    assert min(len(r["token_ids"]) for r in results) == 0
    assert max(len(r["token_ids"]) for r in results) > 0
    assert all(sum(n for _, n in r["versions"]) == len(r["token_ids"]) for r in results)
    assert (await engine.metrics())["running"] == 0


async def test_abort_of_one_leaves_the_others(engine: RolloutWorker) -> None:
    one = asyncio.create_task(engine.generate(request("x1", tokens=LONG)))
    other = asyncio.create_task(engine.generate(request("x10", tokens=60)))
    await until(lambda: progress(engine).get("x1", 0) > 0)
    assert engine._client is not None
    assert await engine._client.abort("x1")
    assert (await one)["finish"] == "abort"
    assert len((await other)["token_ids"]) == 60
    assert not await engine._client.abort("x1")


async def test_abort_with_nothing_pending(engine: RolloutWorker) -> None:
    assert (await engine.abort())["aborted"] == 0


async def test_deadline_returns_what_is_there(engine: RolloutWorker) -> None:
    result = await engine.generate(request("late", tokens=1900, timeout_s=1.0))
    assert result["finish"] == "abort"
    assert "deadline of 1 s" in result["reason"]
    assert 0 < len(result["token_ids"]) < 1900


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_keeps_requests(engine: RolloutWorker, mode: PauseMode) -> None:
    whole = await engine.generate(request("w", tokens=LONG))
    call = asyncio.create_task(engine.generate(request("p", tokens=LONG)))
    await until(lambda: progress(engine).get("p", 0) > 0)
    await engine.pause(mode)
    late = asyncio.create_task(engine.generate(request("late", tokens=4)))
    await until(lambda: "late" in progress(engine))
    # The scheduler answers metrics between steps: two answers in a row with the same count mean that it stands still.
    await engine.metrics()
    count = progress(engine)
    await engine.metrics()
    assert progress(engine) == count
    assert count["late"] == 0 and count["p"] < LONG
    await engine.resume()
    assert (await call)["token_ids"] == whole["token_ids"]
    assert len((await late)["token_ids"]) == 4


async def test_pause_abort_ends_requests_and_holds_new_ones(engine: RolloutWorker) -> None:
    call = asyncio.create_task(engine.generate(request("p", tokens=LONG)))
    await until(lambda: progress(engine).get("p", 0) > 0)
    await engine.pause("abort")
    assert (await call)["finish"] == "abort"
    held = asyncio.create_task(engine.generate(request("held", tokens=4)))
    await until(lambda: "held" in progress(engine))
    await engine.abort()
    assert (await held)["finish"] == "abort"
    assert (await held)["reason"] == "aborted before it started"
    await engine.resume()
    assert (await engine.generate(request("n", tokens=4)))["finish"] == "length"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_abort_while_paused(engine: RolloutWorker, mode: PauseMode) -> None:
    call = asyncio.create_task(engine.generate(request("p", tokens=LONG)))
    await until(lambda: progress(engine).get("p", 0) > 0)
    await engine.pause(mode)
    await engine.abort()
    result = await call
    assert result["finish"] == "abort"
    assert len(result["token_ids"]) == len(result["logprobs"]) > 0
    await engine.resume()
    assert (await engine.generate(request("n", tokens=4)))["finish"] == "length"


async def test_retracted_request_goes_on_with_new_weights(engine: RolloutWorker, snapshots: Snapshots) -> None:
    before = (await engine.health())["version"]
    call = asyncio.create_task(engine.generate(request("r", tokens=LONG)))
    await until(lambda: progress(engine).get("r", 0) > 0)
    await engine.pause("retract")
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    await engine.resume()
    result = await call
    assert result["finish"] == "length"
    assert [version for version, _ in result["versions"]] == [before, snapshot.version]
    assert sum(count for _, count in result["versions"]) == LONG
