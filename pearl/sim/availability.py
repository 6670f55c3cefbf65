"""How many preemptible GPUs there are, over time: read from a file, or made up.

An availability is a list of (seconds, GPUs from then on), the first at 0.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Iterable
from pathlib import Path

from pearl.errors import UserError

Availability = list[tuple[float, int]]

FORMATS = (
    "A trace is JSON with `events: [[seconds, gpus], ...]`, CSV lines `milliseconds,add|remove,node`, or lines "
    "`YYYY-MM-DD, HH:MM:SS, count`"
)

ABUNDANCE = {"abundant": 0.80, "moderate": 0.65, "scarce": 0.41}
"""Mean share of the most GPUs. The source's three segments have 0.80, 0.65 and 0.42 of 12."""
CHANGES_PER_HOUR = {"calm": 1.5, "volatile": 8.5}
"""The source's segments: few, and many, changes in two hours."""
SPREAD = {"calm": 0.1, "volatile": 0.25}
"""Standard deviation of the count, by the most."""
GENERATED = tuple(f"{abundance}-{volatility}" for abundance in ABUNDANCE for volatility in CHANGES_PER_HOUR)


def generate(name: str, most_gpus: int, gpus_per_slot: int, duration_s: float, seed: int) -> Availability:
    """One of `GENERATED`: jumps at random times, on whole minutes, to counts around the mean."""
    abundance, volatility = name.split("-")
    rng = random.Random(f"availability {name} {seed}")
    most = most_gpus // gpus_per_slot
    mean, spread = ABUNDANCE[abundance] * most, SPREAD[volatility] * most

    def draw() -> int:
        return max(0, min(most, round(rng.gauss(mean, spread))))

    now, count = 0.0, draw()
    result = [(now, count * gpus_per_slot)]
    while most:
        now += max(60.0, round(rng.expovariate(CHANGES_PER_HOUR[volatility] / 3600) / 60) * 60.0)
        if now >= duration_s:
            break
        count, before = draw(), count
        if count != before:
            result.append((now, count * gpus_per_slot))
    return result


def read(path: Path, most_gpus: int, gpus_per_node: int, start_s: float = 0.0) -> Availability:
    """From `start_s` of the file on; a trace with more GPUs than `most_gpus` is scaled down to that.

    A node of an add/remove trace has `gpus_per_node` GPUs. Raises UserError for what cannot be read.
    """
    try:
        text = path.read_text()
    except OSError as error:
        known = ", ".join(GENERATED)
        raise UserError(f"cannot read the trace {path}: {error.strerror}", f"Give a file, or one of {known}") from None
    try:
        points = _parse(text, gpus_per_node)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a trace that is known here ({error})", FORMATS) from None
    if not points:
        raise UserError(f"the trace {path} is empty", FORMATS)
    if start_s > points[-1][0]:
        raise UserError(
            f"the trace {path} ends at {points[-1][0]:g} s, before its start at {start_s:g} s", "Start earlier"
        )
    most = max(count for _, count in points)
    scale = min(1.0, most_gpus / most) if most else 1.0
    return _from(((t, round(count * scale)) for t, count in points), start_s)


def _parse(text: str, gpus_per_node: int) -> Availability:
    if text.lstrip().startswith("{"):
        points = [(float(seconds), int(gpus)) for seconds, gpus in json.loads(text)["events"]]
        return sorted(points, key=lambda point: point[0])
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    if rows and len(rows[0]) == 3 and rows[0][1] in ("add", "remove"):
        return _nodes(rows, gpus_per_node)
    stamps = [(datetime.datetime.fromisoformat(f"{day} {time}").timestamp(), int(n)) for day, time, n in rows]
    stamps.sort(key=lambda stamp: stamp[0])
    return [(t - stamps[0][0], count) for t, count in stamps]


def _nodes(rows: Iterable[list[str]], gpus_per_node: int) -> Availability:
    alive: set[str] = set()
    points: Availability = []
    for milliseconds, kind, node in rows:
        if kind not in ("add", "remove"):
            raise ValueError(f"{kind!r} is neither add nor remove")
        (alive.add if kind == "add" else alive.discard)(node)
        points.append((int(milliseconds) / 1000, len(alive) * gpus_per_node))
    return points


def _from(points: Iterable[tuple[float, int]], start_s: float) -> Availability:
    """Shifted to `start_s`; one entry a time, only changes."""
    result: Availability = [(0.0, 0)]
    for time_s, count in points:
        at = max(0.0, time_s - start_s)
        if at == result[-1][0]:
            result[-1] = (at, count)
        else:
            result.append((at, count))
    return [point for i, point in enumerate(result) if i == 0 or result[i - 1][1] != point[1]]


def mean_gpus(availability: Availability, duration_s: float) -> float:
    """Over the first `duration_s`."""
    ends = [t for t, _ in availability[1:]] + [duration_s]
    spans = zip(availability, ends, strict=True)
    return sum(n * max(0.0, min(end, duration_s) - t) for (t, n), end in spans) / duration_s
