"""How soon does the driver know who joined, has notice or left, and what does an event cost the scheduler?

    python -m bench.membership [--part processes|light] [--json] [--workers 16] [--rounds 2] [--light 10 50 200 1000]

`processes`: real worker processes on this machine; the scheduler is in the driver's process, as in a run. Each round
starts all workers, sends each a SIGTERM (a notice), then ends half of them by a second SIGTERM (closed) and half by
SIGKILL (lost), one by one. Times run from the signal (of `joined`: from when the scheduler had the worker) to the
driver's callback; `..., known` is the part from when the scheduler knew. The plugin's own time is that of its methods,
the sending of the event included. `light`: many workers that run nothing (`bench.light_membership`), by their number.

The exit code is 1 if the median of an event that came alone is above 50 ms. Each part is a key of
`bench/results/membership.json`; one that was not asked for stays as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.light_membership import measure as measure_light
from bench.light_membership import summary
from bench.plugin_times import PluginTimes
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
            timed = PluginTimes(cluster.scheduler.plugins[ElasticityPlugin.name])
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
        "driver_ms": {kind: summary(found, 1e3) for kind, found in delays.items()},
        "plugin_us": {name: summary(found, 1e6) for name, found in timed.seconds.items()},
    }


async def measure_sizes(sizes: list[int]) -> dict[str, Any]:
    """By the number of workers; the slope of the plugin's medians is in ns for each worker more."""
    found = [await measure_light(workers) for workers in sizes]
    slopes = {
        name: round(1e3 * statistics.linear_regression(sizes, [f["plugin_us"][name]["median"] for f in found]).slope, 2)
        for name in found[0]["plugin_us"]
        if len(sizes) > 1
    }
    return {"sizes": found, "plugin_ns_per_worker": slopes}


def medians_ms(result: dict[str, Any]) -> list[float]:
    """Of all events that came alone."""
    tables = [result["processes"]["driver_ms"], *(size["one_by_one_ms"] for size in result["light"]["sizes"])]
    return [row["median"] for table in tables for row in table.values()]


def show(result: dict[str, Any]) -> None:
    parts = [(f"{result['processes']['workers']} processes", result["processes"], "driver_ms")]
    parts += [(f"{size['workers']} light workers", size, "one_by_one_ms") for size in result["light"]["sizes"]]
    for title, part, delays in parts:
        print(f"\n{title:20}      samples   median      p90     most")
        for key, unit in ((delays, "ms"), ("plugin_us", "µs")):
            for name, row in part[key].items():
                print(f"{name:20} {unit}  {row['samples']:8} {row['median']:8} {row['p90']:8} {row['most']:8}")
        if "burst" in part:
            print(*(f"{key}: {part[key]}" for key in ("join_s", "idle_percent", "members", "all_lost_s")), sep="\n")
            for name, burst in part["burst"].items():
                print(f"burst, {name}: {burst}")
    print(f"\nplugin, ns a worker more: {result['light']['plugin_ns_per_worker']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--part", choices=("processes", "light"), help="measure this one only")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--light", type=int, nargs="+", default=[10, 50, 200, 1000], help="numbers of light workers")
    arguments = parser.parse_args()
    source = provenance("bench.membership", "distributed")
    result = json.loads(RESULT.read_text()) if arguments.part else {}
    if arguments.part != "light":
        result["processes"] = asyncio.run(measure(arguments.workers, arguments.rounds)) | source
    if arguments.part != "processes":
        result["light"] = asyncio.run(measure_sizes(arguments.light)) | source
    RESULT.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return int(max(medians_ms(result)) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
