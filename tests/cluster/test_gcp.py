"""Requests to Compute Engine: their bodies by Google's own description of its API, their answers from a small server on
loopback. Nothing here was run against the real service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pearl.cluster.certificates import Certificates
from pearl.cluster.gcp import GcpLauncher
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.config.clouds import GcpConfig
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.http_server import Answer, Asked, answering

pytest.importorskip(
    "dask_cloudprovider.gcp.instances", reason="needs pip install 'pearl-rl[gcp]'", exc_type=ImportError
)

CONFIG = {
    "project": "p", "machine_types": ("g2-standard-8", "g2-standard-4"), "zones": ("us-central1-a", "us-central1-b"),
    "image": "pearl", "labels": {"team": "rl"},
}  # fmt: skip


class Compute:
    """Machines of one project."""

    def __init__(self) -> None:
        self.machines: dict[str, dict[str, Any]] = {}
        self.refusal: tuple[int, str] | None = None
        self.sold_out: set[str] = set()
        """Zones."""
        self.gpus = 1
        self.url = ""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        url = urlsplit(path)
        found = re.fullmatch(r"/compute/v1/projects/p/zones/([^/]+)/(\w+)(?:/([^/]+))?(?:/wait)?", url.path)
        assert found, url.path
        zone, kind, name = found.groups()
        if self.refusal:
            return self.refusal[0], {"error": {"code": self.refusal[0], "message": self.refusal[1]}}
        match kind, method:
            case "machineTypes", _:
                return 200, {"name": name, "accelerators": [{"guestAcceleratorCount": self.gpus}]}
            case "operations", _:
                gone = {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": f"{zone} does not have enough resources"}
                error = {"error": {"errors": [gone]}} if zone in self.sold_out else {}
                return 200, {"name": name, "status": "DONE", **error}
            case "instances", "POST":
                if zone not in self.sold_out:
                    self.machines[f"{zone}/{body['name']}"] = {**body, "status": "RUNNING"}
                return 200, {"name": "operation-1", "status": "RUNNING"}
            case "instances", "GET":
                label, value = parse_qs(url.query)["filter"][0].removeprefix("labels.").split("=")
                mine = [m for at, m in self.machines.items() if at.startswith(zone) and m["labels"][label] == value]
                return 200, {"items": mine} if mine else {}
            case "instances", "DELETE":
                there = self.machines.pop(f"{zone}/{name}", None)
                return (200, {"name": "o", "status": "RUNNING"}) if there else (404, {"error": {"message": "notFound"}})
        raise AssertionError(path)


@pytest.fixture
def compute() -> Iterator[Compute]:
    compute = Compute()

    def answer(asked: Asked) -> Answer:
        return Answer.of_json(*compute.answer(asked.method, asked.path, json.loads(asked.body or b"{}")))

    with answering(answer) as compute.url:
        yield compute


def launcher(url: str | None = None, **more: Any) -> GcpLauncher:
    made = GcpLauncher(GcpConfig.model_validate({**CONFIG, "endpoint_url": url, **more}), width=1)
    made.look_s = 0.01
    return made


def order(option: str = "g2-standard-8 in us-central1-a", **more: Any) -> WorkerOrder:
    return WorkerOrder("c0", "w-0", 1, "preemptible", "tls://10.0.0.1:1", 1, option=option, **more)


def described(value: Any, schema: dict[str, Any], schemas: dict[str, Any], at: str) -> list[str]:
    """What Google's description of its API says against a value."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"]]
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    }  # fmt: skip
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{at} = {value!r} is no {schema['type']}"]
    if isinstance(value, list):
        return [said for each in value for said in described(each, schema["items"], schemas, at)]
    if not isinstance(value, dict):
        return [f"{at} = {value!r} is none of them"] if value not in schema.get("enum", (value,)) else []
    said = []
    for name, each in value.items():
        inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        said += described(each, inner, schemas, f"{at}.{name}") if inner else [f"{at}.{name} does not exist"]
    return said


def test_a_request_is_what_googles_description_of_its_api_allows(tmp_path: Path) -> None:
    import googleapiclient

    documents = Path(googleapiclient.__file__).parent / "discovery_cache/documents"
    schemas = json.loads((documents / "compute.v1.json").read_text())["schemas"]
    tls = Certificates.make(tmp_path / "tls")
    body = launcher().request(order(tls=tls))
    assert described(body, schemas["Instance"], schemas, "instance") == []
    assert described(body | {"labels": 3, "x": 1}, schemas["Instance"], schemas, "instance"), "it is strict"
    scheduling = body["scheduling"]
    assert scheduling["provisioningModel"] == "SPOT" and scheduling["instanceTerminationAction"] == "DELETE"
    assert scheduling["maxRunDuration"] == {"seconds": "86700"}
    assert body["labels"] == {"team": "rl", "pearl-cluster": "c0", "pearl-slot": "w-0", "pearl-life": "1"}
    [script] = [item["value"] for item in body["metadata"]["items"] if item["key"] == "startup-script"]
    assert '"source":"gcp"' in script and "PEARL_TLS" in script
    assert not {"tags", "serviceAccounts"} & body.keys() and "accessConfigs" not in body["networkInterfaces"][0]
    own = [path.read_text().splitlines()[1] for path in tls.directory.glob("*.key")]
    assert not any(key in script for key in own)

    more = launcher(accelerator="nvidia-tesla-t4", service_account="a@p", public_address=True, spot=False)
    body = more.request(order())
    assert described(body, schemas["Instance"], schemas, "instance") == []
    assert body["guestAccelerators"][0]["acceleratorCount"] == 1 and body["networkInterfaces"][0]["accessConfigs"]
    assert body["scheduling"]["provisioningModel"] == "STANDARD" and body["serviceAccounts"][0]["email"] == "a@p"


async def test_a_machine_is_made_found_by_its_label_and_deleted(compute: Compute) -> None:
    made = launcher(compute.url)
    await made.check()
    process = await made.start(order())
    assert await made.left("c0") == ["machine us-central1-a/pearl-c0-w-0-1 (w-0): RUNNING"]
    assert await made.left("c1") == [] and await made.left("c0", "w-1") == []
    process.end()
    await process.ended()
    assert compute.machines == {} and await made.left("c0") == []
    await made.delete([process.machine])


async def test_what_google_says_against_a_request_is_its_reason(compute: Compute) -> None:
    made = launcher(compute.url)
    compute.sold_out = {"us-central1-a"}
    with pytest.raises(LaunchFailed, match="GCP says ZONE_RESOURCE_POOL_EXHAUSTED") as failed:
        await made.start(order())
    assert failed.value.cause is Cause.CAPACITY
    for status, said, cause in (
        (403, "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.", Cause.QUOTA),
        (403, "Required 'compute.instances.create' permission", Cause.CREDENTIALS),
        (404, "The resource 'projects/p/global/images/x' was not found", Cause.CONFIGURATION),
    ):
        compute.refusal = status, said
        with pytest.raises(LaunchFailed) as failed:
            await made.start(order())
        assert failed.value.cause is cause and said in str(failed.value)
    with pytest.raises(UserError, match=r"docs/clusters\.md"):
        await made.check()
    compute.refusal, compute.gpus = None, 8
    with pytest.raises(UserError, match="has 8 GPUs, and a slot takes 1"):
        await made.check()
    with pytest.raises(LaunchFailed) as failed:
        await launcher("http://127.0.0.1:9").left("c0")
    assert failed.value.cause is Cause.UNREACHABLE
