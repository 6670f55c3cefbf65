"""Every wait of the driver, by name: who waits for whom, since when, until when.

A run that stands still can be asked why; a wait that outlives its deadline is a fault that names itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    waiter: str
    awaited: str
    since: float
    timeout_s: float

    def describe(self, now: float) -> str:
        left = self.since + self.timeout_s - now
        when = f"{left:.0f} s left" if left >= 0 else f"{-left:.0f} s overdue"
        return f"{self.waiter} waits for {self.awaited} since {now - self.since:.0f} s ({when})"


class WaitTable:
    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def open(self, waiter: str, awaited: str, timeout_s: float) -> Iterator[None]:
        """Register a wait for the length of the block."""
        number = next(self._numbers)
        self._waits[number] = Wait(waiter, awaited, time.monotonic(), timeout_s)
        try:
            yield
        finally:
            del self._waits[number]

    async def until(self, waiter: str, awaited: str, timeout_s: float, work: Awaitable[T]) -> T:
        """Result of `work`. At the deadline it is cancelled and a TimeoutError names both."""
        with self.open(waiter, awaited, timeout_s):
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                raise TimeoutError(f"{waiter} waited in vain for {awaited}: {timeout_s:g} s passed") from None

    def oldest(self, limit: int = 8) -> list[str]:
        """The longest waits, worst first, as sentences."""
        now = time.monotonic()
        waits = sorted(self._waits.values(), key=lambda wait: wait.since)
        return [wait.describe(now) for wait in waits[:limit]]

    def overdue(self, margin_s: float) -> list[str]:
        """Waits that outlive their deadline by more than `margin_s`, as sentences; there should be none."""
        now = time.monotonic()
        late = (wait for wait in self._waits.values() if now > wait.since + wait.timeout_s + margin_s)
        return [wait.describe(now) for wait in late]

    def any_in_time(self) -> bool:
        """Whether some wait is still within its deadline, so that something must happen yet."""
        now = time.monotonic()
        return any(now <= wait.since + wait.timeout_s for wait in self._waits.values())


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """Result of `work(*args)`, in a thread that nobody waits for when the process ends: a dead disk may hold it.

    (`asyncio.to_thread` takes one of a pool, whose threads an ending event loop waits for without a deadline.)
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # given up
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work(*args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name=f"pearl-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return await result
