"""Light workers: Dask workers with PEARL's identity, hundreds to a process, and a scheduler in a process of its own.

To the scheduler, its plugin and the driver they are free slots like any other: they join with an identity, send
heartbeats over a connection each, report notices from a thread, say goodbye, or have their connection aborted. They
run nothing. `python -m bench.light_workers scheduler|host` are the processes' own entry; `LightCluster` is for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from typing import Any

import dask
from distributed import Worker

from bench.plugin_times import PluginTimes
from pearl.cluster.identity import own_identity
from pearl.cluster.local import HOST, open_scheduler
from pearl.cluster.notices import Notice, Reporter
from pearl.cluster.plugin import IDENTITY, LOST, RENEW, ElasticityPlugin
from pearl.cluster.settings import configure_dask

HOSTS = 4
STARTING = 4
"""Workers of one host process that start at once."""
NOTICE_S = 120.0
OF_A_PROCESS = {"distributed.admin.tick.interval": "1 h", "distributed.admin.system-monitor.interval": "1 h"}
"""Dask's watch over its process, 50 times a second and worker: too much for 250 workers of one process."""
TIMES = "bench_times"
"""Handler: seconds by the plugin's methods since it was asked before."""


class LightCluster:
    """Async context: the scheduler's process and those of the hosts. A slot's lives are all on one host."""

    def __init__(self) -> None:
        self.lives: dict[str, int] = {}
        """The newest of each slot."""

    async def __aenter__(self) -> LightCluster:
        self.scheduler = await self._process("scheduler")
        assert self.scheduler.stdout is not None
        self.address = (await self.scheduler.stdout.readline()).decode().strip()
        self.hosts = [await self._process("host", self.address) for _ in range(HOSTS)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in (*self.hosts, self.scheduler):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _process(self, *arguments: str) -> Process:
        module = (sys.executable, "-m", "bench.light_workers", *arguments)
        return await asyncio.create_subprocess_exec(*module, stdin=PIPE, stdout=PIPE)

    async def order(self, what: str, slots: list[str]) -> float:
        """`start` (as the next life), `notice`, `close`, `leave` (a notice and a goodbye) or `abort` them, all at once.

        Returns when it is done: the time at which the first of them began.
        """
        shares: list[list[tuple[str, int]]] = [[] for _ in self.hosts]
        for slot in slots:
            if what == "start":
                self.lives[slot] = self.lives.get(slot, 0) + 1
            shares[int(slot.rpartition("-")[2]) % HOSTS].append((slot, self.lives[slot]))
        return min(await asyncio.gather(*(self._order(i, what, share) for i, share in enumerate(shares) if share)))

    async def _order(self, host: int, what: str, lives: list[tuple[str, int]]) -> float:
        process = self.hosts[host]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([what, lives]).encode() + b"\n")
        if not (reply := await process.stdout.readline()):
            raise RuntimeError(f"host {host} ended")
        return float(reply)

    def vanish(self) -> float:
        """All hosts are killed: the time."""
        began = time.time()
        for process in self.hosts:
            process.kill()
        return began


class Host:
    """One process of light workers."""

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self.workers: dict[str, Worker] = {}
        self._starting = asyncio.Semaphore(STARTING)

    async def start(self, slot: str, life: int) -> None:
        identity = own_identity(slot, life, "preemptible", free=True).to_wire()

        async def who(worker: Worker) -> dict[str, Any]:
            return identity

        async with self._starting:
            worker = Worker(
                self.scheduler,
                name=f"{slot}#{life}",
                nthreads=1,
                memory_limit=0,
                host=HOST,
                dashboard_address=f"{HOST}:0",
                dashboard=False,
                startup_information={IDENTITY: who},
            )
            worker.stream_handlers[RENEW] = worker.stream_handlers[LOST] = lambda **_: None
            self.workers[slot] = await worker

    async def notice(self, slot: str, life: int) -> None:
        await asyncio.to_thread(Reporter(self.scheduler, slot, life).report, Notice(NOTICE_S, "bench"))

    async def close(self, slot: str, life: int) -> None:
        worker = self.workers.pop(slot)
        await worker.scheduler.pearl_leaving(address=worker.address, reason="closed", detail="bench")
        await worker.close()

    async def leave(self, slot: str, life: int) -> None:
        await self.notice(slot, life)
        await self.close(slot, life)

    async def abort(self, slot: str, life: int) -> None:
        worker = self.workers.pop(slot)
        worker.batched_stream.comm.abort()
        await worker.finished()


async def host(scheduler: str) -> None:
    """Carry out orders from standard input until it ends."""
    here = Host(scheduler)
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with tempfile.TemporaryDirectory() as folder, dask.config.set({"temporary-directory": folder} | OF_A_PROCESS):
        while line := await orders.readline():
            what, lives = json.loads(line)
            began = time.time()
            await asyncio.gather(*(getattr(here, what)(slot, life) for slot, life in lives))
            print(began, flush=True)


async def scheduler() -> None:
    """Until standard input ends."""
    async with open_scheduler(HOST, 0, None) as opened:
        plugin = ElasticityPlugin()
        await opened.register_scheduler_plugin(plugin, idempotent=True)
        times = PluginTimes(plugin)

        def since_then() -> dict[str, list[float]]:
            found = dict(times.seconds)
            times.seconds.clear()
            return found

        opened.handlers[TIMES] = since_then
        print(opened.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    configure_dask()
    asyncio.run(scheduler() if sys.argv[1] == "scheduler" else host(sys.argv[2]))
    os._exit(0)
