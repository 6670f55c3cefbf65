"""Generation: tokens, log-probs, versions, stops, refusals, and agreement with transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.rollout import RolloutWorker
from bench.engine_parity import TEMPERATURES, compare, make_prompts, reference_model
from tests.engine.support import MODEL, Snapshots, progress, request, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_result_has_one_logprob_and_version_per_token(engine: RolloutWorker) -> None:
    version = (await engine.health())["version"]
    result = await engine.generate(request("a", tokens=21, temperature=1.0))
    assert result["finish"] == "length"
    assert len(result["token_ids"]) == len(result["logprobs"]) == 21
    assert all(logprob <= 0 for logprob in result["logprobs"])
    assert result["versions"] == [[version, 21]]
    assert 0 < result["first_token_s"] <= result["seconds"]


async def test_concurrent_requests_keep_apart(engine: RolloutWorker) -> None:
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(6)]
    alone = [await engine.generate(request("alone", p, tokens=12)) for p in prompts]
    together = await asyncio.gather(*(engine.generate(request(f"t{i}", p, tokens=12)) for i, p in enumerate(prompts)))
    assert [r["token_ids"] for r in together] == [r["token_ids"] for r in alone]
    assert len({tuple(r["token_ids"]) for r in alone}) > 1


async def test_stop_string_ends_and_keeps_its_tokens(engine: RolloutWorker, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    free = await engine.generate(request("free", tokens=16))
    stop = tokenizer.decode(free["token_ids"][7:9])
    stopped = await engine.generate(request("stopped", tokens=16, stop=[stop]))
    assert stopped["finish"] == "stop"
    assert stop in stopped["reason"]
    kept = stopped["token_ids"]
    assert kept == free["token_ids"][: len(kept)] and len(kept) < 16
    assert stop in tokenizer.decode(kept)


async def test_agrees_with_transformers_after_an_update(
    engine: RolloutWorker, snapshots: Snapshots, tiny_model: Path
) -> None:
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    model = reference_model(tiny_model, snapshot.directory)
    for temperature in TEMPERATURES:
        comparison = await compare(engine, model, make_prompts(tiny_model, 4), 32, temperature)
        assert comparison.agrees, comparison


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"token_ids": ["a"]}, "no integer"),
        ({"colour": "red"}, "unknown fields ['colour']"),
        ({"token_ids": [1] * 3000}, "context length"),
        ({"token_ids": [1, 10**6]}, "outside the vocabulary"),
        ({"token_ids": [-1]}, "outside the vocabulary"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"max_new_tokens": MODEL.context_tokens}, "context length"),
    ],
)
async def test_bad_request_fails_with_its_reason(engine: RolloutWorker, change: dict, what: str) -> None:
    result = await engine.generate(request("bad") | change)
    assert result["finish"] == "failed"
    assert what in result["reason"]
    assert result["token_ids"] == []


async def test_two_pending_requests_of_one_name(engine: RolloutWorker) -> None:
    first = asyncio.create_task(engine.generate(request("twin", tokens=1500)))
    await until(lambda: "twin" in progress(engine))
    second = await engine.generate(request("twin"))
    assert second["finish"] == "failed" and "pending already" in second["reason"]
    await engine.abort()
    assert (await first)["finish"] == "abort"


async def test_metrics_count_what_was_generated(engine: RolloutWorker) -> None:
    before = await engine.metrics()
    result = await engine.generate(request("m", tokens=9))
    after = await engine.metrics()
    assert after["generated_tokens"] - before["generated_tokens"] == len(result["token_ids"])
    assert after["pending"] == 0
    assert after["capacity_tokens"] >= 8192
    assert after["rss_bytes"] > 2**28
    assert after["counters"]["sglang:generation_tokens_total"] > 0
    await engine.health(generate=True)
