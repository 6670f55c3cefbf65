"""When preemptible slots are asked for again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.adapter import ObservedSlot
from pearl.cluster.binding import bind
from pearl.cluster.local import LocalCluster
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.autoscaler import Scale
from pearl.core.layout import SlotInfo
from pearl.live import slots
from pearl.live.slots import PreemptibleSlots
from pearl.live.waits import WaitTable

LOST = ev.SlotLost("preemptible-0", 1, "taken back by the cloud")


def made(folder: Path, **elastic: Any) -> PreemptibleSlots:
    tree = {"engine": {"device": "cpu"}, "elastic": {"policy": "elastic", "preemptible_slots": 2, **elastic}}
    config = make_config(tree, "test")
    cluster = LocalCluster(folder, lambda *_: None)
    return PreemptibleSlots(cluster, bind(config, 0), config, WaitTable(), lambda _: None, lambda *_: None)


def waits_s(kept: PreemptibleSlots) -> float:
    """Seconds from a loss until slots are asked for again; and they were."""
    kept._happened(LOST)
    assert kept._again is not None
    seconds = kept._again.when() - asyncio.get_running_loop().time()
    kept._again.cancel()
    kept._again = None
    return seconds


async def test_losses_that_follow_each_other_make_it_wait_ever_longer(tmp_path: Path) -> None:
    kept = made(tmp_path)
    waited = [waits_s(kept) for _ in range(9)]
    assert waited == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, 300], abs=0.5)


async def test_what_was_lost_long_ago_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = made(tmp_path)
    for _ in range(4):
        waits_s(kept)
    monkeypatch.setattr(slots, "FORGET_S", 0.0)
    await asyncio.sleep(0)
    assert waits_s(kept) == pytest.approx(5, abs=0.5)


async def test_losses_at_once_are_asked_for_once(tmp_path: Path) -> None:
    kept = made(tmp_path)
    kept._happened(LOST)
    first = kept._again
    kept._happened(LOST)
    assert kept._again is first is not None
    first.cancel()


async def test_after_the_end_nothing_is_asked_for(tmp_path: Path) -> None:
    kept = made(tmp_path)
    kept._closing = True
    kept._happened(LOST)
    assert kept._again is None


async def test_an_autoscaled_run_asks_for_what_is_wanted_and_counts_nothing_down_itself(tmp_path: Path) -> None:
    kept = made(tmp_path, autoscale={"objective": "throughput", "usd_per_slot_hour": 1.0})
    asked: list[int] = []

    async def request(zone: object, n: int, shape: object) -> None:
        asked.append(n)

    async def release(workers: object) -> None: ...

    kept.adapter.request, kept.adapter.release = request, release  # type: ignore[method-assign]
    kept.adapter.observed = lambda: {"preemptible-0": ObservedSlot(SlotInfo("preemptible-0"), 1, "tcp://")}  # type: ignore[method-assign]
    await kept.connect()
    await kept.want(ev.RequestSlots(2, Scale(2, True, "", ())))
    await kept.want(ev.RequestSlots(1, Scale(1, True, "", ())))
    await kept.release(ev.ReleaseSlot("preemptible-0", 1, "not worth its price"))
    await kept._ask()
    assert asked == [0, 2, 1, 1]
