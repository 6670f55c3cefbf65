"""The GPUs of a simulated cluster: slots that are there to stay, and slots that come and go with a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.layout import SlotInfo, Zone

GPUS_PER_HOST = 8


@dataclass(frozen=True, slots=True)
class Cluster:
    """`changes`: (time in s, event) of preemptible slots, in order."""

    gpus_per_slot: int
    slots: tuple[SlotInfo, ...]
    """Reserved and overlap slots."""
    changes: tuple[tuple[float, Event], ...] = ()

    @property
    def training_gpus(self) -> int:
        return self.gpus_per_slot * sum(slot.zone is Zone.OVERLAP for slot in self.slots)


def make_cluster(
    *,
    training_gpus: int,
    reserved_gpus: int,
    availability: Sequence[tuple[float, int]] = (),
    gpus_per_slot: int = 2,
    notice_s: float | None = 30.0,
    seed: int = 0,
) -> Cluster:
    """`availability`: (seconds, preemptible GPUs from then on); `notice_s` None: they go unannounced.

    GPUs that do not fill a slot are left out.
    """
    overlap = tuple(_slots(Zone.OVERLAP, "overlap", training_gpus // gpus_per_slot, gpus_per_slot))
    reserved = tuple(_slots(Zone.RESERVED, "reserved", reserved_gpus // gpus_per_slot, gpus_per_slot))
    counts = [(seconds, gpus // gpus_per_slot) for seconds, gpus in availability]
    most = max((n for _, n in counts), default=0)
    preemptible = tuple(_slots(Zone.PREEMPTIBLE, "preemptible", most, gpus_per_slot))
    return Cluster(gpus_per_slot, (*reserved, *overlap), tuple(_changes(counts, preemptible, notice_s, seed)))


def _slots(zone: Zone, name: str, count: int, gpus: int) -> Iterable[SlotInfo]:
    """Slots side by side on hosts of `GPUS_PER_HOST`."""
    for i in range(count):
        first = i * gpus
        host = f"{name}-host-{first // GPUS_PER_HOST}"
        ids = tuple(f"{host}/{(first + g) % GPUS_PER_HOST}" for g in range(gpus))
        ranks = tuple(range(first, first + gpus)) if zone is Zone.OVERLAP else ()
        yield SlotInfo(f"{name}-{i}", zone, ids, host, ranks)


def _changes(
    counts: Sequence[tuple[float, int]], slots: Sequence[SlotInfo], notice_s: float | None, seed: int
) -> list[tuple[float, Event]]:
    """Which slot leaves is drawn; the one that has been away longest comes back first."""
    rng = random.Random(seed)
    away = list(range(len(slots)))
    joined: dict[int, float] = {}
    lives = [0] * len(slots)
    changes: list[tuple[float, Event]] = []
    for seconds, count in counts:
        while len(joined) < count:
            i = away.pop(0)
            joined[i] = seconds
            lives[i] += 1
            changes.append((seconds, ev.SlotJoined(slots[i], lives[i])))
        while len(joined) > count:
            i = rng.choice(sorted(joined))
            away.append(i)
            since = joined.pop(i)
            name, life = slots[i].name, lives[i]
            if notice_s is not None:
                warned = max(since, seconds - notice_s)
                changes.append((warned, ev.SlotNotice(name, life, seconds - warned)))
            changes.append((seconds, ev.SlotLost(name, life, "taken back by the cloud")))
    return sorted(changes, key=lambda change: change[0])
