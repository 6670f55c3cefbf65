"""What does a call to an actor cost, by PEARL's way over Dask and by Ray's? Both in turn, on one machine. One table.

    python -m venv /tmp/ray && /tmp/ray/bin/pip install ray==2.60.0 numpy
    python -m bench.actor_calls --python /tmp/ray/bin/python [--json] [--rounds 5]

Ray is not a dependency: it lives in an environment of its own, and this file runs there as a plain script. The driver
calls one actor in another process: a coroutine method, which is how a turn is dispatched, and a plain one; one call
after the other (ms of each), and 100 in flight (calls/s). `bytes, n MB` is a call with so much in it. `to host, n MB`
is the way of weights, which PEARL never sends in a call: from the host that has them to another one, here two groups of
processes that share no memory, from the driver's request to its answer (PEARL: a snapshot, checked, into shared memory;
Ray: an object of one raylet, which an actor at another one gets). Each round measures all of both, PEARL first and Ray
first in turn. `ratio` is the median over rounds of PEARL's cost by Ray's: above 1, PEARL is dearer. Writes
`bench/results/actor_calls.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "actor_calls.json"
REPOSITORY = Path(__file__).parent.parent
CALLS, IN_FLIGHT, MANY = 300, 100, 1500
WARM = 50
MEGABYTES = (1, 100, 500)
REPEATS = {1: 20, 100: 3, 500: 1}
TENSORS = 16
START_S, CALL_S = 120.0, 300.0


class Peer:
    """What is called."""

    async def turn(self, number: int) -> int:
        return number

    def plain(self, number: int) -> int:
        return number

    async def take(self, content: bytes) -> int:
        return len(content)


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, ms."""
    ordered = sorted(seconds)
    return {"ms": 1e3 * ordered[len(ordered) // 2], "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))]}


async def timed(call: Any, times: int) -> list[float]:
    seconds = []
    for number in range(times):
        began = time.perf_counter()
        await call(number)
        seconds.append(time.perf_counter() - began)
    return seconds


async def flood(call: Any) -> float:
    """Calls a second with 100 in flight."""
    began = time.perf_counter()
    waiting: set[asyncio.Future[Any]] = set()
    for number in range(MANY):
        if len(waiting) == IN_FLIGHT:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting.add(asyncio.ensure_future(call(number)))
    await asyncio.wait(waiting)
    return MANY / (time.perf_counter() - began)


async def measure(calls: dict[str, Any], take: Any, to_host: Any) -> dict[str, dict[str, float]]:
    """One round of one side. Sizes in ms a transfer."""
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        await timed(call, WARM)
        found[name] = spread(await timed(call, CALLS))
        found[f"{name}, 100 in flight"] = {"calls_per_s": await flood(call)}
    for size in MEGABYTES:
        content = os.urandom(1_000_000) * size
        found[f"bytes, {size} MB"] = spread(await timed(lambda _, c=content: take(c), REPEATS[size]))
        del content
        found[f"to host, {size} MB"] = spread([await to_host(size) for _ in range(REPEATS[size])])
    return found


class Pearl:
    """Our side: a cluster, an actor, and a snapshot of each size on the first of two hosts."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    async def start(self) -> None:
        import torch

        from pearl.weights.snapshot import write_snapshot

        path = {"PYTHONPATH": str(REPOSITORY)}
        worker = await self.cluster.start_worker("trainer-0", 1, "training", path, START_S)
        await self.cluster.start_worker("host-0", 1, "reserved", {**path, "PEARL_HOST": "host-0"}, START_S)
        self.actor = await self.cluster.create_actor(worker, Peer, START_S)
        for size in MEGABYTES:
            floats = size * 1_000_000 // TENSORS // 4
            write_snapshot(self.root(size), 1, "shape", ((f"t{i}", torch.randn(floats)) for i in range(TENSORS)))

    def root(self, megabytes: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{megabytes}")

    async def measure(self) -> dict[str, dict[str, float]]:
        def calling(method: str) -> Any:
            return lambda number: self.actor.call(method, number, timeout_s=CALL_S)

        def take(content: bytes) -> Any:
            return self.actor.call("take", content, timeout_s=CALL_S)

        return await measure({"turn": calling("turn"), "plain": calling("plain")}, take, self.to_host)

    async def to_host(self, megabytes: int) -> float:
        from bench.snapshot_fanout import fan_out

        seconds, _ = await fan_out(self.cluster, self.root(megabytes), 1)
        return seconds


def ray_side() -> None:
    """Runs in Ray's environment: one line of results for each line that comes."""
    import ray
    from ray.cluster_utils import Cluster

    memory = 1_500_000_000
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"here": 9}, "object_store_memory": memory}
    )
    cluster.add_node(num_cpus=2, resources={"there": 9}, object_store_memory=memory)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

    class Plain:
        def plain(self, number: int) -> int:
            return number

    class Turns:
        async def turn(self, number: int) -> int:
            return number

        async def take(self, content: bytes) -> int:
            return len(content)

    class Holder:
        def hold(self, megabytes: int) -> Any:
            import numpy

            self.kept = ray.put(numpy.random.randint(0, 255, megabytes * 1_000_000, numpy.uint8))
            return [self.kept]

    class Getter:
        def get(self, kept: Any) -> None:
            ray.get(kept[0])

    def started(cls: type, where: str, **more: Any) -> Any:
        return ray.remote(num_cpus=0, resources={where: 1}, **more)(cls).remote()

    plain, turns = started(Plain, "here"), started(Turns, "here", max_concurrency=1000)
    holder, getter = started(Holder, "here"), started(Getter, "there")

    async def to_host(megabytes: int) -> float:
        kept = await holder.hold.remote(megabytes)
        began = time.perf_counter()
        await getter.get.remote(kept)
        return time.perf_counter() - began

    async def one() -> dict[str, Any]:
        calls = {"turn": turns.turn.remote, "plain": plain.plain.remote}
        waited = {name: _awaited(call) for name, call in calls.items()}
        return await measure(waited, _awaited(turns.take.remote), to_host)

    print(json.dumps({"ray": ray.__version__}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(one())), flush=True)
    ray.shutdown()
    cluster.shutdown()


