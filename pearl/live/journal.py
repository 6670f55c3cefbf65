"""The journal: what a run must not lose, append-only, outside Dask; and the way back from it.

One record is a length, a CRC and a msgpack map, written with one unbuffered call as it happens, so that a killed driver
loses at most the record that it was writing; a torn tail is cut off at the next start. Records carry the tokens, so a
trajectory goes on from exactly what its engine generated.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from pearl.core.trajectory import Trajectory, TrajectoryId, trajectory_from_wire, trajectory_to_wire
from pearl.live.tokens import LiveTrajectory

HEADER = struct.Struct("<II")
"""Length and CRC-32 of the body, little-endian."""


class Journal:
    """Writer. Every method appends one record."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **fields: Any) -> None:
        body = msgpack.packb({"kind": kind, **fields})
        self._file.write(HEADER.pack(len(body), zlib.crc32(body)) + body)

    def sync(self) -> None:
        """Force everything to disk: after this, a checkpoint may count on the journal."""
        os.fsync(self._file.fileno())

    def finished(self, trajectory: Trajectory) -> None:
        self.write("finished", trajectory=trajectory_to_wire(trajectory))

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """All whole records; with `repair` a torn tail is cut off, so that records can be appended."""
    found = list(_records(path.read_bytes()))
    if repair:
        os.truncate(path, found[-1][1] if found else 0)
    return [record for record, _ in found]


def _records(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    start = 0
    while start + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, start)
        end = start + HEADER.size + length
        body = data[start + HEADER.size : end]
        if end > len(data) or zlib.crc32(body) != checksum:
            return
        yield msgpack.unpackb(body), end
        start = end


class Tokens:
    """Finished and live trajectories of a journal, with their tokens."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.finished: dict[TrajectoryId, Trajectory] = {}
        self.live: dict[TrajectoryId, LiveTrajectory] = {}
        for record in records:
            if record["kind"] == "finished":
                trajectory = trajectory_from_wire(record["trajectory"])
                self.finished[trajectory.id] = trajectory
                self.live.pop(trajectory.id, None)
            elif record["kind"] == "open":
                trajectory_id = TrajectoryId(*record["trajectory"])
                self.live[trajectory_id] = LiveTrajectory(trajectory_id, "")
            elif "trajectory" in record and (live := self.live.get(TrajectoryId(*record["trajectory"]))):
                live.replay(record)
