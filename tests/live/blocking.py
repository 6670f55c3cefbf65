"""What the tests of blocked waits stand on: the driver's executors on a cluster, and peers that never answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.cluster.binding import bind
from pearl.cluster.local import LocalCluster
from pearl.config.load import make_config
from pearl.core.events import Event
from pearl.live.actors import ActorClasses, Actors
from pearl.live.environments import EnvironmentWorkers
from pearl.live.journal import Journal
from pearl.live.rollout import RolloutWorkers
from pearl.live.run_directory import RunDirectory
from pearl.live.trainer import TrainerGroup
from pearl.live.waits import WaitTable

LIMIT_S = 0.3
"""The deadline under test."""
LONG_S = 60.0
"""All other deadlines: a test that waits this long has failed."""
LIVES = itertools.count(1)
LATE_S = 8.0
"""How much later than its deadline a wait may end on a busy machine; far below LONG_S."""


@dataclass(frozen=True)
class Ended:
    waiter: str
    awaited: str
    timeout_s: float
    seconds: float


class RecordingWaits(WaitTable):
    """Keeps the waits that are over."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Ended] = []

    @contextlib.contextmanager
    def open(self, waiter: str, awaited: str, timeout_s: float) -> Iterator[None]:
        began = time.monotonic()
        try:
            with super().open(waiter, awaited, timeout_s):
                yield
        finally:
            self.ended.append(Ended(waiter, awaited, timeout_s, time.monotonic() - began))


@contextlib.contextmanager
def ends_at(limit_s: float = LIMIT_S) -> Iterator[None]:
    """The block lasts until its deadline, and not much longer."""
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    assert limit_s * 0.9 <= seconds < limit_s + LATE_S, f"{seconds:.1f} s with a deadline of {limit_s:g} s"


class Stage:
    """The driver's executors without the machine: a test says what to carry out and reads the events."""

    def __init__(self, cluster: LocalCluster, folder: Path, cls: type, **sections: dict[str, Any]) -> None:
        keys = (
            "engine_start", "trainer_start", "worker_start", "generate", "abort", "sync", "environment_start",
            "environment_step", "score", "train", "publish", "checkpoint", "shutdown", "engine_stop", "memory",
            "offload", "environment_build",
        )  # fmt: skip
        tree: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "cluster": {"rollout_workers": 1},
            "engine": {"device": "cpu"},
            "deadlines": {f"{key}_s": LONG_S for key in keys},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        self.config = make_config(tree, "test")
        self.directory = RunDirectory.create(self.config)
        self.journal = Journal(self.directory.journal)
        self.waits = RecordingWaits()
        self.events: list[Event] = []
        self.life = next(LIVES)
        """Incarnation of its slots: the scheduler takes no life twice, and each test kills its own."""
        classes = ActorClasses(cls, cls, cls)
        # Processes need their time to start, also where `worker_start_s` is what the actor is given.
        self.actors = Actors(cluster, bind(self.config, 0), self.waits, LONG_S, classes)
        parts = (self.actors, self.config, folder, self.directory, self.events.append)
        self.rollout = RolloutWorkers(*parts, self.journal)
        self.environments = EnvironmentWorkers(*parts, self.journal)
        self.trainer = TrainerGroup(*parts)
        self.trainer.incarnation = self.life - 1

    async def close(self) -> None:
        for slot in list(self.actors.cluster.workers):
            await self.actors.cluster.kill(slot)
        self.journal.close()
        self.directory.close()

    def ended(self, awaited: str) -> Ended:
        found = [wait for wait in self.waits.ended if awaited in wait.awaited]
        assert found, f"nobody waited for {awaited}; {self.waits.ended}; {self.events}"
        return found[0]


class Peer:
    """A server on loopback that takes every connection, and answers only what it was told to."""

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        """`answers`: status and JSON body by path; any other path is never answered."""
        self.answers = answers
        self.asked: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked.append(path)
            if path not in self.answers:
                return  # the connection stays open
            status, body = self.answers[path]
            lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write("\r\n".join([*lines, "Connection: close", "", body]).encode())
            await writer.drain()
            writer.close()


@contextlib.asynccontextmanager
async def peer(**answers: Any) -> AsyncIterator[tuple[Peer, int]]:
    """A Peer and its port. `answers`: by path without the slash, a JSON text or (status, text)."""
    served = Peer({f"/{path}": (a if isinstance(a, tuple) else (200, a)) for path, a in answers.items()})
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    try:
        yield served, server.sockets[0].getsockname()[1]
    finally:
        for writer in served._writers:
            writer.close()
        server.close()
