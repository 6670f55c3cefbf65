"""Calls to actors on Dask workers, each with a deadline and typed errors.

Dask's own Actor proxy hangs for ever on a dead actor, an unpicklable result or a released key, so this goes straight to
the worker's `actor_execute` handler. When the scheduler says that a worker is gone, calls in flight to it fail at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
from distributed import Client
from distributed.protocol import to_serialize

from pearl.cluster.endpoint import handler_of, pack
from pearl.cluster.errors import ActorCallFailed, ActorLost, ActorTimeout

PICKLED_TRACEBACK_CHARS = 600
"""A remote error is shown as its own message, cut to this length."""


class LostWorkers:
    """Addresses that left, and the calls that wait on those still here."""

    def __init__(self) -> None:
        self._lost: dict[str, str] = {}
        self._pending: dict[str, set[asyncio.Future[Any]]] = {}

    def mark(self, address: str, reason: str) -> None:
        """The worker at `address` is gone: fail what waits for it, now and later (addresses are not reused here)."""
        self._lost[address] = reason
        for future in self._pending.pop(address, ()):
            if not future.done():
                future.cancel()

    def reason(self, address: str) -> str | None:
        return self._lost.get(address)

    def watch(self, address: str, future: asyncio.Future[Any]) -> None:
        waiting = self._pending.setdefault(address, set())
        waiting.add(future)
        future.add_done_callback(waiting.discard)


class ActorRef:
    """One actor of one incarnation."""

    def __init__(self, client: Client, lost: LostWorkers, cls: type, name: str, key: str, address: str) -> None:
        self.client, self.lost, self.cls = client, lost, cls
        self.name, self.key, self.address = name, key, address

    def __repr__(self) -> str:
        return self.name

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Result of `actor.method(*args)`; arguments and result are plain data (tuples arrive as lists).

        Raises ActorLost, ActorTimeout or ActorCallFailed; cancelling the caller cancels the call.
        """
        if reason := self.lost.reason(self.address):
            raise ActorLost(f"{self.name}.{method}: its worker is gone ({reason})")
        request = asyncio.ensure_future(
            self.client.rpc(self.address).actor_execute(
                actor=self.key,
                function=handler_of(self.cls, method),
                args=[to_serialize(pack([method, args]))],
                kwargs={},
            )
        )
        self.lost.watch(self.address, request)
        try:
            reply = await asyncio.wait_for(request, timeout_s)
        except TimeoutError:
            raise ActorTimeout(f"{self.name}.{method} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            if reason := self.lost.reason(self.address):
                raise ActorLost(f"{self.name}.{method}: its worker is gone ({reason})") from None
            raise
        except (OSError, KeyError) as error:  # connection closed; no such actor there any more
            raise ActorLost(f"{self.name}.{method}: {type(error).__name__}: {error}") from None
        except Exception as error:  # the worker's handler itself failed, e.g. on a result that cannot be pickled
            raise ActorCallFailed(f"{self.name}.{method}: {_short(error)}", type(error).__name__) from None
        if reply["status"] == "OK":
            return msgpack.unpackb(reply["result"], strict_map_key=False)
        raised = getattr(reply["exception"], "data", reply["exception"])
        raise ActorCallFailed(f"{self.name}.{method}: {_short(raised)}", type(raised).__name__)


def _short(error: object) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= PICKLED_TRACEBACK_CHARS else text[:PICKLED_TRACEBACK_CHARS] + " ..."
