"""Snapshots between hosts: a handler of each Dask worker that streams what its host has, and one that fetches.

Bulk bytes never travel in actor calls. They go from worker to worker over a connection of their own, encrypted like all
others of that worker, in pieces that the receiver asks for a few ahead, so that neither side piles them up. A receiver
whose source is silent, does not get on, or sends what does not match its checksum turns to the next one and goes on
from the last good tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distributed import Client, Worker
from distributed.comm import Comm
from distributed.core import Status, connect
from distributed.protocol import to_serialize

from pearl.cluster.actor_ref import LostWorkers
from pearl.cluster.errors import ActorCallFailed, ActorLost, ActorTimeout
from pearl.weights.copies import HostCopies, NoRoom, Origin, Unfinished, data_bytes
from pearl.weights.snapshot import SnapshotError, parse_manifest

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Below the size from which Dask serialises in a thread of its own."""
WINDOW = 3
"""Pieces that are asked for and not there yet."""
CONNECT_S = 3.0
SILENCE_S = 10.0
"""A source that says nothing for this long is gone; it says every WAITING_S that it lives and waits itself."""
WAITING_S = 1.0
PATIENCE_S = 20.0
"""A source that lives and has nothing new for this long is left for another one."""
RECEIVER_S = 60.0
"""A receiver that asks for nothing for this long is gone, and one that waits for this long has left."""
POLL_S = 0.005
"""Between two looks at what another process of this host has fetched."""
ROUNDS = 3
"""Through all sources; then others may have it."""
RETRY_S = 0.3
"""Between two rounds."""
ANSWER_MARGIN_S = 5.0
"""A worker keeps the deadline of a fetch itself; the call is given up this much later."""
RETIRE_S = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that can hand a snapshot on: its slot, its Dask address."""

    name: str
    address: str


class SnapshotExchange:
    """Of one worker process."""

    def __init__(self, worker: Worker, copies: HostCopies) -> None:
        self.worker, self.copies = worker, copies
        worker.handlers["pearl_snapshot_stream"] = self.stream
        worker.handlers["pearl_snapshot_fetch"] = self.fetch
        worker.handlers["pearl_snapshot_retire"] = self.retire

    async def stream(self, comm: Comm, origin: dict[str, str], version: int) -> Status:
        """Handler: the manifest; then, from the byte named in the first `from` that comes on, a piece for each one.

        Meanwhile `waiting`, if this host has not got so far; `gone`, if it never will.
        """
        source = Origin.from_wire(origin)
        try:
            packed = await self._soon(comm, self._manifest, source, version)
            end = data_bytes(parse_manifest(packed))
            await comm.write({"manifest": packed})
            offset = (await self._asked(comm))["from"]
            while offset < end:
                nbytes = min(PIECE_BYTES, end - offset)
                piece = await self._soon(comm, self.copies.piece, source, version, offset, nbytes)
                await comm.write({"data": to_serialize(piece)})
                offset += len(piece)
                await self._asked(comm)
        except FileNotFoundError as error:
            await comm.write({"gone": str(error)})
        except TimeoutError:
            comm.abort()
        with contextlib.suppress(TimeoutError, OSError):
            while True:  # the receiver closes: what was written last may be on its way
                await self._asked(comm)
        comm.abort()
        return Status.dont_reply

    def _manifest(self, origin: Origin, version: int) -> bytes | None:
        found = self.copies.manifest(origin, version)
        if found is None and origin.host == self.copies.host:
            raise FileNotFoundError(f"{self.copies.directory(origin, version)} is not there")
        return found

    async def _soon(self, comm: Comm, look: Callable[..., T | None], *what: Any) -> T:
        """What `look` finds, as soon as it finds something; until then the receiver hears that this side lives."""
        began = told = time.monotonic()
        while (found := look(*what)) is None:
            if time.monotonic() > began + RECEIVER_S:
                raise TimeoutError
            if time.monotonic() > told + WAITING_S:
                await comm.write({"waiting": True})
                told = time.monotonic()
            await asyncio.sleep(POLL_S)
        return found

    async def _asked(self, comm: Comm) -> dict[str, Any]:
        async with asyncio.timeout(RECEIVER_S):
            asked: dict[str, Any] = await comm.read()
        return asked

    async def fetch(
        self, origin: dict[str, str], version: int, sources: list[list[str]], timeout_s: float
    ) -> dict[str, Any]:
        """Handler: bring `version` to this host, unless it is here, and say where it lies.

        `directory`, `seconds`, and `fetched`: bytes by source, empty if another slot of the host fetched it; `left`:
        why a source was left for another one. `error` says why it did not come.
        """
        began = time.monotonic()
        job = Fetch(
            self.worker, self.copies, Origin.from_wire(origin), version, [Source(*s) for s in sources],
            began + timeout_s,
        )  # fmt: skip
        try:
            directory = await job.run()
        except SnapshotError as error:
            return {"error": str(error), "kind": type(error).__name__}
        seconds = time.monotonic() - began
        return {"directory": directory, "seconds": seconds, "fetched": dict(job.fetched), "left": job.said}

    async def retire(self, origin: dict[str, str], version: int) -> dict[str, Any]:
        """Handler: remove this host's copies of `version` and older ones; in a thread, as they may be large."""
        await asyncio.to_thread(self.copies.retire, Origin.from_wire(origin), version)
        return {}


