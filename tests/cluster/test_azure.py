"""Requests to Azure: what its own library sends, caught below it and answered there. Nothing here was run against the
real service."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from pearl.cluster.azure import AzureLauncher
from pearl.cluster.certificates import Certificates
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.config.clouds import AzureConfig
from pearl.core.requests import Cause
from pearl.errors import UserError

pytest.importorskip("azure.mgmt.compute", reason="needs pip install 'pearl-rl[azure]'")

CONFIG = {
    "subscription": "s", "resource_group": "rg", "location": "westeurope", "sizes": ("Standard_NC4as_T4_v3", "Small"),
    "image": "/images/pearl", "vnet": "net", "security_group": "closed", "labels": {"team": "rl"},
}  # fmt: skip


class Azure:
    """One resource group: its resources by kind and name."""

    def __init__(self) -> None:
        self.there: dict[str, dict[str, Any]] = {
            "virtualMachines": {},
            "networkInterfaces": {},
            "publicIPAddresses": {},
        }
        self.sent: dict[str, dict[str, Any]] = {}
        self.refusal: tuple[int, str, str] | None = None
        """Of machines."""
        self.gpus = 1

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        path = urlsplit(url).path
        if path.endswith("/skus"):
            has = [{"name": "GPUs", "value": str(self.gpus)}]
            return 200, {
                "value": [{"name": n, "resourceType": "virtualMachines", "capabilities": has} for n in CONFIG["sizes"]]
            }
        if path.endswith("/subnets"):
            return 200, {"value": [{"id": "/subnets/first", "name": "first"}]}
        if "networkSecurityGroups" in path:
            return 200, {"id": "/groups/closed", "name": "closed"}
        found = re.search(r"/resourceGroups/rg/providers/[^/]+/(\w+)(?:/([^/]+))?$", path)
        assert found, path
        kind, name = found.groups()
        resources = self.there[kind]
        if kind == "virtualMachines" and self.refusal:
            status, code, message = self.refusal
            if method == "PUT" or status == 403:
                return status, {"error": {"code": code, "message": message}}
        if method == "PUT":
            self.sent[kind] = body
            own = {**body.get("properties", {}), "provisioningState": "Succeeded"}
            resources[name] = {**body, "id": f"/{kind}/{name}", "name": name, "properties": own}
            for address in own.get("ipConfigurations", ()):
                address.setdefault("properties", {})["privateIPAddress"] = "10.0.0.9"
            return 200, resources[name]
        if name is None:
            return 200, {"value": list(resources.values())}
        if name not in resources:
            return 404, {"error": {"code": "ResourceNotFound", "message": f"{name} was not found"}}
        if method == "DELETE":
            del resources[name]
            if kind == "virtualMachines":  # by its delete option
                self.there["networkInterfaces"].pop(name, None)
            return 200, {}
        return 200, resources[name]


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Azure:
    from azure.core.credentials import AccessToken, AccessTokenInfo
    from azure.core.pipeline.transport import RequestsTransport
    from azure.mgmt.compute import ComputeManagementClient
    from azure.mgmt.network import NetworkManagementClient
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPResponse

    azure = Azure()

    class Wire(HTTPAdapter):
        def send(self, request: Any, *_: Any, **__: Any) -> Any:
            status, said = azure.answer(request.method, request.url, json.loads(request.body or "null"))
            form, content = {"Content-Type": "application/json"}, io.BytesIO(json.dumps(said).encode())
            return self.build_response(request, HTTPResponse(content, form, status, preload_content=False))

    session = requests.Session()
    session.mount("https://", Wire())

    class Someone:
        def get_token(self, *_: Any, **__: Any) -> AccessToken:
            return AccessToken("t", int(time.time()) + 3600)

        def get_token_info(self, *_: Any, **__: Any) -> AccessTokenInfo:
            return AccessTokenInfo("t", int(time.time()) + 3600)

    def clients(_: AzureLauncher) -> tuple[Any, Any]:
        own: dict[str, Any] = {"retry_total": 0, "polling_interval": 0}
        own["transport"] = RequestsTransport(session=session, session_owner=False)
        return ComputeManagementClient(Someone(), "s", **own), NetworkManagementClient(Someone(), "s", **own)

    monkeypatch.setattr(AzureLauncher, "clients", clients)
    return azure


def launcher(**more: Any) -> AzureLauncher:
    made = AzureLauncher(AzureConfig.model_validate({**CONFIG, **more}), width=1)
    made.look_s = 0.01
    return made


def order(option: str = "Standard_NC4as_T4_v3", **more: Any) -> WorkerOrder:
    return WorkerOrder("c0", "w-0", 1, "preemptible", "tls://10.0.0.1:1", 1, option=option, **more)


async def test_a_machine_is_made_found_by_its_tag_and_deleted_with_its_network(azure: Azure, tmp_path: Path) -> None:
    made = launcher(zones=("1", "2"), max_price_usd=0.5, public_address=True)
    await made.check()
    assert made.options[:2] == ("Standard_NC4as_T4_v3 in 1", "Small in 1")
    tls = Certificates.make(tmp_path / "tls")
    process = await made.start(order(made.options[0], tls=tls))
    machine, network = azure.sent["virtualMachines"], azure.sent["networkInterfaces"]
    own = machine["properties"]
    assert machine["zones"] == ["1"] and own["hardwareProfile"] == {"vmSize": "Standard_NC4as_T4_v3"}
    assert (
        own["priority"] == "Spot" and own["evictionPolicy"] == "Delete" and own["billingProfile"] == {"maxPrice": 0.5}
    )
    assert own["storageProfile"]["imageReference"] == {"id": "/images/pearl"}
    assert own["storageProfile"]["osDisk"]["deleteOption"] == "Delete"
    [interface] = own["networkProfile"]["networkInterfaces"]
    assert interface["properties"] == {"deleteOption": "Delete"}
    assert network["properties"]["networkSecurityGroup"]["id"] == "/groups/closed"
    tags = {"team": "rl", "pearl-cluster": "c0", "pearl-slot": "w-0", "pearl-life": "1"}
    assert machine["tags"] == network["tags"] == azure.sent["publicIPAddresses"]["tags"] == tags
    script = base64.b64decode(own["osProfile"]["customData"]).decode()
    assert script.startswith("#!/bin/sh") and '"source":"azure"' in script
    keys = [path.read_text().splitlines()[1] for path in tls.directory.glob("*.key")]
    assert "PEARL_TLS" in script and not any(key in script for key in keys)

    assert await made.left("c0") == ["machine pearl-c0-w-0-1 (w-0): Succeeded"] and await made.left("c1") == []
    process.end()
    await made.sweep("c0")
    assert not any(azure.there.values()) and await made.left("c0") == []
    await process.ended()


async def test_what_azure_says_against_a_request_is_its_reason_and_leaves_nothing(azure: Azure) -> None:
    made = launcher()
    for status, code, cause in (
        (409, "SkuNotAvailable", Cause.CAPACITY),
        (409, "OperationNotAllowed", Cause.QUOTA),
        (403, "AuthorizationFailed", Cause.CREDENTIALS),
        (400, "InvalidParameter", Cause.CONFIGURATION),
    ):
        azure.refusal = status, code, f"{code} it is"
        with pytest.raises(LaunchFailed, match=f"Azure says {code}: {code} it is") as failed:
            await made.start(order())
        assert failed.value.cause is cause
        if status != 403:
            await made.sweep("c0")
            assert not any(azure.there.values()), code
    azure.refusal, azure.gpus = None, 8
    with pytest.raises(UserError, match="has 8 GPUs, and a slot takes 1"):
        await made.check()
    with pytest.raises(UserError, match="there is no Huge in westeurope"):
        await launcher(sizes=("Huge",)).check()
