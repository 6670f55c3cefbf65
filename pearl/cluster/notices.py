"""Will this machine be taken away? What the clouds' metadata services say, asked from a thread.

The thread shares nothing with the worker's event loop: it has its own connection to the scheduler. So a notice gets
through while an actor blocks the loop or computes in Python.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from distributed.comm import connect
from distributed.core import send_recv
from distributed.security import Security

from pearl.config.cluster import NoticesConfig

REQUEST_S = 5.0
"""A metadata service is a link-local neighbour."""
TOKEN_S = 21600
"""The longest life of an IMDSv2 token."""
REBALANCE_S = 120.0
"""EC2 gives two minutes' notice of an interruption: a recommendation alone leaves at least that."""
GCP_S = 30.0
"""Compute Engine stops a preempted machine 30 s after it said so."""
GCP_WAIT_S = 60
"""One waiting request."""
AZURE_TAKES = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events after which no process of ours is left (Freeze and the like pause it for seconds)."""
AZURE_PREEMPT_S = 30.0
"""At least this long before a Preempt event, also if it does not say when."""
RETRY_S = 1.0
SEND_S = 5.0


@dataclass(frozen=True, slots=True)
class Notice:
    seconds_left: float
    source: str
    """Who says so, in its words."""


class Source(Protocol):
    """One cloud's dialect. `ask` blocks; it raises OSError, ValueError or KeyError if the service gives no sense."""

    pause_s: float
    """Between two questions."""

    def ask(self) -> Notice | None: ...


class Ec2:
    """Spot instance action and rebalance recommendation, with an IMDSv2 token."""

    def __init__(self, url: str, pause_s: float, rebalance: bool) -> None:
        self.url, self.pause_s, self.rebalance = url, pause_s, rebalance
        self._token, self._renew_at = "", 0.0

    def ask(self) -> Notice | None:
        if body := self._get("spot/instance-action"):
            action = json.loads(body)
            return Notice(_seconds_until(_iso(action["time"])), f"EC2 spot instance action: {action['action']}")
        if self.rebalance and self._get("events/recommendations/rebalance"):
            return Notice(REBALANCE_S, "EC2 rebalance recommendation")
        return None

    def _get(self, path: str) -> str | None:
        """None where there is nothing."""
        if time.monotonic() > self._renew_at:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token, _ = _request(f"{self.url}/latest/api/token", lifetime, method="PUT")
            self._renew_at = time.monotonic() + TOKEN_S / 2
        try:
            return _request(f"{self.url}/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})[0]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._renew_at = 0.0  # 401: the token is no longer taken
            raise


class Gcp:
    """`instance/preempted`; waits for a change after the first answer, so the news comes at once."""

    def __init__(self, url: str) -> None:
        self.url, self.pause_s = url, 0.0
        self._etag: str | None = None

    def ask(self) -> Notice | None:
        path = f"{self.url}/computeMetadata/v1/instance/preempted"
        if self._etag is not None:  # a change between two questions changes the tag
            path += f"?wait_for_change=true&timeout_sec={GCP_WAIT_S}&last_etag={self._etag}"
        body, headers = _request(path, {"Metadata-Flavor": "Google"}, timeout_s=GCP_WAIT_S + REQUEST_S)
        self._etag = headers.get("ETag", "0")
        return Notice(GCP_S, "GCP preempted") if body.strip() == "TRUE" else None


class Azure:
    """Scheduled events that name this machine."""

    def __init__(self, url: str, pause_s: float) -> None:
        self.url, self.pause_s = url, pause_s
        self._name: str | None = None

    def ask(self) -> Notice | None:
        if self._name is None:  # the events are those of the whole scale set
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(path).strip()
        for event in json.loads(self._get("/metadata/scheduledevents?api-version=2020-07-01"))["Events"]:
            if event["EventType"] in AZURE_TAKES and self._name in event["Resources"]:
                at = event.get("NotBefore")
                seconds = _seconds_until(email.utils.parsedate_to_datetime(at)) if at else AZURE_PREEMPT_S
                return Notice(seconds, f"Azure scheduled event: {event['EventType']}")
        return None

    def _get(self, path: str) -> str:
        return _request(self.url + path, {"Metadata": "true"})[0]


def source_of(config: NoticesConfig) -> Source | None:
    """None where nobody is to be asked."""
    match config.source:
        case "ec2":
            return Ec2(config.url or "http://169.254.169.254", config.poll_s, config.rebalance)
        case "gcp":
            return Gcp(config.url or "http://metadata.google.internal")
        case "azure":
            return Azure(config.url or "http://169.254.169.254", config.poll_s)
    return None


class Reporter:
    """Brings notices of one life of a slot to the scheduler, from any thread."""

    def __init__(self, scheduler: str, slot: str, incarnation: int, security: Security | None = None) -> None:
        self.scheduler, self.slot, self.incarnation = scheduler, slot, incarnation
        self.connection = security.get_connection_args("worker") if security else {}

    def report(self, notice: Notice) -> None:
        """Returns when the scheduler knows, or the time is over."""
        deadline = time.monotonic() + notice.seconds_left
        while not asyncio.run(self._send(max(0.0, deadline - time.monotonic()), notice.source)):
            if time.monotonic() > deadline:
                return
            time.sleep(RETRY_S)

    async def _send(self, seconds_left: float, source: str) -> bool:
        try:
            async with asyncio.timeout(SEND_S):
                comm = await connect(self.scheduler, **self.connection)
                try:
                    who = {"slot": self.slot, "incarnation": self.incarnation}
                    reply = await send_recv(comm, op="pearl_notice", **who, seconds_left=seconds_left, source=source)
                finally:
                    comm.abort()
        except (OSError, TimeoutError):
            return False
        return reply["status"] == "OK"


def watch(source: Source, pause_s: float, report: Callable[[Notice], None]) -> threading.Thread:
    """Ask for ever in a daemon thread; each statement of the service is reported once.

    `pause_s`: after a question without answer. A service that does not answer is told of once, on standard error.
    """

    def run() -> None:
        told: set[str] = set()
        failed = False
        while True:
            pause = source.pause_s
            try:
                notice = source.ask()
            except (OSError, ValueError, KeyError) as error:
                if not failed:
                    print(f"no answer about preemption: {error!r}", file=sys.stderr, flush=True)
                failed, pause, notice = True, pause_s, None
            else:
                failed = False
            if notice and notice.source not in told:
                told.add(notice.source)
                report(notice)
            time.sleep(max(pause, RETRY_S) if notice else pause)

    thread = threading.Thread(target=run, name="pearl-notices", daemon=True)
    thread.start()
    return thread


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment must not answer for the machine's own metadata service."""


def _request(
    url: str, headers: Mapping[str, str], method: str = "GET", timeout_s: float = REQUEST_S
) -> tuple[str, Mapping[str, str]]:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with _direct.open(request, timeout=timeout_s) as reply:
        return reply.read().decode(), reply.headers


def _iso(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def _seconds_until(when: datetime.datetime) -> float:
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
