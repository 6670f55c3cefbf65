"""Which worker, or which prefill-decode pair, serves the next turn.

The least loaded one with room, unless the trajectory's prefix is cached elsewhere. Colocated workers and pairs stand
side by side: a turn goes to the colocated worker or the decode worker with less to do, and with the latter to the least
loaded prefill worker. Kept up to date with every request, so that a choice costs no search over the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pearl.core.layout import Role
from pearl.core.state import WorkerSlot

AFFINITY_SLACK = 2
"""A worker that holds the prefix is taken even if it has this many requests more than the least loaded one: one more
decode neighbour costs less than a prefill of the whole prefix."""
KV_CANDIDATES = 8
"""Workers that are asked for KV room, least loaded first, before a turn waits."""


class LoadIndex:
    """Names in buckets by load, the least loaded first. Every change takes constant time."""

    def __init__(self) -> None:
        self.load: dict[str, int] = {}
        self._buckets: list[dict[str, None]] = [{}]
        self._least = 0

    def put(self, name: str, load: int) -> None:
        """Add the name, or change its load."""
        self.drop(name)
        while len(self._buckets) <= load:
            self._buckets.append({})
        self.load[name] = load
        self._buckets[load][name] = None
        self._least = min(self._least, load)

    def drop(self, name: str) -> None:
        load = self.load.pop(name, None)
        if load is not None:
            del self._buckets[load][name]

    def least(self) -> str | None:
        if not self.load:
            return None
        while not self._buckets[self._least]:
            self._least += 1
        return next(iter(self._buckets[self._least]))

    def __iter__(self) -> Iterator[str]:
        """Least loaded first."""
        for bucket in self._buckets[self._least :]:
            yield from bucket

    def __len__(self) -> int:
        return len(self.load)


class Prefix(NamedTuple):
    """Where a trajectory's prefix was left: a worker and which of its caches, as counted by `WorkerSlot.cache`."""

    worker: str
    cache: int


class Choice(NamedTuple):
    worker: WorkerSlot
    prefill: WorkerSlot | None


class Router:
    """The workers that serve. `capacity`: requests in flight a worker; `kv_tokens`: context it can hold, 0: unknown."""

    def __init__(self, capacity: int, kv_tokens: int = 0) -> None:
        self.capacity = capacity
        self.kv_tokens = kv_tokens
        self.workers: dict[str, WorkerSlot] = {}
        self.pools: dict[Role, LoadIndex] = {role: LoadIndex() for role in Role}

    def join(self, worker: WorkerSlot) -> None:
        self.workers[worker.name] = worker
        self.changed(worker)

    def leave(self, worker: WorkerSlot) -> None:
        if self.workers.pop(worker.name, None):
            self.pools[worker.role].drop(worker.name)

    def changed(self, worker: WorkerSlot) -> None:
        """The worker's requests changed."""
        if worker.name in self.workers:
            load = len(worker.prefilling) if worker.role is Role.PREFILL else len(worker.in_flight)
            self.pools[worker.role].put(worker.name, load)

    def choose(self, tokens: int, decode: Prefix | None = None, prefill: Prefix | None = None) -> Choice | None:
        """For a turn on a context of `tokens`; the prefixes are those of its previous turn. None: nobody has room."""
        prefiller = self._prefiller(prefill)
        pools = [self.pools[Role.COLOCATED]]
        if prefiller is not None:
            pools.append(self.pools[Role.DECODE])
        least = [worker for pool in pools if (worker := self._least(pool, tokens)) is not None]
        if not least:
            return None
        worker = min(least, key=lambda w: len(w.in_flight))
        holder = self._holder(decode)
        if (
            holder is not None
            and (holder.role is Role.COLOCATED or (holder.role is Role.DECODE and prefiller is not None))
            and self._has_room(holder, tokens)
            and len(holder.in_flight) - len(worker.in_flight) <= AFFINITY_SLACK
        ):
            worker = holder
        return Choice(worker, prefiller if worker.role is Role.DECODE else None)

    def _holder(self, prefix: Prefix | None) -> WorkerSlot | None:
        worker = self.workers.get(prefix.worker) if prefix is not None else None
        return worker if worker is not None and prefix is not None and worker.cache == prefix.cache else None

    def _prefiller(self, prefix: Prefix | None) -> WorkerSlot | None:
        pool = self.pools[Role.PREFILL]
        name = pool.least()
        if name is None:
            return None
        holder = self._holder(prefix)
        near = holder is not None and pool.load.get(holder.name, 0) - pool.load[name] <= AFFINITY_SLACK
        return holder if near and holder is not None and holder.role is Role.PREFILL else self.workers[name]

    def _has_room(self, worker: WorkerSlot, tokens: int) -> bool:
        """An idle worker takes anything: whether it fits at all is for the engine to say."""
        if len(worker.in_flight) >= self.capacity:
            return False
        return not self.kv_tokens or not worker.in_flight or worker.kv_tokens + tokens <= self.kv_tokens

    def _least(self, pool: LoadIndex, tokens: int) -> WorkerSlot | None:
        name = pool.least()
        if name is None or pool.load[name] >= self.capacity:
            return None
        if not self.kv_tokens:
            return self.workers[name]
        candidates = (self.workers[name] for name in islice(pool, KV_CANDIDATES))
        return next((worker for worker in candidates if self._has_room(worker, tokens)), None)
