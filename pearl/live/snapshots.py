"""The weights of a run on every host that has rollout workers: where they lie, brought there once, and retired.

The trainer writes them on the driver's host; workers there read the originals. To another host they come over the
network, once for all its slots, from hosts that have them (`pearl/weights/fanout.py` says which).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pearl.cluster.cluster import Cluster
from pearl.cluster.errors import ActorCallFailed
from pearl.cluster.identity import own_host
from pearl.cluster.membership import MemberEvent
from pearl.cluster.snapshots import Source, fetch_at, retire_at
from pearl.core.events import Event
from pearl.core.layout import Zone
from pearl.live.measured import WeightsCopied
from pearl.live.waits import WaitTable
from pearl.weights.copies import NoRoom, Origin
from pearl.weights.fanout import FanOut
from pearl.weights.snapshot import snapshot_directory

SLOTS = 2
"""Of a host, that a fetch can turn to: one of them may die meanwhile."""
RETRY_S = 1.0
"""After all sources failed, before those of then are asked."""


class HostSnapshots:
    def __init__(self, cluster: Cluster, waits: WaitTable, root: Path, post: Callable[[Event], None]) -> None:
        """`root`: where the trainer writes."""
        self.cluster, self.waits, self.root, self.post = cluster, waits, root, post
        self.origin = Origin(own_host(), str(root))
        self.fan = FanOut(self.origin.host)

    async def at(self, slot: str, version: int, peers: Iterable[str], timeout_s: float) -> Path:
        """Directory of `version` on the slot's host, which fetches it if need be. `peers`: slots that hold it.

        Raises ActorError.
        """
        here = self.cluster.membership.present.get(slot)
        if here is None or here.identity.host == self.origin.host:
            return snapshot_directory(self.root, version)
        host = here.identity.host
        holders = [member.identity.host for peer in peers if (member := self.cluster.membership.present.get(peer))]
        with self.waits.open("driver", f"{slot} to fetch the weights of version {version}", timeout_s):
            reply = await self._fetch(slot, here, version, holders, time.monotonic() + timeout_s)
        self.fan.copied(version, host)
        if reply["fetched"]:
            self.post(WeightsCopied(version, host, slot, reply["fetched"], reply["seconds"], reply["left"]))
        return Path(reply["directory"])

    async def _fetch(
        self, slot: str, here: MemberEvent, version: int, holders: list[str], until: float
    ) -> dict[str, Any]:
        host, target = here.identity.host, Source(slot, here.address)
        while True:
            sources = [s for h in self.fan.sources(version, host, holders) for s in self._slots_of(h)]
            left = until - time.monotonic()
            try:
                return await fetch_at(
                    self.cluster.client, self.cluster.lost, target, self.origin, version, sources, left
                )
            except ActorCallFailed as error:
                if error.kind == NoRoom.__name__ or until - time.monotonic() < RETRY_S:
                    raise
            await asyncio.sleep(RETRY_S)

    def _slots_of(self, host: str) -> list[Source]:
        """Those that can hand on what their host has: rollout workers first, whose processes have little to do."""
        members = [m for m in self.cluster.membership.present.values() if m.identity.host == host]
        members.sort(key=lambda m: (m.identity.zone not in tuple(Zone), m.identity.slot))
        return [Source(member.identity.slot, member.address) for member in members[:SLOTS]]

    async def retire(self, version: int) -> None:
        """Remove `version` and older ones from other hosts. One that does not answer does so when it is asked next."""
        hosts = self.fan.hosts
        self.fan.retire(version)
        await asyncio.gather(*(self._retire(host, version) for host in hosts))

    async def close(self) -> None:
        """Remove all copies: the workers, which would do it, are killed next."""
        if (newest := self.fan.newest) is not None:
            await self.retire(newest)

    async def _retire(self, host: str, version: int) -> None:
        for source in self._slots_of(host)[:1]:
            with contextlib.suppress(OSError, TimeoutError):
                await retire_at(self.cluster.client, source.address, self.origin, version)
