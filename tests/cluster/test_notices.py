"""Notices: the clouds' dialects, and their way from a busy worker to the driver."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import urllib.error
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorLost
from pearl.cluster.notices import GCP_S, REBALANCE_S, Azure, Ec2, Gcp, Notice, source_of, watch
from pearl.config.cluster import NoticesConfig
from tests.cluster.clouds import Cloud, serving
from tests.cluster.support import Watched


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with serving() as cloud:
        yield cloud


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Watched]:
    cluster = Watched(tmp_path / "workers")
    async with cluster.local:
        yield cluster


def test_ec2_says_when_it_takes_the_machine(cloud: Cloud) -> None:
    ec2 = Ec2(cloud.url, 5, rebalance=True)
    assert ec2.ask() is None
    cloud.preempt(120)
    notice = ec2.ask()
    assert notice is not None and notice.source == "EC2 spot instance action: terminate"
    assert 60 < notice.seconds_left <= 120
    assert cloud.requests.count(("PUT", "/latest/api/token")) == 1


def test_ec2_takes_a_new_token_when_the_old_one_is_refused(cloud: Cloud) -> None:
    ec2 = Ec2(cloud.url, 5, rebalance=True)
    assert ec2.ask() is None
    cloud.token = "token-2"
    with pytest.raises(urllib.error.HTTPError):
        ec2.ask()
    cloud.preempt(120)
    assert ec2.ask()


def test_a_rebalance_recommendation_counts_where_it_is_wanted(cloud: Cloud) -> None:
    cloud.rebalance = True
    assert Ec2(cloud.url, 5, rebalance=True).ask() == Notice(REBALANCE_S, "EC2 rebalance recommendation")
    assert Ec2(cloud.url, 5, rebalance=False).ask() is None
    cloud.preempt(120)
    action = Ec2(cloud.url, 5, rebalance=True).ask()
    assert action and "instance action" in action.source


def test_gcp_is_asked_to_answer_when_something_changes(cloud: Cloud) -> None:
    gcp = Gcp(cloud.url)
    assert gcp.ask() is None
    notices: queue.Queue[Notice] = queue.Queue()
    watch(gcp, 5, notices.put)
    while not any("wait_for_change=true" in path for _, path in list(cloud.requests)):
        pass
    assert notices.empty()
    cloud.preempt(30)
    assert notices.get(timeout=30) == Notice(GCP_S, "GCP preempted")


def test_gcp_tells_of_a_change_between_two_questions(cloud: Cloud) -> None:
    gcp = Gcp(cloud.url)
    assert gcp.ask() is None
    cloud.preempt(30)
    assert gcp.ask() == Notice(GCP_S, "GCP preempted")


def test_azure_events_count_if_they_name_this_machine(cloud: Cloud) -> None:
    azure = Azure(cloud.url, 5)
    assert azure.ask() is None
    cloud.preempt(30)
    notice = azure.ask()
    assert notice and notice.source == "Azure scheduled event: Preempt" and 0 < notice.seconds_left <= 30
    cloud.event = "Freeze"
    assert azure.ask() is None
    cloud.event, cloud.resources = "Terminate", ["vm-0"]
    assert azure.ask() is None


def test_a_proxy_of_the_environment_is_not_asked(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert Gcp(cloud.url).ask() is None


def test_a_service_that_fails_is_told_of_once_and_asked_again(capfd: pytest.CaptureFixture[str]) -> None:
    class Flaky:
        pause_s = 0.0
        asked = 0

        def ask(self) -> Notice | None:
            self.asked += 1
            if self.asked < 4:
                raise OSError("no route")
            return Notice(1.0, f"at last, and {min(self.asked, 5)}")

    notices: queue.Queue[Notice] = queue.Queue()
    watch(Flaky(), 0.0, notices.put)
    assert [notices.get(timeout=30).source for _ in range(2)] == ["at last, and 4", "at last, and 5"]
    assert notices.empty()  # the same word is reported once
    assert capfd.readouterr().err.count("no route") == 1


def test_nobody_is_asked_by_default() -> None:
    assert source_of(NoticesConfig()) is None


async def keep_busy(actor: ActorRef, work: str, folder: Path) -> tuple[asyncio.Future[object], Path]:
    """The call that keeps the actor's event loop, and the pipe that ends it."""
    entered, until = folder / "entered", folder / "until"
    os.mkfifo(entered)
    os.mkfifo(until)
    busy = asyncio.ensure_future(actor.call(work, str(entered), str(until), timeout_s=120))
    await asyncio.to_thread(entered.read_text)
    return busy, until


@pytest.mark.parametrize("work", ["hold", "burn"])
async def test_a_notice_arrives_while_an_actor_blocks_its_event_loop(
    cluster: Watched, cloud: Cloud, tmp_path: Path, work: str
) -> None:
    notices = NoticesConfig(source="ec2", url=cloud.url, poll_s=0.2)
    actor = await cluster.actor(notices=notices)
    await cluster.event("joined")
    busy, until = await keep_busy(actor, work, tmp_path)
    cloud.preempt(100)
    notice = await cluster.event("notice")
    assert not busy.done()
    assert notice.source.startswith("EC2") and 0 < notice.seconds_left <= 100
    assert (notice.identity.slot, notice.identity.incarnation, notice.identity.zone) == ("w-0", 1, "reserved")
    if work == "hold":
        until.write_text("go on")
    until.unlink()
    await busy
    assert await actor.call("echo", 1, timeout_s=30) == 1  # a notice ends nothing


async def told_by_sigterm(cluster: Watched, grace_s: float) -> ActorRef:
    actor = await cluster.actor(notices=NoticesConfig(sigterm_grace_s=grace_s))
    await cluster.event("joined")
    cluster.local.terminate("w-0")
    notice = await cluster.event("notice")
    assert notice.source == "SIGTERM" and notice.seconds_left <= grace_s
    return actor


async def test_sigterm_is_a_notice_and_a_second_one_ends_the_worker(cluster: Watched, tmp_path: Path) -> None:
    actor = await told_by_sigterm(cluster, 1000)
    assert await actor.call("echo", 1, timeout_s=30) == 1
    cluster.local.terminate("w-0")
    left = await cluster.event("left")
    assert (left.reason, "a second SIGTERM" in left.detail) == ("closed", True)


async def test_the_deadline_of_a_sigterm_ends_the_worker(cluster: Watched) -> None:
    await told_by_sigterm(cluster, 3)
    left = await cluster.event("left")
    assert (left.reason, "the time that SIGTERM left is over" in left.detail) == ("closed", True)


async def test_sigterm_gets_through_a_blocked_event_loop_and_so_does_the_end(cluster: Watched, tmp_path: Path) -> None:
    actor = await cluster.actor(notices=NoticesConfig(sigterm_grace_s=1000))
    await cluster.event("joined")
    busy, _ = await keep_busy(actor, "burn", tmp_path)
    pid = cluster.local.workers["w-0"].process.pid
    os.kill(pid, signal.SIGTERM)
    assert (await cluster.event("notice")).source == "SIGTERM"
    os.kill(pid, signal.SIGTERM)
    left = await cluster.event("left")
    assert left.reason == "lost" and "after a notice (SIGTERM)" in left.detail
    with pytest.raises(ActorLost):
        await busy
