"""What stands between Dask and an actor: one packed message in, one packed message out.

Dask serialises nested arguments element by element, which costs more than a small turn's work; here a call travels as
one msgpack string. It also keeps the contract honest: only plain data crosses between processes.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgpack


class Endpoint:
    """The Dask actor. It makes the real one and hands calls to it; coroutine methods run on the worker's event loop,
    plain ones in its actor thread."""

    used = False
    """Whether this process ever had an actor."""

    def __init__(self, cls: type) -> None:
        Endpoint.used = True
        self.actor = cls()

    async def call(self, packed: bytes) -> bytes:
        """A coroutine method: `packed` is [method, args]."""
        method, args = msgpack.unpackb(packed, strict_map_key=False)
        return pack(await getattr(self.actor, method)(*args))

    def call_in_thread(self, packed: bytes) -> bytes:
        """A plain method."""
        method, args = msgpack.unpackb(packed, strict_map_key=False)
        return pack(getattr(self.actor, method)(*args))


def pack(value: Any) -> bytes:
    """msgpack bytes of plain data; tuples arrive as lists. Raises TypeError for anything else."""
    return msgpack.packb(value)


def handler_of(cls: type, method: str) -> str:
    """Which of the endpoint's two methods carries out `cls.method`."""
    return "call" if inspect.iscoroutinefunction(getattr(cls, method)) else "call_in_thread"
