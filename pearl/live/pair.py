"""One request served by two rollout workers: one computes the prompt's KV, the other one takes it and generates."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorCallFailed, ActorError
from pearl.core.trajectory import FinishReason
from pearl.live.actors import Actors

REPEAT_S = 1.0
"""An interrupt can overtake the request that it is for, so it is repeated until that one has ended."""
ROOM_BITS = 62
OF_THE_PROMPT = ("cached_tokens", "queue_s", "prefill_s", "prefill_share")
"""Measured by the prefill half."""


async def serve_pair(
    actors: Actors,
    prefill: ActorRef,
    decode: ActorRef,
    request: dict[str, Any],
    kv: dict[str, Any],
    *,
    interrupt_s: float,
    waiter: str,
    handed_on: Callable[[], None],
) -> tuple[dict[str, Any], str, bool]:
    """The decode half's reply, why the prefill half's engine is lost ("" if it is not), and whether its actor lives.

    `kv` is what the prefill engine said of itself when it started; `handed_on` is called when it has no part in the
    request any more. Neither half waits for one that is gone: SGLang alone would, for minutes. Where the prompt's KV
    did not arrive the reply has no tokens, and says why the prefill half ended. Raises ActorError for the decode half.
    """
    request = request | {"pair": {"room": secrets.randbits(ROOM_BITS), **kv}}
    limit = request["timeout_s"]
    prefilling = asyncio.ensure_future(actors.call(prefill, "prefill", request, timeout_s=limit, waiter=waiter))
    decoding = asyncio.ensure_future(actors.call(decode, "generate", request, timeout_s=limit, waiter=waiter))

    async def interrupt(ref: ActorRef, half: asyncio.Future[dict[str, Any]]) -> None:
        while not half.done():
            await actors.call(ref, "interrupt", request["rid"], interrupt_s, timeout_s=interrupt_s, waiter=waiter)
            await asyncio.wait({half}, timeout=REPEAT_S)

    try:
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not prefilling.done() and not _has_tokens(decoding):
                await interrupt(prefill, prefilling)
            first = await prefilling
            answers = True
        except ActorError as error:
            answers = isinstance(error, ActorCallFailed)
            first = {"handed_on": False, "finish": str(FinishReason.LOST), "reason": str(error), "peer_lost": False}
        if first["handed_on"]:
            handed_on()
        else:
            await interrupt(decode, decoding)
        reply = await decoding
        if first["handed_on"]:  # the prompt was computed there
            reply = reply | {name: first[name] for name in OF_THE_PROMPT if name in first}
    finally:
        for half in (prefilling, decoding):
            half.cancel()
    lost = first["reason"] if first["finish"] == FinishReason.LOST and not first["peer_lost"] else ""
    if not first["handed_on"] and not reply["token_ids"] and reply["finish"] == FinishReason.ABORT:
        reply = reply | {"finish": first["finish"], "reason": first["reason"], "peer_lost": bool(lost)}
    return reply, lost, answers


def _has_tokens(decoding: asyncio.Future[dict[str, Any]]) -> bool:
    """Then the KV is there, and the prefill half's reply is on its way."""
    return decoding.exception() is None and bool(decoding.result()["token_ids"])
