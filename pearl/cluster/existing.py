"""A Dask scheduler that somebody else started, with workers that somebody else starts.

The driver's own slots (trainer ranks, environments, reserved and overlap engines) are processes of its machine, as
always. Rollout slots that are *free* (a `pearl.cluster.worker` that nobody owns) serve the driver while it is
connected. It never ends their processes: a life that it is done with begins anew as the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from distributed.core import rpc

from pearl.cluster.adapter import ObservedSlot, OnEvent, RequestFailed, SlotShape
from pearl.cluster.certificates import Certificates
from pearl.cluster.cluster import Cluster, Life
from pearl.cluster.contact import fault_of
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.identity import Identity, version_differences
from pearl.cluster.membership import MemberEvent
from pearl.cluster.observation import Observation
from pearl.cluster.processes import KILL_S, LocalLauncher
from pearl.config.cluster import ClusterConfig, NoticesConfig
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError

CONNECT_S = 10.0


class FreeProcess:
    """The process of a worker that came by itself; all that can be asked of it is to begin anew."""

    def __init__(self, cluster: ExistingCluster, slot: str, address: str) -> None:
        self.cluster, self.slot, self.address = cluster, slot, address
        self.left = asyncio.Event()
        self._asked: asyncio.Task[None] | None = None

    def end(self) -> None:
        if not self.left.is_set() and self._asked is None:
            self._asked = asyncio.ensure_future(self.cluster.renew(self.address))
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ended(self) -> None:
        try:
            await asyncio.wait_for(self.left.wait(), KILL_S)
        except TimeoutError:
            raise ActorTimeout(f"{self.slot} was to begin anew and is still there after {KILL_S:g} s") from None

    async def wait(self) -> None:
        await self.left.wait()

    def failed(self) -> None:
        """Nobody was asked for it."""

    def how(self, otherwise: str) -> str:
        return f"worker process at {self.address}: {otherwise}; its log is where it was started"


class ExistingCluster(Cluster):
    """Async context: a client of the scheduler at `address`."""

    def __init__(
        self,
        address: str,
        log_directory: Path,
        on_left: Callable[[str, int, str], None],
        *,
        host: str,
        tls: Certificates | None,
        silent_loss_s: float = ClusterConfig().silent_loss_s,
        notices: NoticesConfig = NoticesConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`host`: where this machine's workers listen."""
        launcher = LocalLauncher(log_directory, host)
        super().__init__(on_left, launcher, tls=tls, silent_loss_s=silent_loss_s, notices=notices)
        self.address = address
        self._free: dict[str, FreeProcess] = {}
        """By address."""

    async def _scheduler(self) -> str:
        await probe(self.address, self.tls)
        return self.address

    async def __aexit__(self, *error: object) -> None:
        for life in list(self.workers.values()):
            if isinstance(life.process, FreeProcess):
                del self.workers[life.slot]  # it begins anew when this client has left
        await super().__aexit__(*error)

    async def renew(self, address: str) -> None:
        """Ask a free worker to begin its next life."""
        await self.client.scheduler.pearl_renew(address=address)

    def _member(self, event: MemberEvent) -> None:
        identity = event.identity
        if event.kind == "joined" and identity.free:
            joined: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            joined.set_result(event.address)
            process = self._free[event.address] = FreeProcess(self, identity.slot, event.address)
            self.workers[identity.slot] = Life(identity.slot, identity.incarnation, process, joined, event.address)
        elif event.kind == "left" and (gone := self._free.pop(event.address, None)):
            gone.left.set()
        super()._member(event)


