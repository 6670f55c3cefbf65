"""A request of two workers, whichever half ends first, and however; without workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pearl.cluster.errors import ActorCallFailed, ActorLost
from pearl.live import pair
from pearl.live.pair import serve_pair

REQUEST = {"rid": "r", "token_ids": [1, 2], "timeout_s": 60.0}
KV = {"host": "10.0.0.7", "port": 9000, "tensor_parallel": 1}
HANDED_ON = {"handed_on": True, "finish": "length", "reason": "", "peer_lost": False}
ANSWER = {"token_ids": [3, 4], "finish": "stop", "reason": "", "peer_lost": False}
NOTHING = {"token_ids": [], "finish": "abort", "reason": "aborted before its KV arrived", "peer_lost": False}

PREFILL: Any = "p"
DECODE: Any = "d"
"""What `Workers` takes for references to its actors."""


class Workers:
    """Two workers, "p" and "d". A half answers what it was given, at once or, if that is a list, when interrupted."""

    def __init__(self, prefill: Any, decode: Any, deaf: int = 0) -> None:
        self.replies = {"p": prefill, "d": decode}
        self.calls: list[tuple[str, str]] = []
        self.deaf = deaf
        """Interrupts that come before the request."""
        self.requests: list[dict[str, Any]] = []
        self._interrupted = {"p": asyncio.Event(), "d": asyncio.Event()}

    async def call(self, ref: str, method: str, *args: Any, **_: Any) -> Any:
        self.calls.append((ref, method))
        if method == "interrupt":
            self.deaf -= 1
            if self.deaf < 0:
                self._interrupted[ref].set()
            return {}
        self.requests.append(args[0])
        reply = self.replies[ref]
        if isinstance(reply, list):
            await self._interrupted[ref].wait()
            (reply,) = reply
        if isinstance(reply, Exception):
            raise reply
        return reply


async def ask(workers: Any) -> tuple[dict[str, Any], str, int]:
    """Reply, why the prefill half is lost, and how often its KV was handed on."""
    handed: list[None] = []
    reply, lost, _ = await serve_pair(
        workers, PREFILL, DECODE, REQUEST, KV, interrupt_s=5.0, waiter="g0.0.0", handed_on=lambda: handed.append(None)
    )
    return reply, lost, len(handed)


async def test_both_halves_get_one_request_and_one_room() -> None:
    workers = Workers(HANDED_ON, ANSWER)
    assert await ask(workers) == (ANSWER, "", 1)
    first, second = workers.requests
    assert first == second and first["pair"] | KV == first["pair"]
    assert workers.calls == [("p", "prefill"), ("d", "generate")]


async def test_lost_prefill_half_releases_the_decode_half() -> None:
    reply, lost, handed = await ask(Workers(ActorLost("p is gone"), [NOTHING]))
    assert (reply["token_ids"], reply["finish"], reply["peer_lost"]) == ([], "lost", True)
    assert (lost, handed) == ("p is gone", 0)


async def test_prefill_half_that_lost_its_engine_says_so_itself() -> None:
    gone = {"handed_on": False, "finish": "lost", "reason": "the engine died", "peer_lost": False}
    reply, lost, _ = await ask(Workers(gone, [NOTHING]))
    assert (reply["finish"], reply["peer_lost"], lost) == ("lost", True, "the engine died")


@pytest.mark.parametrize("finish", ["abort", "failed"])
async def test_prefill_half_that_was_interrupted_or_refused_is_not_lost(finish: str) -> None:
    over = {"handed_on": False, "finish": finish, "reason": "why", "peer_lost": False}
    reply, lost, _ = await ask(Workers(over, [NOTHING]))
    assert (reply["finish"], reply["reason"], reply["peer_lost"], lost) == (finish, "why", False, "")


async def test_lost_decode_half_releases_the_prefill_half() -> None:
    over = {"handed_on": False, "finish": "abort", "reason": "", "peer_lost": False}
    workers = Workers([over], ActorLost("d is gone"))
    with pytest.raises(ActorLost, match="d is gone"):
        await ask(workers)
    assert ("p", "interrupt") in workers.calls


@pytest.mark.parametrize(
    ("said", "lives"), [(ActorLost("p is gone"), False), (ActorCallFailed("the engine died", "EngineDied"), True)]
)
async def test_it_is_told_whether_the_actor_of_a_lost_prefill_half_lives(said: Exception, lives: bool) -> None:
    workers: Any = Workers(said, [NOTHING])
    _, _, answers = await serve_pair(
        workers, PREFILL, DECODE, REQUEST, KV, interrupt_s=5.0, waiter="", handed_on=lambda: None
    )
    assert answers is lives


async def test_answer_outlives_the_prefill_half() -> None:
    """It died after its KV had arrived: its loss is told, the tokens count."""
    reply, lost, _ = await ask(Workers(ActorLost("p is gone"), ANSWER))
    assert (reply, lost) == (ANSWER, "p is gone")


async def test_interrupt_that_overtakes_its_request_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "REPEAT_S", 0.01)
    workers = Workers(ActorLost("p is gone"), [NOTHING], deaf=2)
    await ask(workers)
    assert workers.calls.count(("d", "interrupt")) == 3
