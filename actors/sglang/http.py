"""HTTP to one engine on loopback: every call with a deadline, every failure as one typed error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from actors.sglang.errors import EngineDied, EngineError, EngineTimeout

DEATH_NOTICE_S = 2.0
"""How long a broken connection waits to learn that the server died, and why."""


class EngineHttp:
    """`died` resolves to a message when the server process has ended; then no call waits any longer."""

    def __init__(self, url: str, died: asyncio.Future[str]) -> None:
        self.url = url
        self.died = died
        self._session = aiohttp.ClientSession(
            # No limit: the engine queues, and what waits here could not be aborted there. No reuse: the server closes
            # idle connections after seconds, and a POST that meets this moment would fail.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**20,
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Reply of one call, decoded if it is JSON. Raises EngineDied, EngineTimeout; EngineError on status >= 400."""
        if self.died.done():
            raise EngineDied(self.died.result())
        call = asyncio.ensure_future(self._call(method, path, body))
        try:
            await asyncio.wait({call, self.died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and not isinstance(call.exception(), aiohttp.ClientError):
                return call.result()
            if call.done():
                await asyncio.wait({self.died}, timeout=DEATH_NOTICE_S)
            if self.died.done():
                raise EngineDied(self.died.result())
            if call.done():
                raise EngineError(f"{path}: {call.exception()}")
            raise EngineTimeout(f"{path} did not return within {timeout_s:g} s")
        finally:
            call.cancel()

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        """As `call`; a reply that says `success: false` is an EngineError too."""
        reply = await self.call("POST", path, body, timeout_s=timeout_s)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise EngineError(f"{path}: {reply.get('message') or reply}")
        return reply

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Events of a server-sent stream, as they come. Raises aiohttp.ClientError when the connection breaks."""
        async with self._session.post(self.url + path, json=body) as reply:
            if reply.status >= 400:
                yield {"error": _message(await reply.text())}
                return
            rest = b""
            async for chunk in reply.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data and data != b"[DONE]":
                        yield json.loads(data)

    async def _call(self, method: str, path: str, body: Any) -> Any:
        async with self._session.request(method, self.url + path, json=body) as reply:
            text = await reply.text()
            if reply.status >= 400:
                raise EngineError(f"{path}: status {reply.status}, {_message(text)}")
            if reply.content_type == "application/json":
                return json.loads(text) if text else None
            return text


def _message(text: str) -> str:
    """The readable part of an error body."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        return text.strip()[:500]