def _awaited(call: Any) -> Any:
    async def awaited(argument: Any) -> Any:
        return await call(argument)

    return awaited


class Ray:
    def __init__(self, python: str, folder: Path) -> None:
        variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder), "PYTHONPATH": ""}
        pipe = subprocess.PIPE
        line = [python, str(Path(__file__).resolve()), "--ray"]
        self.log = (folder / "ray.log").open("w+")
        self.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=self.log, env=variables, text=True)
        told = self.process.stdout or ()
        self.lines: Iterator[dict[str, Any]] = (json.loads(text) for text in told if text.startswith("{"))
        self.version = self.next()["ray"]

    def measure(self) -> dict[str, dict[str, float]]:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.next()

    def next(self) -> dict[str, Any]:
        try:
            return next(self.lines)
        except StopIteration:
            self.log.seek(0)
            raise SystemExit(f"Ray ended:\n{self.log.read()[-3000:]}") from None

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


async def play(python: str, rounds: int) -> dict[str, Any]:
    from pearl.cluster.local import LocalCluster

    sides: dict[str, list[dict[str, dict[str, float]]]] = {"pearl": [], "ray": []}
    root = Path(f"/dev/shm/pearl-{os.getpid()}-0-calls")
    with tempfile.TemporaryDirectory() as folder:
        try:
            ray = Ray(python, Path(folder))
            async with LocalCluster(Path(folder), lambda *_: None) as cluster:
                pearl = Pearl(cluster, root)
                await pearl.start()
                for number in range(rounds):
                    for side in ("pearl", "ray") if number % 2 == 0 else ("ray", "pearl"):
                        found = await (pearl.measure() if side == "pearl" else asyncio.to_thread(ray.measure))
                        sides[side].append(found)
            ray.close()
        finally:
            for folder_of in (root.name, f"pearl-copy-*{root.name}"):  # the snapshots, and the other host's copies
                for left in root.parent.glob(f"{folder_of}-*"):
                    shutil.rmtree(left, ignore_errors=True)
    rows = {}
    for name, first in sides["pearl"][0].items():
        unit = next(iter(first))
        ours, theirs = ([found[name][unit] for found in sides[side]] for side in ("pearl", "ray"))
        dearer = [(t / o if unit == "calls_per_s" else o / t) for o, t in zip(ours, theirs, strict=True)]
        rows[name] = {"unit": unit, "pearl": statistics.median(ours), "ray": statistics.median(theirs)}
        if "p99_ms" in first and not name.endswith("MB"):
            rows[name] |= {f"{s}_p99_ms": statistics.median(f[name]["p99_ms"] for f in sides[s]) for s in sides}
        rows[name] |= {"ratio": statistics.median(dearer), "ratios": [round(each, 2) for each in sorted(dearer)]}
        rows[name] = {key: round(v, 3) if isinstance(v, float) else v for key, v in rows[name].items()}
    return {"rounds": rounds, "ray": ray.version, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter that has Ray")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--ray", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ray:
        ray_side()
        return
    if arguments.python is None:
        parser.error("--python is needed: the interpreter of an environment that has Ray")
    from bench.provenance import provenance

    source = provenance("bench.actor_calls", "distributed")
    result = {**asyncio.run(play(arguments.python, arguments.rounds)), **source}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'':26}{'PEARL':>10}{'Ray':>10}   ratio (of the rounds)")
    for name, row in result["rows"].items():
        print(f"{name:26}{row['pearl']:10.2f}{row['ray']:10.2f} {row['unit']:12}{row['ratio']:6.2f} {row['ratios']}")


if __name__ == "__main__":
    main()
