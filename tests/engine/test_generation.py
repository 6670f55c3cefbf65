"""How streamed replies add up to one result, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from actors.sglang.generation import GenerateRequest, Generation
from pearl.core.trajectory import FinishReason


def reply(tokens: list[int], *, total: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5 * token, token, None] for token in tokens]
    about = {"output_token_logprobs": logprobs, "completion_tokens": total, "finish_reason": finish}
    return {"output_ids": tokens, "meta_info": about | {"weight_version": "3"} | meta}


def test_increments_add_up() -> None:
    generation = Generation()
    generation.feed(reply([1], total=1))
    generation.feed(reply([2, 3], total=3))
    generation.feed(reply([4], total=4, finish={"type": "length", "length": 4}))
    assert generation.token_ids == [1, 2, 3, 4]
    assert generation.logprobs == [-0.5, -1.0, -1.5, -2.0]
    assert generation.versions == [(3, 4)]
    assert generation.finish is FinishReason.LENGTH
    assert generation.first_token_s is not None


def test_abort_in_the_queue_repeats_a_token() -> None:
    """When SGLang aborts a request that was put back in the queue, it sends its last token and all log-probs again."""
    generation = Generation()
    generation.feed(reply([1, 2], total=2))
    last = reply([2], total=2, finish={"type": "abort", "message": "Abort in waiting queue"})
    last["meta_info"]["output_token_logprobs"] = [[-0.5, 1, None], [-1.0, 2, None]]
    generation.feed(last)
    assert generation.token_ids == [1, 2]
    assert generation.logprobs == [-0.5, -1.0]
    assert generation.finish is FinishReason.ABORT


def test_last_reply_says_where_versions_changed() -> None:
    generation = Generation()
    generation.feed(reply([1, 2, 3], total=3))
    spans = [{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 4}]
    generation.feed(reply([4], total=4, finish={"type": "stop", "matched": 0}, weight_versions=spans))
    assert generation.versions == [(2, 2), (3, 2)]
    assert generation.finish is FinishReason.STOP


def test_zero_token_abort() -> None:
    generation = Generation()
    generation.feed(
        reply([], total=0, finish={"type": "abort"}, weight_versions=[{"version": "3", "start": 0, "end": 0}])
    )
    assert (generation.token_ids, generation.versions, generation.first_token_s) == ([], [], None)
    assert generation.finish is FinishReason.ABORT


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "too long"}},
        {"error": "too long"},
        reply([], total=0, finish={"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_refusals(refusal: dict[str, Any]) -> None:
    generation = Generation()
    generation.feed(refusal)
    assert (generation.finish, generation.reason) == (FinishReason.FAILED, "too long")


def test_foreign_logprobs_are_an_error() -> None:
    wrong = reply([1], total=1)
    wrong["meta_info"]["output_token_logprobs"] = [[-1.0, 9, None]]
    with pytest.raises(ValueError, match="not those of its tokens"):
        Generation().feed(wrong)


@pytest.mark.parametrize(
    "broken",
    [
        {"error": {"message": "KV transfer failed", "code": 500}},
        reply([], total=0, finish={"type": "abort", "message": "KV transfer failed", "status_code": 500}),
    ],
)
def test_kv_that_did_not_arrive_is_the_loss_of_the_other_half(broken: dict[str, Any]) -> None:
    generation = Generation(paired=True)
    generation.feed(reply([1], total=1))
    generation.feed(broken)
    assert (generation.finish, generation.reason) == (FinishReason.LOST, "KV transfer failed")
    assert generation.peer_lost
    assert (generation.token_ids, generation.logprobs, generation.versions) == ([], [], [])


def test_pair_travels_with_its_request() -> None:
    wire = {"rid": "r", "token_ids": [1], "max_new_tokens": 1}
    pair = {"room": 7, "host": "10.0.0.7", "port": 9000, "tensor_parallel": 1}
    assert "bootstrap_room" not in GenerateRequest.from_wire(wire).body("s")
    body = GenerateRequest.from_wire(wire | {"pair": pair}).body("s")
    assert (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"]) == ("10.0.0.7", 9000, 7)
