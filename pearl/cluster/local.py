"""The local cluster: a Dask scheduler in this process and one worker process per slot, all on loopback.

`start_worker` brings a slot to life and returns where it listens; `kill` ends it with all its children. That a worker
left, for whatever reason, reaches the `on_left` callback; all membership events reach those who `watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, Future, Scheduler
from distributed.client import FutureCancelledError

from pearl.cluster.actor_ref import ActorRef, LostWorkers
from pearl.cluster.endpoint import Endpoint
from pearl.cluster.errors import ActorLost, ActorTimeout
from pearl.cluster.identity import version_differences
from pearl.cluster.membership import MemberEvent, Membership
from pearl.cluster.plugin import ElasticityPlugin
from pearl.cluster.settings import configure_dask
from pearl.config.cluster import ClusterConfig, NoticesConfig
from pearl.errors import RunFailed

HOST = "127.0.0.1"
LOG_TAIL_LINES = 8
REAP_S = 0.5
"""A connection breaks some milliseconds before the process that held it can be reaped."""
KILL_S = 15.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a GPU that fell off the bus)."""
HEIR_S = 3.0
"""What a worker had started ends by itself within this time (`pearl.lifeline`), unless it hangs."""
CLOSE_S = 20.0
"""Client and scheduler, in this process, take leave of each other."""


@dataclass
class WorkerProcess:
    """One life of one slot."""

    slot: str
    incarnation: int
    process: asyncio.subprocess.Process
    log: Path
    joined: asyncio.Future[str]
    address: str | None = None
    actors: dict[str, Future] = field(default_factory=dict)
    heirs: list[psutil.Process] = field(default_factory=list)
    """What it had started when it was killed."""


class LocalCluster:
    """Async context: a scheduler, a client, and the workers that were started through it."""

    def __init__(
        self,
        log_directory: Path,
        on_left: Callable[[str, int, str], None],
        port: int = 0,
        *,
        silent_loss_s: float = ClusterConfig().silent_loss_s,
        notices: NoticesConfig = NoticesConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`port` is the scheduler's, 0 a free one; `silent_loss_s` and `notices` as in the configuration."""
        self.log_directory = log_directory
        self.port = port
        self.silent_loss_s, self.notices = silent_loss_s, notices
        self.on_left = on_left
        self.lost = LostWorkers()
        self.workers: dict[str, WorkerProcess] = {}
        self._watchers: list[Callable[[MemberEvent], None]] = []
        self._stack = contextlib.AsyncExitStack()

    def watch(self, on_event: Callable[[MemberEvent], None]) -> None:
        """Call `on_event` at every membership event from now on."""
        if on_event not in self._watchers:
            self._watchers.append(on_event)

    async def __aenter__(self) -> LocalCluster:
        configure_dask()
        self.log_directory.mkdir(parents=True, exist_ok=True)
        try:
            self.scheduler = await self._stack.enter_async_context(
                Scheduler(host=HOST, port=self.port, dashboard_address=f"{HOST}:0", dashboard=False)
            )
            self.client = await self._stack.enter_async_context(
                Client(self.scheduler.address, asynchronous=True, direct_to_workers=True, set_as_default=False)
            )
            await self.client.register_plugin(ElasticityPlugin(self.silent_loss_s))
            self.contact = self.scheduler.address
            """Where workers find the scheduler."""
            self.membership = Membership(self.client, self._member)
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
                event = replace(event, detail=f"{event.detail}; {self._why(worker, 'gone')}")
                self.on_left(worker.slot, worker.incarnation, event.detail)
        for watcher in self._watchers:
            watcher(event)

    async def start_worker(
        self,
        slot: str,
        incarnation: int,
        zone: str,
        environment: dict[str, str],
        timeout_s: float,
        notices: NoticesConfig | None = None,
    ) -> WorkerProcess:
        """Start the slot's process and wait until it has joined.

        Raises ActorLost or ActorTimeout with its last words.
        """
        await self.kill(slot)
        log = self.log_directory / f"{slot}.{incarnation}.log"
        command = [sys.executable, "-m", "pearl.cluster.worker", "--scheduler", self.contact]
        command += ["--notices", (notices or self.notices).model_dump_json()]
        command += ["--slot", slot, "--incarnation", str(incarnation), "--zone", zone, "--host", HOST]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,  # the lifeline: its end closes with this process
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        worker = WorkerProcess(slot, incarnation, process, log, asyncio.get_running_loop().create_future())
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
                raise ActorLost(f"{slot} ended while it started: {self._why(worker, 'exit')}")
            raise ActorTimeout(f"{slot} did not join within {timeout_s:g} s (deadlines.worker_start_s)")
        finally:
            exit_watch.cancel()

    async def create_actor(self, worker: WorkerProcess, cls: type, timeout_s: float) -> ActorRef:
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
        return self._why(worker, "gone")

    def terminate(self, slot: str) -> None:
        """SIGTERM to the slot's worker, which takes it as a notice; nothing if there is none."""
        if (worker := self.workers.get(slot)) and worker.process.returncode is None:
            worker.process.terminate()

    async def leaving(self, slot: str, reason: str, detail: str) -> None:
        """Tell the scheduler why the slot's worker is about to go."""
        if (worker := self.workers.get(slot)) and worker.address:
            await self.client.scheduler.pearl_leaving(address=worker.address, reason=reason, detail=detail)

    async def kill(self, slot: str, incarnation: int | None = None) -> None:
        """End the slot's process and all that it started, now; nothing if there is none (or only a later life).

        Returns when they are gone, so that their GPUs and memory are free. Raises ActorTimeout if the slot's process is
        still there after KILL_S.
        """
        worker = self.workers.get(slot)
        if worker is not None and incarnation in (None, worker.incarnation):
            await self._kill(worker)

    async def _kill(self, worker: WorkerProcess) -> None:
        if self.workers.get(worker.slot) is worker:
            del self.workers[worker.slot]
        self._end(worker)
        try:
            await asyncio.wait_for(worker.process.wait(), KILL_S)
        except TimeoutError:
            self.workers.setdefault(worker.slot, worker)  # its devices are taken: no other life may start there
            raise ActorTimeout(
                f"{worker.slot}: process {worker.process.pid} is still there {KILL_S:g} s after SIGKILL"
            ) from None
        else:
            if left := await asyncio.to_thread(_bury, worker.heirs):
                raise ActorTimeout(f"{worker.slot}: what it had started is still there after SIGKILL: {left}")
        finally:
            if worker.process.stdin:
                worker.process.stdin.close()
            for future in worker.actors.values():
                future.release()
            if worker.address:
                self.lost.mark(worker.address, "ended by the driver")

    def _end(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(worker.process.pid)
            if process.status() != psutil.STATUS_ZOMBIE:  # then nobody knows any more what was its
                worker.heirs += process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)

    def _why(self, worker: WorkerProcess, reason: str) -> str:
        code = worker.process.returncode
        how = reason if code is None else f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        lines = worker.log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        tail = f"; last lines of {worker.log}:\n  " + "\n  ".join(lines) if lines else ""
        return f"worker process {worker.process.pid}: {how}{tail}"


def _bury(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until they have ended by themselves; kill what hangs (a stopped engine reads no lifeline). Who survives."""
    _, hanging = psutil.wait_procs(processes, timeout=HEIR_S)
    for process in hanging:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return psutil.wait_procs(hanging, timeout=HEIR_S)[1]
