"""The three availability segments that `pearl bench paper` plays, from Bamboo's public trace.

    python -m bench.paper_segments p3-trace.csv [--out FOLDER]

The trace is `traces/p3-trace.csv` of github.com/uclasystem/bamboo (MIT). The rule was fixed before any outcome was
seen; it is told in `pearl/paper/segments/SOURCE.md`, where its results are.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

CAP_GPUS, GPUS_PER_NODE, RESERVED_GPUS = 12, 2, 4
DURATION_S, FIRST_S, SLIDE_S = 7200, 600, 300
KEPT_SHARE, SEEDS, TOLERANCE_GPUS = 0.25, 200, 0.15
TARGETS = (("1_abundant_volatile", 9.6, 1), ("2_scarce_volatile", 5.0, 1), ("3_moderate_calm", 7.8, -1))
"""Name, mean preemptible GPUs, and whether many (1) or few (-1) changes are wanted."""

Availability = list[tuple[float, int]]


class Row(NamedTuple):
    time_s: float
    kind: str
    node: str


class Window(NamedTuple):
    seed: int
    start_s: float
    events: Availability
    mean: float


def kept(rows: list[Row], seed: int) -> Availability:
    """(seconds, GPUs) of the nodes that the seed keeps."""
    rng = random.Random(seed)
    keep = {node: rng.random() < KEPT_SHARE for node in sorted({row.node for row in rows})}
    alive: set[str] = set()
    points: Availability = []
    for row in rows:
        if keep[row.node]:
            (alive.add if row.kind == "add" else alive.discard)(row.node)
            gpus = min(CAP_GPUS, GPUS_PER_NODE * len(alive))
            if points and points[-1][0] == row.time_s:
                points[-1] = (row.time_s, gpus)
            else:
                points.append((row.time_s, gpus))
    return [point for i, point in enumerate(points) if i == 0 or points[i - 1][1] != point[1]]


def window(points: Availability, start_s: float) -> tuple[Availability, float]:
    """Events from `start_s` on, and their mean."""
    before = [gpus for time_s, gpus in points if time_s <= start_s]
    events = [(0.0, before[-1] if before else 0)]
    events += [(t - start_s, gpus) for t, gpus in points if start_s < t < start_s + DURATION_S]
    ends = [t for t, _ in events[1:]] + [float(DURATION_S)]
    return events, sum(gpus * (end - t) for (t, gpus), end in zip(events, ends, strict=True)) / DURATION_S


def choose(rows: list[Row]) -> dict[str, Window]:
    best: dict[str, tuple[tuple[int, float], Window]] = {}
    for seed in range(SEEDS):
        points = kept(rows, seed)
        start_s = float(FIRST_S)
        while start_s + DURATION_S < rows[-1].time_s:
            events, mean = window(points, start_s)
            for name, target, sign in TARGETS:
                if abs(mean - target) < TOLERANCE_GPUS and len(events) > 2:
                    score = (sign * (len(events) - 1), -abs(mean - target))
                    if name not in best or score > best[name][0]:
                        best[name] = (score, Window(seed, start_s, events, mean))
            start_s += SLIDE_S
    return {name: found for name, (_, found) in best.items()}


def as_dict(name: str, found: Window) -> dict[str, Any]:
    return {
        "name": name, "source": "bamboo p3-trace.csv", "seed": found.seed, "t0_s": found.start_s,
        "duration_s": DURATION_S, "cap_gpus": CAP_GPUS, "mean_preemptible_gpus": round(found.mean, 3),
        "mean_rollout_gpus": round(found.mean + RESERVED_GPUS, 3), "changes": len(found.events) - 1,
        "events": [list(event) for event in found.events],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=Path("pearl/paper/segments"))
    arguments = parser.parse_args()
    with arguments.trace.open() as file:
        rows = [Row(int(ms) / 1000, kind, node) for ms, kind, node in csv.reader(file)]
    rows.sort(key=lambda row: row.time_s)
    for name, found in sorted(choose(rows).items()):
        (arguments.out / f"{name}.json").write_text(json.dumps(as_dict(name, found)) + "\n")
        print(f"{name}: {found.mean + RESERVED_GPUS:.2f} rollout GPUs, {len(found.events) - 1} changes")


if __name__ == "__main__":
    main()
