"""Membership: the Dask scheduler tells who joined and who left. It decides nothing."""

from __future__ import annotations

import time
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

TOPIC = "pearl-membership"


class ElasticityPlugin(SchedulerPlugin):
    """Turns add_worker / remove_worker into events of one topic: plain dicts, microseconds each."""

    name = "pearl-elasticity"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self.identities: dict[str, dict[str, Any]] = {}
        for address in scheduler.workers:
            self.add_worker(scheduler, address)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        identity = scheduler.workers[worker].extra.get("pearl", {})
        self.identities[worker] = identity
        scheduler.log_event(TOPIC, {"kind": "joined", "address": worker, "identity": identity, "time": time.time()})

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> None:
        closed = stimulus_id.startswith(("worker-close", "retire-workers", "close-worker"))
        event = {
            "kind": "left",
            "address": worker,
            "identity": self.identities.pop(worker, {}),
            "reason": "closed" if closed else "lost",
            "time": time.time(),
        }
        scheduler.log_event(TOPIC, event)