class ExistingAdapter:
    """A ClusterAdapter for free slots: it can only take what has joined, and says what is missing."""

    def __init__(self, cluster: ExistingCluster, on_event: OnEvent) -> None:
        self.cluster, self.on_event = cluster, on_event
        self.plan: dict[Zone, int] = {}
        self.here = Observation(on_event, lambda identity: True)
        self._shapes: dict[Zone, SlotShape] = {}
        self._waiting: dict[str, MemberEvent] = {}
        """Free slots that nobody asked for yet, by name."""
        self._released: set[tuple[str, int]] = set()
        self._missing: dict[Zone, int] = {}

    async def connect(self) -> None:
        self.cluster.watch(self._member)
        self.cluster.on_refused = self._refused
        for event in self.cluster.membership.present.values():
            self._member(event)

    async def request(self, zone: Zone, n: int, shape: SlotShape) -> None:
        self.plan[zone], self._shapes[zone] = n, shape
        self._take(zone)
        missing = n - len(self._of(zone))
        if missing > 0 and missing != self._missing.get(zone):
            reason = f"{missing} of {n} {zone} slots have not joined {self.cluster.address}; start workers there"
            self.on_event(RequestFailed(zone, missing, shape, reason, Cause.CAPACITY))
        self._missing[zone] = missing

    async def release(self, workers: Iterable[str]) -> None:
        for name in workers:
            if (here := self.here.slots.get(name)) is None or name in self.here.reasons:
                continue
            zone = here.slot.zone
            if here.seconds_left is None and self.plan[zone] >= len(self._of(zone)):
                self.plan[zone] -= 1
            self.here.reasons[name] = "given back"
            self.cluster.workers[name].process.end()

    def observed(self) -> dict[str, ObservedSlot]:
        return dict(self.here.slots)

    async def close(self) -> None:
        """They begin anew when the client leaves."""
        self.plan = dict.fromkeys(self.plan, 0)

    def _of(self, zone: Zone) -> list[str]:
        return [name for name, here in self.here.slots.items() if here.slot.zone == zone]

    def _take(self, zone: Zone) -> None:
        shape = self._shapes.get(zone)
        for name, event in list(self._waiting.items()):
            if shape is None or event.identity.zone != zone or len(self._of(zone)) >= self.plan[zone]:
                continue
            del self._waiting[name]
            if reason := _unfit(event.identity, shape):
                self.on_event(RequestFailed(zone, 1, shape, f"{name} cannot serve: {reason}", Cause.CONFIGURATION))
            else:
                self.here.apply(event)

    def _refused(self, identity: Identity, reason: str) -> None:
        """A worker that was started by hand did not get in."""
        if identity.free and identity.zone in tuple(Zone):
            zone = Zone(identity.zone)
            shape = self._shapes.get(zone) or SlotShape(len(identity.gpus))
            self.on_event(RequestFailed(zone, 1, shape, f"a worker was refused: {reason}", Cause.CONFIGURATION))

    def _member(self, event: MemberEvent) -> None:
        name = event.identity.slot
        if not event.identity.free or event.identity.zone not in tuple(Zone):
            return
        if event.kind == "joined":
            if name not in self.here.slots:
                self._waiting[name] = event
                self._take(Zone(event.identity.zone))
        elif name in self._waiting and event.kind == "left":
            del self._waiting[name]
        else:
            self.here.apply(event)


def _unfit(identity: Identity, shape: SlotShape) -> str:
    if differences := version_differences(identity.versions):
        return f"it runs other code: {'; '.join(differences)}"
    if len(identity.gpus) != shape.gpus:
        return f"it has {len(identity.gpus)} GPUs (CUDA_VISIBLE_DEVICES), an engine takes {shape.gpus}"
    return ""


async def probe(address: str, tls: Certificates | None) -> dict[str, Any]:
    """What the scheduler at `address` says of itself. Raises UserError if it does not answer."""
    arguments = tls.security().get_connection_args("client") if tls else {}
    try:
        async with asyncio.timeout(CONNECT_S):
            async with rpc(address, connection_args=arguments, timeout=CONNECT_S) as scheduler:
                identity: dict[str, Any] = await scheduler.identity()
                return identity
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        fault = await fault_of(address, error, CONNECT_S)
        raise UserError(
            f"no Dask scheduler answers at cluster.address = {address} ({fault.said})",
            "Start it, or mend the address; cluster.tls_directory must hold the certificates of its cluster.",
        ) from None
