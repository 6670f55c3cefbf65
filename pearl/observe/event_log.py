"""`events.jsonl`: every event and instruction, append-only, one object a line, and `trajectories.msgpack`.

Written by one process; a torn last line is all that a crash can cost.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import msgpack

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout
from pearl.core.trajectory import SampleId, Trajectory, TrajectoryId, trajectory_to_wire

FLUSH_S = 1.0
"""The log is at most this far behind; flushing each line would cost more than the turn that it records."""


class EventLog:
    def __init__(self, events: Path, trajectories: Path) -> None:
        self._events = events.open("a")
        self._trajectories = trajectories.open("ab")
        self._offset = time.time() - time.monotonic()
        self._flushed = 0.0

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.write(now, type(entry).__name__, as_json(entry))

    def write(self, now: float, kind: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(now + self._offset, 4), "kind": kind, **fields})
        self._events.write(line + "\n")
        if now - self._flushed > FLUSH_S:
            self._events.flush()
            self._flushed = now

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        self._events.flush()

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        wire = None if trajectory is None else trajectory_to_wire(trajectory)
        record = {"sample": list(end.sample), "outcome": str(end.outcome), "reason": end.reason, "trajectory": wire}
        self._trajectories.write(msgpack.packb(record))
        self._trajectories.flush()

    def notice(self, text: str) -> None:
        self.write(time.monotonic(), "Notice", {"text": text})
        self._events.flush()

    def close(self) -> None:
        self._events.close()
        self._trajectories.close()


def as_json(entry: Any) -> dict[str, Any]:
    """Plain fields of an event, an instruction or a part of one; trajectories, samples and layouts as text."""
    return {field.name: _plain(getattr(entry, field.name)) for field in dataclasses.fields(entry)}


def _plain(value: Any) -> Any:
    if isinstance(value, TrajectoryId | SampleId | Layout):
        return str(value)
    if dataclasses.is_dataclass(value):
        return as_json(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
