"""One generate request on its way: from the gate, through the stream, to the one result that it always has."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp

from actors.sglang.errors import EngineError
from actors.sglang.generation import GenerateRequest, Generation
from actors.sglang.http import DEATH_NOTICE_S, EngineHttp
from actors.sglang.meter import DecodeMeter
from pearl.core.trajectory import FinishReason

ABORT_GRACE_S = 5.0
"""After its deadline a request is aborted and given this long to hand over its last tokens."""
Refusal = Callable[[GenerateRequest], tuple[FinishReason, str] | None]


class Flight:
    def __init__(self, request: GenerateRequest, http: EngineHttp, meter: DecodeMeter) -> None:
        # SGLang aborts every request whose id *begins* with the given one, so ids of our own, all of one length.
        self.server_rid = uuid.uuid4().hex
        self.aborted = asyncio.Event()
        """Set before the engine is told, so that a request which has not reached it yet never starts."""
        self.done = asyncio.Event()
        self.result = Generation(paired=request.pair is not None)
        """Grows while the request runs."""
        self._request = request
        self._sent = False
        self._http = http
        self._meter = meter

    async def run(self, gate: asyncio.Event, refusal: Refusal) -> Generation:
        """Wait for `gate`, generate, and say how it ended; only cancellation raises.

        `refusal` is asked once the gate is open: how it ends if the engine must not serve it, and why; else None.
        """
        result = self.result
        work = asyncio.create_task(self._read(result, gate, refusal))
        died = self._http.died
        try:
            await _first(work, died, self._request.timeout_s)
            if not work.done() and not died.done():
                await self._overdue(work, result)
            if result.finish is None and (died.done() or _broken(work)):
                await self._lost(work, result)
            if result.finish is None:
                error = work.exception() if work.done() else None
                result.end(FinishReason.FAILED, f"the engine's reply was not understood: {error!r}")
                await self.send_abort()
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self.send_abort()))
            raise
        finally:
            result.decoded = self._meter.left(self.server_rid)
            self.done.set()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work
        return result

    async def send_abort(self, timeout_s: float = ABORT_GRACE_S) -> None:
        """Tell the engine, whatever comes of it."""
        with contextlib.suppress(EngineError):
            body = {"rid": self.server_rid, "abort_all": False}
            await self._http.call("POST", "/abort_request", body, timeout_s=timeout_s)

    def _measure(self, before: int) -> None:
        tokens = len(self.result.token_ids) - before
        if tokens and before:
            self._meter.grew(self.server_rid, tokens)
        elif tokens:
            prompt = len(self._request.token_ids)
            new = prompt - self.result.cached_tokens
            self._meter.joined(self.server_rid, prompt + tokens, new, self.result.prefill)

    async def _overdue(self, work: asyncio.Task[None], result: Generation) -> None:
        why = f"the deadline of {self._request.timeout_s:g} s passed"
        self.aborted.set()
        # Side by side: one after the other they would outlast the margin that the caller allows.
        telling = asyncio.ensure_future(self.send_abort())
        await _first(work, self._http.died, ABORT_GRACE_S)
        telling.cancel()
        if result.finish is FinishReason.ABORT:
            result.reason = why
        elif not work.done() and not self._http.died.done():
            result.end(FinishReason.LOST, f"{why} and the engine does not answer")

    async def _lost(self, work: asyncio.Task[None], result: Generation) -> None:
        """The server or the connection is gone. The kernel closed the sockets; what they still hold is read first."""
        if self._sent:
            await asyncio.wait({work}, timeout=DEATH_NOTICE_S)
        await asyncio.wait({self._http.died}, timeout=DEATH_NOTICE_S)
        if result.finish is None:
            broke = f"the connection to the engine broke: {work.exception()!r}" if work.done() else ""
            result.end(FinishReason.LOST, self._http.died.result() if self._http.died.done() else broke)

    async def _read(self, result: Generation, gate: asyncio.Event, refusal: Refusal) -> None:
        await _either(gate, self.aborted)
        if self.aborted.is_set():
            result.end(FinishReason.ABORT, "aborted before it started")
        elif refused := refusal(self._request):
            result.end(*refused)
        else:
            self._sent = True
            async for reply in self._http.stream("/generate", self._request.body(self.server_rid)):
                before = len(result.token_ids)
                result.feed(reply)
                self._measure(before)
            if result.peer_lost and self.aborted.is_set():  # an abort before the KV was there reads the same
                result.peer_lost = False
                result.end(FinishReason.ABORT, "aborted before its KV arrived")
            if result.finish is None:
                raise aiohttp.ClientPayloadError("the stream ended early")


def _broken(work: asyncio.Task[None]) -> bool:
    return work.done() and not work.cancelled() and isinstance(work.exception(), aiohttp.ClientError)


async def _first(work: asyncio.Task[None], died: asyncio.Future[str], timeout_s: float) -> None:
    waits: list[asyncio.Future[Any]] = [work, died]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    if first.is_set() or second.is_set():
        return
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