@dataclass
class Fetch:
    """One version on its way to this host, until `until` (monotonic s). Raises SnapshotError."""

    worker: Worker
    copies: HostCopies
    origin: Origin
    version: int
    sources: list[Source]
    until: float
    copy: Unfinished | None = None
    fetched: Counter[str] = field(default_factory=Counter)
    """Bytes by source."""
    said: dict[str, str] = field(default_factory=dict)
    """Why a source gave no more."""

    async def run(self) -> str:
        """One slot of the host fetches, the others wait for it and share what it has got."""
        self.copies.join(self.origin)
        whole = self.copies.directory(self.origin, self.version)
        while not whole.exists():
            with self.copies.fetching(self.origin, self.version) as mine:
                if mine and not whole.exists():
                    await self._fetch()
                    break
            if time.monotonic() > self.until:
                raise SnapshotError(f"no slot of {self.copies.host} has fetched version {self.version} in time")
            await asyncio.sleep(POLL_S)
        return str(whole)

    async def _fetch(self) -> None:
        try:
            for _ in range(ROUNDS):
                for source in list(self.sources):
                    if await self._from(source):
                        return
                await asyncio.sleep(RETRY_S)
            why = "; ".join(f"{name}: {text}" for name, text in self.said.items())
            raise SnapshotError(f"version {self.version} did not come to {self.copies.host}; {why or 'no source'}")
        finally:
            if self.copy is not None:
                self.copy.close()

    async def _from(self, source: Source) -> bool:
        """Whether the copy is whole, with what this source could give."""
        limit = min(CONNECT_S, self.until - time.monotonic())
        if limit <= 0:
            return False
        try:
            comm = await connect(source.address, timeout=limit, deserialize=False, **self.worker.connection_args)
            try:
                await self._take(comm, source)
            finally:
                comm.abort()
        except NoRoom:
            raise
        except SnapshotError as error:  # it would send the same again: only where there is no other one
            self.said[source.name] = str(error)
            self.sources = [s for s in self.sources if s is not source] or [source]
        except (OSError, TimeoutError) as error:
            self.said[source.name] = str(error) or type(error).__name__
        if self.copy is None or not self.copy.complete:
            return False
        self.copy.finish()
        return True

    async def _take(self, comm: Comm, source: Source) -> None:
        wire = {"origin": self.origin.to_wire(), "version": self.version}
        await comm.write({"op": "pearl_snapshot_stream", "reply": False, **wire})
        packed = bytes((await self._answer(comm))["manifest"])
        if self.copy is None:
            self.copy = Unfinished(self.copies.directory(self.origin, self.version), packed)
        elif not self.copy.is_of(packed):
            raise SnapshotError(f"{source.name} has another snapshot under the same version")
        self.copy.again()
        for _ in range(WINDOW):
            await comm.write({"from": self.copy.position})
        while not self.copy.complete:
            for frame in (await self._answer(comm))["data"].frames:
                self.fetched[source.name] += memoryview(frame).nbytes
                self.copy.write(memoryview(frame).cast("B"))
            await comm.write({"from": self.copy.position})

    async def _answer(self, comm: Comm) -> dict[str, Any]:
        """The next thing that the source has to give. Raises OSError or TimeoutError if it gives nothing."""
        patient = time.monotonic() + PATIENCE_S
        while True:
            left = min(SILENCE_S, self.until - time.monotonic())
            try:
                async with asyncio.timeout(max(0.0, left)):
                    said: dict[str, Any] = await comm.read()
            except TimeoutError:
                raise TimeoutError(f"it said nothing for {left:.0f} s") from None
            if "gone" in said:
                raise OSError(said["gone"])
            if "waiting" not in said:
                return said
            if time.monotonic() > patient:
                raise TimeoutError(f"it had nothing new for {PATIENCE_S:.0f} s")


async def fetch_at(
    client: Client,
    lost: LostWorkers,
    target: Source,
    origin: Origin,
    version: int,
    sources: list[Source],
    timeout_s: float,
) -> dict[str, Any]:
    """Have a worker bring a version to its host: the reply of `SnapshotExchange.fetch`. Raises ActorError."""
    what = f"{target.name}: weights of version {version}"
    if reason := lost.reason(target.address):
        raise ActorLost(f"{what}: its worker is gone ({reason})")
    request = asyncio.ensure_future(
        client.rpc(target.address).pearl_snapshot_fetch(
            origin=origin.to_wire(),
            version=version,
            sources=[[source.name, source.address] for source in sources],
            timeout_s=timeout_s,
        )
    )
    lost.watch(target.address, request)
    try:
        reply: dict[str, Any] = await asyncio.wait_for(request, timeout_s + ANSWER_MARGIN_S)
    except TimeoutError:
        raise ActorTimeout(f"{what}: no answer within {timeout_s + ANSWER_MARGIN_S:g} s") from None
    except asyncio.CancelledError:
        if reason := lost.reason(target.address):
            raise ActorLost(f"{what}: its worker is gone ({reason})") from None
        raise
    except OSError as error:
        raise ActorLost(f"{what}: {error}") from None
    if "error" in reply:
        raise ActorCallFailed(f"{what}: {reply['error']}", reply["kind"])
    return reply


async def retire_at(client: Client, address: str, origin: Origin, version: int) -> None:
    """Have a worker remove its host's copies. Raises OSError or TimeoutError."""
    async with asyncio.timeout(RETIRE_S):
        await client.rpc(address).pearl_snapshot_retire(origin=origin.to_wire(), version=version)
