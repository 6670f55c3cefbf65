"""A local cluster whose membership events wait in a queue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.local import LocalCluster
from pearl.cluster.membership import MemberEvent
from tests.cluster.actors import Odd

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
START_S = 90.0
EVENT_S = 60.0


class Watched:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.left: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
        self.members: asyncio.Queue[MemberEvent] = asyncio.Queue()
        self.local = LocalCluster(folder, lambda *event: self.left.put_nowait(event), **options)
        self.local.watch(self.members.put_nowait)

    async def actor(self, slot: str = "w-0", incarnation: int = 1, **options: Any) -> ActorRef:
        worker = await self.local.start_worker(slot, incarnation, "reserved", ENVIRONMENT, START_S, **options)
        return await self.local.create_actor(worker, Odd, 30)

    async def event(self, kind: str) -> MemberEvent:
        """The next event, which must be of that kind."""
        event = await asyncio.wait_for(self.members.get(), EVENT_S)
        assert event.kind == kind, event
        return event
