"""How soon does the driver know who joined, has notice or left, and what does an event cost the scheduler? One table.

    python -m bench.membership [--json] [--workers 16] [--rounds 2]

Real worker processes on this machine; the scheduler is in the driver's process, as in a run. Each round starts all
workers, sends each a SIGTERM (a notice), then ends half of them by a second SIGTERM (closed) and half by SIGKILL
(lost), one by one. Times run from the signal (of `joined`: from when the scheduler had the worker) to the driver's
callback; `lost, known` is the part from when the scheduler knew. The plugin's own time is that of its methods, the
sending of the event included. The exit code is 1 if a median is above 50 ms. Writes `bench/results/membership.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from pearl.cluster.local import LocalCluster
from pearl.cluster.membership import MemberEvent
from pearl.cluster.plugin import ElasticityPlugin
from pearl.config.cluster import NoticesConfig

RESULT = Path(__file__).parent / "results" / "membership.json"
REPOSITORY = Path(__file__).parent.parent
LIMIT_MS = 50.0
START_S = 300.0
STARTING = 2
"""Processes that start at once: a core each."""
GRACE_S = 3600.0


class Timed:
    """Seconds that each of the plugin's methods took."""

    def __init__(self, plugin: ElasticityPlugin) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for name in ("add_worker", "remove_worker", "notice"):
            setattr(plugin, name, self._timed(name, getattr(plugin, name)))
        plugin.scheduler.handlers["pearl_notice"] = plugin.notice

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[name].append(time.perf_counter() - began)

        return timed


async def measure(workers: int, rounds: int) -> dict[str, Any]:
    events: asyncio.Queue[tuple[float, MemberEvent]] = asyncio.Queue()
    delays: dict[str, list[float]] = defaultdict(list)

    async def expect(kind: str, slot: str, since: float) -> None:
        now, event = await asyncio.wait_for(events.get(), START_S)
        assert (event.kind, event.identity.slot) == (kind, slot), event
        delays[event.reason or kind].append(now - since)
        if event.reason == "lost":
            delays["lost, known"].append(now - event.time)

    with tempfile.TemporaryDirectory() as folder:
        notices = NoticesConfig(sigterm_grace_s=GRACE_S)
        cluster = LocalCluster(Path(folder), lambda *_: None, notices=notices)
        cluster.watch(lambda event: events.put_nowait((time.time(), event)))
        async with cluster:
            timed = Timed(cluster.scheduler.plugins[ElasticityPlugin.name])
            gate = asyncio.Semaphore(STARTING)

            async def start(slot: str, life: int) -> None:
                async with gate:
                    await cluster.start_worker(slot, life, "preemptible", {}, START_S)

            for life in range(1, rounds + 1):
                slots = [f"preemptible-{i}" for i in range(workers)]
                await asyncio.gather(*(start(slot, life) for slot in slots))
                for _ in slots:
                    now, event = await asyncio.wait_for(events.get(), START_S)
                    assert event.kind == "joined", event
                    delays["joined"].append(now - event.time)
                pids = {slot: cluster.workers[slot].process.pid for slot in slots}
                for slot in slots:
                    began = time.time()
                    os.kill(pids[slot], signal.SIGTERM)
                    await expect("notice", slot, began)
                for i, slot in enumerate(slots):
                    began = time.time()
                    os.kill(pids[slot], signal.SIGKILL if i % 2 else signal.SIGTERM)
                    await expect("left", slot, began)
    return {
        "workers": workers,
        "rounds": rounds,
        "driver_ms": {kind: summary([1e3 * s for s in found]) for kind, found in delays.items()},
        "plugin_us": {name: summary([1e6 * s for s in found]) for name, found in timed.seconds.items()},
    }


def summary(values: list[float]) -> dict[str, float]:
    return {
        "samples": len(values),
        "median": round(statistics.median(values), 2),
        "p90": round(statistics.quantiles(values, n=10, method="inclusive")[-1], 2),
        "most": round(max(values), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    source = provenance("bench.membership", "distributed")
    result = {**asyncio.run(measure(arguments.workers, arguments.rounds)), **source}
    RESULT.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{arguments.workers} workers           samples   median      p90     most")
        for title, unit in (("driver_ms", "ms"), ("plugin_us", "µs")):
            for name, row in result[title].items():
                print(f"{name:16} {unit}  {row['samples']:10} {row['median']:8} {row['p90']:8} {row['most']:8}")
    return int(any(row["median"] > LIMIT_MS for row in result["driver_ms"].values()))


if __name__ == "__main__":
    sys.exit(main())
