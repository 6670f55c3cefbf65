"""How fast do weights come to other hosts, and what do k of them that join at once cost the trainer's host? One table.

    python -m bench.snapshot_fanout [--json] [--megabytes 512] [--rounds 5]

Hosts are worker processes of this machine with folders of their own in shared memory, connected by loopback TCP. All
ways run in turn, `rounds` times. `socket`: a plain one, from a mapped file into a buffer. `dask comm`: pieces of that
size over a Dask connection, thrown away. `fan-out, k`: the driver's way, from the trainer's folder to k hosts at once,
compared with its checksums and whole in their shared memory. MB/s is the size of the snapshot by the time until the
last host has it; `copies` is what left the trainer's host, by that size. Writes `bench/results/snapshot_fanout.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from distributed.comm import Comm
from distributed.core import Server, Status, connect
from distributed.protocol import to_serialize

from bench.provenance import provenance
from pearl.cluster.local import LocalCluster
from pearl.cluster.snapshots import PIECE_BYTES, WINDOW
from pearl.core.events import Event
from pearl.live.measured import WeightsCopied
from pearl.live.snapshots import HostSnapshots
from pearl.live.waits import WaitTable
from pearl.weights.snapshot import DATA, snapshot_directory, write_snapshot

RESULT = Path(__file__).parent / "results" / "snapshot_fanout.json"
REPOSITORY = Path(__file__).parent.parent
JOINERS = (1, 2, 4)
TENSORS = 64
START_S, FETCH_S = 120.0, 300.0


def view(data: Path) -> memoryview:
    with data.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def send_plain(data: Path, told: Connection) -> None:
    """In a process of its own: send the file to the one that connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        told.send(server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            peer.sendall(view(data))


def plain_socket(data: Path) -> float:
    """Seconds."""
    ours, theirs = multiprocessing.Pipe()
    sender = multiprocessing.Process(target=send_plain, args=(data, theirs))
    sender.start()
    buffer, at = memoryview(bytearray(data.stat().st_size)), 0
    with socket.create_connection(("127.0.0.1", ours.recv())) as peer:
        began = time.perf_counter()
        while at < len(buffer):
            at += peer.recv_into(buffer[at : at + PIECE_BYTES])
        seconds = time.perf_counter() - began
    sender.join()
    return seconds


def send_by_dask(data: Path, told: Connection) -> None:
    async def stream(comm: Comm) -> Status:
        whole = view(data)
        for at in range(0, len(whole), PIECE_BYTES):
            await comm.read()
            await comm.write({"data": to_serialize(whole[at : at + PIECE_BYTES])})
        return Status.dont_reply

    async def serve() -> None:
        async with Server({"stream": stream}) as server:
            await server.listen("tcp://127.0.0.1:0")
            told.send(server.address)
            await asyncio.to_thread(told.recv)

    asyncio.run(serve())


async def dask_comm(data: Path) -> float:
    """Seconds."""
    ours, theirs = multiprocessing.Pipe()
    sender = multiprocessing.Process(target=send_by_dask, args=(data, theirs))
    sender.start()
    comm = await connect(ours.recv(), deserialize=False)
    began, left = time.perf_counter(), data.stat().st_size
    await comm.write({"op": "stream", "reply": False})
    for _ in range(WINDOW):
        await comm.write({"more": True})
    while left > 0:
        left -= sum(memoryview(frame).nbytes for frame in (await comm.read())["data"].frames)
        await comm.write({"more": True})
    seconds = time.perf_counter() - began
    comm.abort()
    ours.send(None)
    sender.join()
    return seconds


async def fan_out(cluster: LocalCluster, root: Path, hosts: int) -> tuple[float, float]:
    """Seconds, and copies that left the trainer's host."""
    told: list[Event] = []
    made = HostSnapshots(cluster, WaitTable(), root, told.append)
    size = (snapshot_directory(root, 1) / DATA).stat().st_size
    began = time.perf_counter()
    await asyncio.gather(*(made.at(f"host-{i}", 1, (), FETCH_S) for i in range(hosts)))
    seconds = time.perf_counter() - began
    copied = [event for event in told if isinstance(event, WeightsCopied)]
    assert len(copied) == hosts, copied
    await made.retire(1)
    return seconds, sum(event.bytes_from.get("trainer-0", 0) for event in copied) / size


async def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = defaultdict(list)
    copies: dict[str, list[float]] = defaultdict(list)
    root = Path(f"/dev/shm/pearl-{os.getpid()}-0-fanout")
    with tempfile.TemporaryDirectory() as folder:
        try:
            floats = megabytes * 1_000_000 // TENSORS // 4
            write_snapshot(root, 1, "shape", ((f"t{i}", torch.randn(floats)) for i in range(TENSORS)))
            data = snapshot_directory(root, 1) / DATA
            async with LocalCluster(Path(folder), lambda *_: None) as cluster:
                await cluster.start_worker("trainer-0", 1, "training", {}, START_S)
                for i in range(max(JOINERS)):
                    await cluster.start_worker(f"host-{i}", 1, "reserved", {"PEARL_HOST": f"host-{i}"}, START_S)
                for _ in range(rounds):
                    seconds = {
                        "socket": await asyncio.to_thread(plain_socket, data),
                        "dask comm": await dask_comm(data),
                    }
                    for hosts in JOINERS:
                        name = f"fan-out, {hosts}"
                        seconds[name], left = await fan_out(cluster, root, hosts)
                        copies[name].append(left)
                    for name, taken in seconds.items():
                        rates[name].append(data.stat().st_size / 1e6 / taken)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    rows = {
        name: {
            "mb_per_s": round(statistics.median(found)),
            "least": round(min(found)),
            "most": round(max(found)),
            "by_socket": round(statistics.median(a / b for a, b in zip(found, rates["socket"], strict=True)), 3),
            "by_dask_comm": round(statistics.median(a / b for a, b in zip(found, rates["dask comm"], strict=True)), 3),
            "copies_from_trainer": round(statistics.median(copies[name]), 3) if name in copies else None,
        }
        for name, found in rates.items()
    }
    return {"megabytes": megabytes, "rounds": rounds, "ways": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    source = provenance("bench.snapshot_fanout", "distributed")
    result = {**asyncio.run(measure(arguments.megabytes, arguments.rounds)), **source}
    RESULT.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'':12}    MB/s   least    most   of socket   of Dask comm   copies from the trainer's host")
        for name, row in result["ways"].items():
            left = "" if row["copies_from_trainer"] is None else f"{row['copies_from_trainer']:.3f}"
            print(
                f"{name:12}{row['mb_per_s']:8}{row['least']:8}{row['most']:8}{row['by_socket']:12.2f}"
                f"{row['by_dask_comm']:15.2f}   {left}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
