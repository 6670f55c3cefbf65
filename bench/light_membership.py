"""Membership with many workers that are there but run nothing: delays at the driver and costs, by their number.

The scheduler has a process of its own, as that of a big standing cluster has: so its processor time and the driver's
can be told apart (`cluster.kind: local` has both in one). The driver is a real one: `ExistingCluster` with its
`Membership`, and the adapter that takes the free slots; times run to the callback behind all of them. No TLS.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgpack
import psutil

from bench.light_workers import LightCluster
from bench.plugin_times import METHODS
from pearl.cluster.adapter import SlotShape
from pearl.cluster.existing import ExistingAdapter, ExistingCluster
from pearl.cluster.local import HOST
from pearl.cluster.membership import MemberEvent
from pearl.core.layout import Zone

CYCLES = 32
"""Times that one slot has notice, leaves and comes back, one slot after the other."""
PAUSE_S = 0.3
"""Between two of these events: the scheduler and the other workers are done with the one before."""
BURST = 10
"""One of so many workers is in a burst."""
IDLE_S = 24.0
"""Four heartbeats of each of 1,000 workers."""
ASKED = 10
"""Times that the list of members is asked for."""
WAIT_S = 120.0


class Observer:
    """What the driver heard, and when."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[float, MemberEvent]] = asyncio.Queue()
        self.known: dict[str, list[float]] = defaultdict(list)
        """Seconds from when the scheduler knew."""

    def on_event(self, event: MemberEvent) -> None:
        self.heard.put_nowait((time.time(), event))

    async def hear(self, kind: str, n: int = 1) -> float:
        """The next `n` of that kind, and what comes between: when the last of them was heard."""
        now = 0.0
        while n:
            now, event = await asyncio.wait_for(self.heard.get(), WAIT_S)
            heard = event.reason or event.kind
            self.known[heard].append(now - event.time)
            n -= heard == kind
        return now


class Processors:
    """Processor time of each kind of process since it was made."""

    def __init__(self, light: LightCluster) -> None:
        pids = {"driver": [os.getpid()], "scheduler": [light.scheduler.pid], "workers": [h.pid for h in light.hosts]}
        self._processes = {name: [psutil.Process(pid) for pid in found] for name, found in pids.items()}
        self._began, self._before = time.monotonic(), self._seconds()

    def _seconds(self) -> dict[str, float]:
        return {name: sum(sum(p.cpu_times()[:2]) for p in found) for name, found in self._processes.items()}

    def used_s(self) -> dict[str, float]:
        return {name: round(now - self._before[name], 2) for name, now in self._seconds().items()}

    def percent(self) -> dict[str, float]:
        """Of a core."""
        wall_s = time.monotonic() - self._began
        return {name: round(100 * seconds / wall_s, 1) for name, seconds in self.used_s().items()}


class Study:
    """All that is measured with one number of workers."""

    def __init__(self, light: LightCluster, driver: ExistingCluster, workers: int) -> None:
        self.light, self.workers = light, workers
        self.slots = [f"light-{i}" for i in range(workers)]
        self.burst_slots = self.slots[:: min(BURST, workers)]
        self.ask: Any = driver.client.scheduler
        self.observer = Observer()
        driver.watch(self.observer.on_event)

    async def play(self) -> dict[str, Any]:
        result: dict[str, Any] = {"workers": self.workers, "join_s": await self.last("start", self.slots, "joined")}
        result["idle_percent"] = await self.idle()
        await self.ask.bench_times()
        result["members"] = await self.members()
        result["members"]["plugin_us"] = summary((await self.ask.bench_times())["members"], 1e6)
        self.observer.known.clear()
        result["one_by_one_ms"] = await self.one_by_one()
        times = await self.ask.bench_times()
        result["plugin_us"] = {name: summary(times[name], 1e6) for name in METHODS if name != "members"}
        result["burst"] = await self.burst()
        began = self.light.vanish()
        result["all_lost_s"] = round(await self.observer.hear("lost", self.workers) - began, 2)
        return result

    async def last(self, what: str, slots: list[str], kind: str) -> float:
        """Seconds from the first cause to the last event."""
        began, heard = await asyncio.gather(self.light.order(what, slots), self.observer.hear(kind, len(slots)))
        return round(heard - began, 4)

    async def idle(self) -> dict[str, float]:
        processors = Processors(self.light)
        await asyncio.sleep(IDLE_S)
        return processors.percent()

    async def members(self) -> dict[str, Any]:
        """All of them, as a driver asks that comes back to a scheduler it does not know."""
        seconds = []
        for _ in range(ASKED):
            began = time.perf_counter()
            reply = await self.ask.pearl_members()
            seconds.append(time.perf_counter() - began)
        assert len(reply["events"]) == self.workers
        return {"kB": round(len(msgpack.packb(reply)) / 1e3, 1), "ms": summary(seconds, 1e3)}

    async def one_by_one(self) -> dict[str, Any]:
        delays: dict[str, list[float]] = defaultdict(list)
        for i in range(CYCLES):
            slot = self.slots[i % self.workers]
            what, how = ("abort", "lost") if i % 2 else ("close", "closed")
            for order, kind in (("notice", "notice"), (what, how), ("start", "joined")):
                delays[kind].append(await self.last(order, [slot], kind))
                await asyncio.sleep(PAUSE_S)
        del delays["joined"]  # the start of a worker is not the scheduler's matter
        found = delays | {f"{kind}, known": seconds for kind, seconds in self.observer.known.items()}
        return {kind: summary(seconds, 1e3) for kind, seconds in found.items()}

    async def burst(self) -> dict[str, Any]:
        """One tenth of them at once: when the driver has the last event."""
        found: dict[str, Any] = {"slots": len(self.burst_slots)}
        for name, what, kind in (("notice and closed", "leave", "closed"), ("lost", "abort", "lost")):
            self.observer.known.clear()
            processors = Processors(self.light)
            last_s = await self.last(what, self.burst_slots, kind)
            known_ms = {kind: summary(seconds, 1e3) for kind, seconds in self.observer.known.items()}
            found[name] = {"last_ms": round(1e3 * last_s, 1), "known_ms": known_ms, "cpu_s": processors.used_s()}
            await self.last("start", self.burst_slots, "joined")
            await asyncio.sleep(PAUSE_S)
        return found


async def measure(workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with LightCluster() as light:
            driver = ExistingCluster(light.address, Path(folder), lambda *_: None, host=HOST, tls=None)
            async with driver:
                adapter = ExistingAdapter(driver, lambda event: None)
                await adapter.connect()
                await adapter.request(Zone.PREEMPTIBLE, workers, SlotShape(0))
                result = await Study(light, driver, workers).play()
                assert not adapter.observed()
    return result


def summary(seconds: list[float], unit: float) -> dict[str, float]:
    """In `1 / unit` s."""
    values = [unit * s for s in seconds]
    p90 = statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {
        "samples": len(values),
        "median": round(statistics.median(values), 2),
        "p90": round(p90, 2),
        "most": round(max(values), 2),
    }
