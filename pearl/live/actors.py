"""Calls of the driver to actors: each one is a registered wait with a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.environment import EnvironmentWorker
from actors.rollout import RolloutWorker
from actors.trainer import TrainerWorker
from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.binding import Binding
from pearl.cluster.cluster import REAP_S, Cluster
from pearl.cluster.errors import ActorLost, ActorTimeout
from pearl.cluster.processes import KILL_S
from pearl.core.layout import Zone
from pearl.live.waits import WaitTable

ANSWER_MARGIN_S = 10.0
"""An actor keeps its own deadline and answers in good order; the call itself is given up this much later."""
CREATE_S = 60.0
"""An actor's constructor only imports and stores."""


@dataclass(frozen=True, slots=True)
class ActorClasses:
    """What runs in the slots; benchmarks put actors that do nothing here."""

    rollout: type = RolloutWorker
    environment: type = EnvironmentWorker
    trainer: type = TrainerWorker


class Actors:
    """Worker processes and the one actor that each holds."""

    def __init__(
        self,
        cluster: Cluster,
        bindings: dict[str, Binding],
        waits: WaitTable,
        worker_start_s: float,
        classes: ActorClasses,
    ) -> None:
        self.cluster, self.bindings, self.waits, self.classes = cluster, bindings, waits, classes
        self.worker_start_s = worker_start_s

    async def start(self, slot: str, incarnation: int, cls: type, extra: dict[str, str] | None = None) -> ActorRef:
        """A fresh process for the slot (the old one is killed) with an actor of class `cls`."""
        binding = self.bindings[slot]
        environment = {**binding.environment(), **(extra or {})}
        with self._awaiting("driver", f"{slot} to join the cluster", self.worker_start_s):
            worker = await self.cluster.start_worker(
                slot, incarnation, binding.zone, environment, self.worker_start_s, option=binding.host
            )
        with self._awaiting("driver", f"the actor of {slot}", CREATE_S):
            return await self.cluster.create_actor(worker, cls, CREATE_S)

    def comes_and_goes(self, slot: str) -> bool:
        """The slot's process is not ours to start: an adapter brings it."""
        binding = self.bindings.get(slot)
        return binding is None or binding.zone == Zone.PREEMPTIBLE

    def life(self, slot: str) -> int:
        """Of the process that an adapter has brought; 0 if there is none."""
        worker = self.cluster.workers.get(slot)
        return worker.incarnation if worker is not None and worker.address else 0

    async def board(self, slot: str, life: int, cls: type) -> ActorRef:
        """An actor in the process that an adapter has brought. Raises ActorLost if that life is over."""
        worker = self.cluster.workers.get(slot)
        if worker is None or worker.incarnation != life or not worker.address:
            raise ActorLost(f"{slot}: its life {life} is over")
        with self._awaiting("driver", f"the actor of {slot}", CREATE_S):
            return await self.cluster.create_actor(worker, cls, CREATE_S)

    async def call(
        self, ref: ActorRef, method: str, *args: Any, timeout_s: float, waiter: str = "driver", margin: bool = True
    ) -> Any:
        """`ref.method(*args)`; raises ActorLost, ActorTimeout or ActorCallFailed."""
        limit = timeout_s + ANSWER_MARGIN_S if margin else timeout_s
        with self._awaiting(waiter, f"{ref.name}.{method}", limit):
            return await ref.call(method, *args, timeout_s=limit)

    async def kill(self, slot: str, incarnation: int, why: str = "") -> None:
        """End the slot's process; one that survives is named when the slot is started again.

        `why`: what the cluster is to say of its departure.
        """
        worker = self.cluster.workers.get(slot)
        with contextlib.suppress(ActorTimeout), self.waits.open("driver", f"the end of {slot}", KILL_S):
            if why and worker is not None and worker.incarnation == incarnation:
                await self.cluster.leaving(slot, "lost", why)
            await self.cluster.kill(slot, incarnation)

    async def cause_of_death(self, slot: str, incarnation: int) -> str | None:
        """See `Cluster.cause_of_death`."""
        with self.waits.open("driver", f"the cause of death of {slot}", REAP_S):
            return await self.cluster.cause_of_death(slot, incarnation)

    @contextlib.contextmanager
    def _awaiting(self, waiter: str, awaited: str, timeout_s: float) -> Iterator[None]:
        """Register the wait; if its deadline passes, the error names the waiter too."""
        with self.waits.open(waiter, awaited, timeout_s):
            try:
                yield
            except ActorTimeout as error:
                raise ActorTimeout(f"{waiter} waited in vain: {error}") from None
