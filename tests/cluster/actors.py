"""Actors that misbehave in the ways that calls must survive."""

from __future__ import annotations

import asyncio
import os
import threading


class Odd:
    def __init__(self) -> None:
        self.entered = False

    async def echo(self, value: object) -> object:
        return value

    async def never(self) -> None:
        self.entered = True
        await asyncio.Event().wait()

    async def has_entered(self) -> bool:
        return self.entered

    async def raises(self) -> None:
        raise ValueError("what went wrong")

    async def unpackable(self) -> object:
        return object()

    async def raises_unpicklable(self) -> None:
        error = ValueError("odd")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def pid(self) -> int:
        return os.getpid()

    def thread(self) -> str:
        return threading.current_thread().name
