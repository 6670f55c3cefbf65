"""Public faults of this field around an engine: a real SGLang server where tokens matter, a silent peer where not.

Each docstring says what happened there, then what PEARL must do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.errors import EngineError, EngineTimeout, StaleVersion
from pearl.core.trajectory import FinishReason, SegmentKind, TrajectoryId
from pearl.live.tokens import LiveTrajectory
from tests.engine.support import ENGINE, progress, request, until
from tests.live.blocking import LIMIT_S, LONG_S, ends_at, peer
from tests.live.test_blocked_components import Client
from tests.live.test_blocked_components import request as typed_request

PROMPT = [5, 6, 7, 8]
LONG = 400


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_sglang_11673_an_abort_in_the_waiting_queue_keeps_the_tokens(engine: RolloutWorker) -> None:
    """sgl-project/sglang PR#11673: a request that was retracted to the waiting queue and aborted there came back empty.

    In PEARL it comes back with every token that it had, and goes on from there as if nothing had happened.
    """
    whole = await engine.generate(request("whole", PROMPT, tokens=LONG))
    call = asyncio.create_task(engine.generate(request("cut", PROMPT, tokens=LONG)))
    await until(lambda: progress(engine).get("cut", 0) >= 20)
    await engine.pause("retract")
    had = progress(engine)["cut"]
    await engine.abort()
    part = await call
    await engine.resume()
    assert part["finish"] == "abort"
    tokens = part["token_ids"]
    assert had <= len(tokens) == len(part["logprobs"]) == sum(count for _, count in part["versions"]) < LONG
    rest = await engine.generate(request("rest", PROMPT + tokens, tokens=LONG - len(tokens)))
    assert tokens + rest["token_ids"] == whole["token_ids"]


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_verl_6076_an_abort_before_the_first_token_is_a_whole_answer(engine: RolloutWorker) -> None:
    """verl-project/verl PR#6076: an abort that came before the first token returned an empty list, which broke `zip`.

    In PEARL it is an answer with no tokens, no log-probs and no versions, which a trajectory takes like any other.
    """
    count = ENGINE.max_running_requests + 8
    calls = [asyncio.create_task(engine.generate(request(f"q{i}", [i + 1, 2, 3], tokens=LONG))) for i in range(count)]
    await until(lambda: len(progress(engine)) == count and max(progress(engine).values()) > 0)
    await engine.abort()
    replies = await asyncio.gather(*calls)
    empty = [reply for reply in replies if not reply["token_ids"]]
    assert empty and {reply["finish"] for reply in empty} == {"abort"}
    live = LiveTrajectory(TrajectoryId(0, 0, 0), "t")
    live.add_context(SegmentKind.PROMPT, PROMPT)
    for reply in empty:
        assert (reply["logprobs"], reply["versions"]) == ([], [])
        live.add_response(reply["token_ids"], reply["logprobs"], reply["versions"])
    assert live.token_ids == PROMPT and len(live.segments) == 1


async def test_miles_1724_an_engine_without_synced_weights_refuses_by_itself(tmp_path: Path) -> None:
    """radixark/miles#1724: a restarted engine was put back into routing before it had the weights.

    In PEARL, whatever a scheduler may do, such an engine is not even asked.
    """
    async with peer(generate="{}") as (served, port), Client(port, tmp_path) as client:
        client.version = None
        refused = await client.generate(typed_request())
        assert (refused.finish, refused.reason) == (FinishReason.FAILED, "the engine has no synced weights")
        assert served.asked == []


async def test_miles_2244_an_engine_takes_no_older_version(tmp_path: Path) -> None:
    """radixark/miles PR#2244: after a failover the version counter fell from 57 to 1 and the staleness filter broke.

    In PEARL an engine that had a version refuses every older one.
    """
    async with peer() as (served, port), Client(port, tmp_path) as client:
        client._newest = 57
        with pytest.raises(StaleVersion, match="version 1 is older than version 57"):
            await client.load_snapshot(tmp_path, 1, timeout_s=LONG_S)
        assert client.version == 0 and served.asked == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, '{"error": {"message": "out of memory"}}'), "/update_weights_from_tensor: status 500, out of memory"),
        ('{"success": false, "message": "no such tensor"}', "/update_weights_from_tensor: no such tensor"),
    ],
)
async def test_trl_6797_an_error_of_the_weight_update_is_raised(tmp_path: Path, answer: object, said: str) -> None:
    """huggingface/trl#6797: the HTTP error of a weight update was thrown away, and the broadcast waited for ever.

    In PEARL the error is raised with the engine's words, and the engine serves nothing from then on.
    """
    answers = {
        "flush_cache": "{}",
        "begin_weight_update": "{}",
        "end_weight_update": "{}",
        "update_weights_from_tensor": answer,
    }
    async with peer(**answers) as (_, port), Client(port, tmp_path) as client:
        with pytest.raises(EngineError, match=said):
            await client.load_snapshot(tmp_path, 1, timeout_s=LONG_S)
        assert (await client.generate(typed_request())).reason == "the engine has no synced weights"


async def test_trl_6797_a_weight_update_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """See above: in PEARL it ends at its deadline, and the session that it had opened is ended too."""
    answers = {"flush_cache": "{}", "begin_weight_update": "{}", "end_weight_update": "{}"}
    async with peer(**answers) as (served, port), Client(port, tmp_path) as client:
        with ends_at(), pytest.raises(EngineTimeout, match=r"did not load version 1 within 0\.3 s"):
            async with asyncio.timeout(LONG_S):
                await client.load_snapshot(tmp_path, 1, timeout_s=LIMIT_S)
        assert served.asked[-1] == "/end_weight_update"
