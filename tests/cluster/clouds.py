"""Metadata services on loopback, strict about what the real ones are strict about."""

from __future__ import annotations

import datetime
import email.utils
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from tests.cluster.http_server import Answer, Asked, answering


class Cloud:
    """What the service says; `requests` are the (method, path) that came."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self.token = "token-1"
        self.at: datetime.datetime | None = None
        self.rebalance = False
        self.machine = "vm-1"
        self.event, self.resources = "Preempt", ["vm-0", "vm-1"]
        self.url = ""

    def preempt(self, seconds: float) -> None:
        with self.changed:
            self.at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
            self.changed.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/latest/"):
            return self._ec2(method, url.path.removeprefix("/latest/"), headers)
        if url.path.startswith("/computeMetadata/"):
            return self._gcp(query, headers)
        return self._azure(url.path, query, headers)

    def _ec2(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "api/token":
            good = method == "PUT" and 0 < int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", 0)) <= 21600
            return (200, self.token) if good else (400, "")
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, ""
        if path == "meta-data/spot/instance-action" and self.at:
            return 200, json.dumps({"action": "terminate", "time": self.at.strftime("%Y-%m-%dT%H:%M:%SZ")})
        if path == "meta-data/events/recommendations/rebalance" and self.rebalance:
            return 200, json.dumps({"noticeTime": "2024-11-05T08:22:00Z"})
        return 404, ""

    def _gcp(self, query: dict[str, str], headers: dict[str, str]) -> tuple[int, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, ""
        with self.changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag") == self.etag:
                self.changed.wait(float(query["timeout_sec"]))
            return 200, "TRUE" if self.at else "FALSE"

    @property
    def etag(self) -> str:
        return "after" if self.at else "before"

    def _azure(self, path: str, query: dict[str, str], headers: dict[str, str]) -> tuple[int, str]:
        if headers.get("metadata") != "true" or "api-version" not in query:
            return 400, ""
        if path == "/metadata/instance/compute/name":
            return 200, self.machine
        events = []
        if self.at:
            when = email.utils.format_datetime(self.at, usegmt=True)
            events = [{"EventId": "1", "EventType": self.event, "Resources": self.resources, "NotBefore": when}]
        return 200, json.dumps({"DocumentIncarnation": len(events), "Events": events})


@contextmanager
def serving() -> Iterator[Cloud]:
    cloud = Cloud()

    def answer(asked: Asked) -> Answer:
        cloud.requests.append((asked.method, asked.path))
        status, body = cloud.answer(asked.method, asked.path, dict(asked.headers))
        return Answer(status, body.encode(), {"ETag": cloud.etag})

    with answering(answer) as cloud.url:
        yield cloud
