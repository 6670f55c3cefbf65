"""One Compute Engine machine per slot: spot unless it is said otherwise, several machine types and zones in turn.

dask-cloudprovider's GCPInstance writes the request. Not used of it, and why: its cloud-init (Docker only, with the
driver's Dask configuration), its creation (it asks after the machine and not after the operation, so a sold-out zone is
"Missing Instance") and its defaults (tags that open web ports, the right to write your buckets).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.machines import (
    CLUSTER,
    LATE_S,
    SLOT,
    Machine,
    MachineLauncher,
    answered,
    machine_name,
    pairs,
    start_script,
    tags,
)  # fmt: skip
from pearl.config.clouds import GcpConfig
from pearl.core.requests import Cause
from pearl.errors import UserError

ALIVE = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
NOT_THERE, CONFLICT = 404, 409


class GcpLauncher(MachineLauncher):
    name = "GCP"
    causes = (
        (Cause.QUOTA, "quota|rateLimitExceeded|limitExceeded"),
        (Cause.CAPACITY, "RESOURCE_POOL_EXHAUSTED|stockout|does not have enough resources|preempted"),
        (Cause.CREDENTIALS, r"\b401\b|\b403\b|credentials|permission|forbidden|refresh"),
        (Cause.CONFIGURATION, r"\b400\b|\b404\b|invalid|notFound|was not found"),
        (Cause.UNREACHABLE, r"timed out|timeout|refused|unreachable|resolve|unable to find the server|\b5\d\d\b"),
    )

    def __init__(self, config: GcpConfig, width: int, *, free: bool = False) -> None:
        self.config = config
        self._choices = pairs(config.machine_types, config.zones)
        super().__init__(tuple(self._choices), width, free=free)
        self._compute: Any = None

    async def check(self) -> None:
        """The account may look, the types exist and have the GPUs of a slot."""
        try:
            import dask_cloudprovider.gcp.instances  # noqa: F401
        except ImportError as error:
            said = f"cluster.kind = gcp needs dask-cloudprovider with its Google packages ({error})"
            raise UserError(said, "pip install 'pearl-rl[gcp]'") from None
        for kind, zone in self._choices.values():
            try:
                found = await self._ask("machineTypes", "get", zone=zone, machineType=kind)
            except LaunchFailed as error:
                raise UserError(str(error), "See docs/clusters.md, GCP: keys and permissions.") from None
            gpus = sum(each["guestAcceleratorCount"] for each in found.get("accelerators", ()))
            if gpus not in (0, self.width) or (gpus and self.config.accelerator):
                brings = f"{gpus} GPUs" + (f" beside {self.config.accelerator}" if self.config.accelerator else "")
                raise UserError(
                    f"cluster.gcp.machine_types: {kind} has {brings}, and a slot takes {self.width}",
                    "Name a type with as many as engine.tensor_parallel, or one with none and an accelerator.",
                )

    async def create(self, order: WorkerOrder) -> Machine:
        _, zone = self._choices[order.option]
        body = self.request(order)
        once = str(uuid.uuid5(uuid.NAMESPACE_URL, body["name"]))
        operation = await self._ask("instances", "insert", zone=zone, body=body, requestId=once)
        machine = Machine(f"{zone}/{body['name']}", order.slot, "PROVISIONING", alive=True, there=True)
        try:
            while operation["status"] != "DONE":
                operation = await self._ask("zoneOperations", "wait", zone=zone, operation=operation["name"])
        except LaunchFailed:
            await self.delete([machine])
            raise
        if errors := operation.get("error", {}).get("errors"):
            said = "; ".join(f"{error['code']}: {error.get('message', '')}" for error in errors)
            raise LaunchFailed(f"GCP says {said}", self.cause_of(said))
        return machine

    async def find(self, cluster: str) -> list[Machine]:
        mine, machines = f"labels.{CLUSTER}={cluster}", []
        for zone in self.config.zones:
            token: str | None = None
            while True:
                page = await self._ask("instances", "list", zone=zone, filter=mine, pageToken=token)
                for found in page.get("items", ()):
                    name, slot, state = f"{zone}/{found['name']}", found["labels"][SLOT], found["status"]
                    said = found.get("statusMessage", "")
                    machines.append(Machine(name, slot, state, state in ALIVE, there=True, reason=said))
                if not (token := page.get("nextPageToken")):
                    break
        return machines

    async def delete(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            zone, name = machine.id.split("/")
            await self._ask("instances", "delete", passing=(NOT_THERE, CONFLICT), zone=zone, instance=name)

    def request(self, order: WorkerOrder) -> dict[str, Any]:
        """The body of `instances.insert`: that of GCPInstance, with spot options, lifetime and start script."""
        from dask_cloudprovider.gcp.instances import GCPInstance

        config, (kind, zone) = self.config, self._choices[order.option]
        instance = GCPInstance(
            cluster=None,
            config={"instance_labels": {}, "on_host_maintenance": "TERMINATE", "public_ingress": config.public_address},
            zone=zone,
            projectid=config.project,
            machine_type=kind,
            filesystem_size=config.disk_gb,
            disk_type=config.disk_type,
            source_image=config.image,
            network=config.network,
            ngpus=order.gpus if config.accelerator else None,
            gpu_type=config.accelerator,
            preemptible=config.spot,
            instance_labels={},
            service_account=config.service_account,
        )
        instance.name, instance.cloud_init = machine_name(order), ""
        body: dict[str, Any] = _with_booleans(instance.create_gcp_config())
        for key in ("tags", "reservationAffinity", "serviceAccounts"):
            del body[key]
        for disk in body["disks"]:
            del disk["diskEncryptionKey"]
            disk["initializeParams"]["diskSizeGb"] = str(config.disk_gb)
            disk["initializeParams"]["labels"] = tags(order, config)
        if config.service_account:
            body["serviceAccounts"] = [{"email": config.service_account, "scopes": [SCOPE]}]
        script = start_script(order, config, "gcp", free=self.free)
        return body | {
            "labels": tags(order, config),
            "metadata": {"items": [{"key": "startup-script", "value": script}]},
            "scheduling": {
                "provisioningModel": "SPOT" if config.spot else "STANDARD",
                "preemptible": config.spot,
                "onHostMaintenance": "TERMINATE",
                "automaticRestart": False,
                "instanceTerminationAction": "DELETE",
                "maxRunDuration": {"seconds": str(round(config.lifetime_s + LATE_S))},
            },
        }

    async def _ask(self, kind: str, method: str, *, passing: Sequence[int] = (), **what: Any) -> dict[str, Any]:
        """Its answer; nothing for a status in `passing`. What GCP (or the way to it) says against it: LaunchFailed."""
        from google.auth.exceptions import GoogleAuthError
        from googleapiclient.errors import Error, HttpError
        from httplib2 import HttpLib2Error

        try:
            if self._compute is None:
                self._compute = await answered("GCP", asyncio.to_thread(self._client))
            request = getattr(getattr(self._compute, kind)(), method)(project=self.config.project, **what)
            answer: dict[str, Any] = await answered("GCP", asyncio.to_thread(request.execute))
            return answer
        except (Error, HttpLib2Error, GoogleAuthError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, HttpError):
                if error.status_code in passing:
                    return {}
                said = f"{error.status_code}: {error.reason} {error.error_details}"
            raise LaunchFailed(f"GCP says {said}", self.cause_of(said)) from None

    def _client(self) -> Any:
        """With the package's transport, which several threads may use."""
        import google.auth
        import googleapiclient.discovery
        from dask_cloudprovider.gcp.utils import build_request
        from google.auth.credentials import AnonymousCredentials

        url = self.config.endpoint_url
        credentials = AnonymousCredentials() if url else google.auth.default([SCOPE])[0]
        return googleapiclient.discovery.build(
            "compute",
            "v1",
            credentials=credentials,
            requestBuilder=build_request(None if url else credentials),
            client_options={"api_endpoint": f"{url}/compute/v1/"} if url else None,
            static_discovery=True,
        )


def _with_booleans(value: Any) -> Any:
    """The package writes them as text."""
    if isinstance(value, dict):
        return {name: _with_booleans(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_booleans(each) for each in value]
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
