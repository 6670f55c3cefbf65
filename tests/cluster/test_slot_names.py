"""Two workers that declare the same slot: the living one keeps the name, a dead one gives it up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pearl.cluster.adapter import RequestFailed
from pearl.cluster.identity import later_life
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotLost
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from tests.cluster.hand_started import HandStarted
from tests.cluster.support import START_S
from tests.cluster.test_existing import CPU, Driver

SILENT_S = 3.0
MANY = 100_000
"""Calls; so many take less than a tenth of a second."""
pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path: Path) -> Iterator[HandStarted]:
    with HandStarted(tmp_path, scheduler=["--silent-loss-s", str(SILENT_S)]) as started:
        yield started


def second(started: HandStarted, name: str) -> int:
    """Another worker that says that it is a-0; its log is called `name`."""
    return started.start(name, "pearl.cluster.worker", ["--scheduler", started.address, "--slot", "a-0"])


async def ended(started: HandStarted, name: str) -> int:
    return await asyncio.to_thread(started.processes[name].wait, START_S)


async def test_a_worker_with_the_name_of_a_living_one_is_refused_and_everybody_is_told(started: HandStarted) -> None:
    first = started.worker("a-0")
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        joined = (await driver.joined(1))["a-0"]
        second(started, "typo")
        assert await ended(started, "typo") == 1
        taken = (
            f"the slot name a-0 is taken: its worker on {joined.slot.host} (process {first}, "
            f"{driver.adapter.observed()['a-0'].address}) is alive. "
            "Give this one another name with --slot, or end that one first"
        )
        assert started.log("typo").splitlines()[-1] == f"the worker did not join: {taken}"
        assert f"refused a worker of {joined.slot.host}: {taken}" in started.log("scheduler")
        failed = await driver.event(RequestFailed)
        assert (failed.reason, failed.cause) == (f"a worker was refused: {taken}", Cause.CONFIGURATION)
        assert await (await driver.actor("a-0")).call("pid", timeout_s=30) == first, "the first one serves on"


async def test_a_worker_takes_the_name_of_one_that_was_killed(started: HandStarted) -> None:
    started.worker("a-0")
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        await driver.joined(1)
        started.processes["a-0"].kill()
        pid = second(started, "anew")
        await driver.joined(1)
        assert await (await driver.actor("a-0")).call("pid", timeout_s=30) == pid


def test_a_worker_that_is_started_at_once_is_a_later_life() -> None:
    lives = [later_life()]
    while lives[-1] == lives[0]:
        lives.append(later_life())
    assert lives == sorted(lives) and len(lives) < MANY, "sooner than any process can be started again"


async def test_a_worker_waits_for_the_name_of_a_silent_one_which_says_why_it_ends(started: HandStarted) -> None:
    hanging = started.worker("a-0")
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        await driver.joined(1)
        os.kill(hanging, signal.SIGSTOP)
        second(started, "anew")
        event: Event = await driver.event(Event)
        while not isinstance(event, SlotLost):
            event = await driver.event(Event)
        assert "its event loop was silent for" in event.reason
        await driver.joined(1)
        os.kill(hanging, signal.SIGCONT)
        assert await ended(started, "a-0") == 0
        assert started.log("a-0").splitlines()[-1].startswith("ending: its event loop was silent for")
        assert started.processes["anew"].poll() is None
