"""One Dask cluster as the driver sees it: a scheduler, who is there, and the actors on them.

Where the scheduler runs is the subclass's matter (`local`: in this process; `existing`: somewhere), how a worker comes
to life a launcher's. What a worker *is* does not depend on either: one life of one slot, which joins, may get notice,
and leaves; whose actor is called with a deadline; and which is never revived, only followed by a later life.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client, Future
from distributed.client import FutureCancelledError

from pearl.cluster.actor_ref import ActorRef, LostWorkers
from pearl.cluster.certificates import Certificates
from pearl.cluster.endpoint import Endpoint
from pearl.cluster.errors import ActorLost, ActorTimeout
from pearl.cluster.identity import Identity, version_differences
from pearl.cluster.launcher import Launcher, WorkerOrder, WorkerProcess
from pearl.cluster.membership import MemberEvent, Membership
from pearl.cluster.plugin import ElasticityPlugin
from pearl.cluster.settings import configure_dask
from pearl.config.cluster import ClusterConfig, NoticesConfig
from pearl.errors import RunFailed, UserError

REAP_S = 0.5
"""A connection breaks some milliseconds before the process that held it can be reaped."""
CLOSE_S = 20.0
"""Client and scheduler take leave of each other."""


@dataclass
class Life:
    """One life of one slot that was started (or has come by itself)."""

    slot: str
    incarnation: int
    process: Any  # a WorkerProcess; that of this machine is known as such
    joined: asyncio.Future[str]
    address: str | None = None
    actors: dict[str, Future] = field(default_factory=dict)


class Cluster(ABC):
    """Async context: a scheduler, a client, and the workers that were started through it."""

    def __init__(
        self,
        on_left: Callable[[str, int, str], None],
        launcher: Launcher,
        *,
        tls: Certificates | None = None,
        silent_loss_s: float = ClusterConfig().silent_loss_s,
        notices: NoticesConfig = NoticesConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`on_left(slot, life, reason)` is told of every loss; `launcher` starts the workers of all zones that have no
        other one in `launchers`; `silent_loss_s` and `notices` as in the configuration.
        """
        self.id = secrets.token_hex(8)
        """Tag of all that is started for this cluster."""
        self.tls = tls
        self.silent_loss_s, self.notices = silent_loss_s, notices
        self.on_left = on_left
        self.launchers: dict[str, Launcher] = {}
        """By zone."""
        self.launcher = launcher
        self.lost = LostWorkers()
        self.workers: dict[str, Life] = {}
        self.on_scheduler_lost: Callable[[str], None] = lambda reason: None
        self.on_refused: Callable[[Identity, str], None] = lambda identity, reason: None
        """Of a worker that wanted to join under the name of a living one."""
        self._watchers: list[Callable[[MemberEvent], None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._stack = contextlib.AsyncExitStack()

    @abstractmethod
    async def _scheduler(self) -> str:
        """Open the scheduler within `_stack`: its address. Raises UserError if it cannot be reached."""

    async def _claim(self) -> None:
        """Make sure that no other driver uses the scheduler. Raises UserError."""
        reply = await self.client.scheduler.pearl_claim(client=self.client.id)
        if reply["status"] != "OK":
            said = f"the scheduler at {self.contact} is not free: {reply['message']}"
            raise UserError(said, "A cluster serves one run at a time.")
        if differences := version_differences(reply["versions"]):
            what = f"the scheduler at {self.contact} runs other code: {'; '.join(differences)}"
            raise UserError(what.replace("worker has", "it has"), "Start it anew from the same code.")

    @property
    def connected(self) -> bool:
        """False once the connection to the scheduler broke and could not be made again."""
        return bool(self.client.status in ("running", "connecting"))

    def watch(self, on_event: Callable[[MemberEvent], None]) -> None:
        """Call `on_event` at every membership event from now on."""
        if on_event not in self._watchers:
            self._watchers.append(on_event)

    async def __aenter__(self) -> Any:
        configure_dask()
        try:
            await self.launcher.check()
            self.contact = await self._scheduler()
            """Where workers find the scheduler."""
            security = self.tls.security() if self.tls else None
            self.client = await self._stack.enter_async_context(
                Client(self.contact, asynchronous=True, direct_to_workers=True, set_as_default=False, security=security)
            )
            await self.client.register_plugin(ElasticityPlugin(self.silent_loss_s))
            await self._claim()
            self.membership = Membership(
                self.client,
                self._member,
                on_lost=lambda why: self.on_scheduler_lost(why),
                on_refused=lambda identity, why: self.on_refused(identity, why),
            )
            """Who is there, by slot."""
            self._stack.push_async_callback(self.membership.close)
            await self.membership.start()
        except BaseException:  # nobody will call __aexit__
            await self._close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for worker in list(self.workers.values()):
            with contextlib.suppress(ActorTimeout):
                await self._kill(worker)
        await self._close()

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stack.aclose(), CLOSE_S)

    def _member(self, event: MemberEvent) -> None:
        identity = event.identity
        worker = self.workers.get(identity.slot)
        current = worker is not None and worker.incarnation == identity.incarnation
        if event.kind == "joined" and worker is not None and current and not worker.joined.done():
            if differences := version_differences(identity.versions):
                worker.joined.set_exception(RunFailed(f"{worker.slot} runs other code: {'; '.join(differences)}"))
                return
            worker.address = event.address
            worker.joined.set_result(event.address)
        elif event.kind == "left":
            self.lost.mark(event.address, f"{event.reason}: {event.detail}")
            if worker is not None and current:
                self._end(worker)  # a stopped or cut-off process must not come back
                telling = asyncio.ensure_future(self._tell(worker, event.detail))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)
                event = replace(event, detail=f"{event.detail}; {worker.process.how('gone')}")
        for watcher in self._watchers:
            watcher(event)

    async def _tell(self, worker: Life, detail: str) -> None:
        """That it left, and how its process ended: a connection breaks some milliseconds before that is known."""
        cause = await self.cause_of_death(worker.slot, worker.incarnation)
        self.on_left(worker.slot, worker.incarnation, f"{detail}; {cause or worker.process.how('gone')}")

    async def start_worker(
        self,
        slot: str,
        incarnation: int,
        zone: str,
        environment: Mapping[str, str],
        timeout_s: float,
        notices: NoticesConfig | None = None,
        *,
        gpus: int = 0,
        threads: int = 1,
        option: str = "",
    ) -> Life:
        """Start that life of the slot, where the launcher of its zone starts workers, and wait until it has joined.

        Raises LaunchFailed, ActorLost or ActorTimeout, with its last words.
        """
        await self.kill(slot)
        launcher = self.launchers.get(zone, self.launcher)
        order = WorkerOrder(
            self.id, slot, incarnation, zone, self.contact, gpus, threads, dict(environment), notices or self.notices,
            self.tls, option,
        )  # fmt: skip
        process = await launcher.start(order)
        worker = Life(slot, incarnation, process, asyncio.get_running_loop().create_future())
        self.workers[slot] = worker
        exit_watch = asyncio.ensure_future(process.wait())
        try:
            either: set[asyncio.Future[Any]] = {worker.joined, exit_watch}
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if worker.joined in done:
                worker.joined.result()
                return worker
            await self._kill(worker)
            if exit_watch in done:
                raise process.failed() or ActorLost(f"{slot} ended while it started: {process.how('exit')}")
            raise ActorTimeout(f"{slot} did not join within {timeout_s:g} s (deadlines.worker_start_s)")
        finally:
            exit_watch.cancel()

    async def create_actor(self, worker: Life, cls: type, timeout_s: float) -> ActorRef:
        """An instance of `cls()` on that very worker."""
        key = f"{worker.slot}#{worker.incarnation}-{cls.__name__}"
        future = self.client.submit(
            Endpoint, cls, actor=True, workers=[worker.address], allow_other_workers=False, key=key, pure=False
        )
        worker.actors[key] = future  # a released future destroys the actor
        try:
            await asyncio.wait_for(future.result(), timeout_s)
        except TimeoutError:
            raise ActorTimeout(f"{key} was not created within {timeout_s:g} s") from None
        except FutureCancelledError:  # its process was ended meanwhile
            raise ActorLost(f"{key} was not created: its process was ended") from None
        assert worker.address is not None
        return ActorRef(self.client, self.lost, cls, f"{worker.slot}#{worker.incarnation}", key, worker.address)

    async def cause_of_death(self, slot: str, incarnation: int) -> str | None:
        """How the slot's process ended, if it did by itself; None if it lives (asked after a broken connection)."""
        worker = self.workers.get(slot)
        if worker is None or worker.incarnation != incarnation:
            return None
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(worker.process.wait())), REAP_S)
        except TimeoutError:
            return None
        return str(worker.process.how("gone"))

    def terminate(self, slot: str) -> None:
        """SIGTERM to the slot's worker on this machine, which takes it as a notice; nothing if there is none."""
        if worker := self.workers.get(slot):
            worker.process.terminate()

    async def leaving(self, slot: str, reason: str, detail: str) -> None:
        """Tell the scheduler, if it is there, why the slot's worker is about to go."""
        scheduler = self.client.scheduler  # none once the client is closed
        if scheduler is not None and (worker := self.workers.get(slot)) and worker.address:
            with contextlib.suppress(OSError):
                await scheduler.pearl_leaving(address=worker.address, reason=reason, detail=detail)

    async def kill(self, slot: str, incarnation: int | None = None) -> None:
        """End the slot's process and all that it started, now; nothing if there is none (or only a later life).

        Returns when they are gone, so that their GPUs and memory are free. Raises ActorTimeout if something is still
        there in the end.
        """
        worker = self.workers.get(slot)
        if worker is not None and incarnation in (None, worker.incarnation):
            await self._kill(worker)

    async def _kill(self, worker: Life) -> None:
        if self.workers.get(worker.slot) is worker:
            del self.workers[worker.slot]
        self._end(worker)
        process: WorkerProcess = worker.process
        try:
            await process.ended()
        except ActorTimeout:
            self.workers.setdefault(worker.slot, worker)  # its devices are taken: no other life may start there
            raise
        finally:
            for future in worker.actors.values():
                future.release()
            if worker.address:
                self.lost.mark(worker.address, "ended by the driver")

    def _end(self, worker: Life) -> None:
        worker.process.end()
