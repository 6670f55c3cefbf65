"""One Azure machine per slot: spot unless it is said otherwise, several sizes and zones in turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.machines import (
    CLUSTER,
    SLOT,
    Machine,
    MachineLauncher,
    answered,
    machine_name,
    pairs,
    start_script,
    tags,
)  # fmt: skip
from pearl.config.clouds import AzureConfig
from pearl.core.requests import Cause
from pearl.errors import UserError

ALIVE = ("Creating", "Updating", "Succeeded")
SUBSCRIPTION = "AZURE_SUBSCRIPTION_ID"


class AzureLauncher(MachineLauncher):
    name = "Azure"
    causes = (
        (Cause.QUOTA, "Quota|OperationNotAllowed"),
        (
            Cause.CAPACITY,
            "SkuNotAvailable|AllocationFailed|Overconstrained|Evicted|Preempt",
        ),
        (Cause.CREDENTIALS, "Authorization|Authentication|Credential|Forbidden|InvalidAuthenticationToken|ExpiredAuth"),
        (Cause.CONFIGURATION, "Invalid|NotFound|BadRequest|Parameter|Conflict|Unsupported"),
        (Cause.UNREACHABLE, "ServiceRequestError|ServiceResponse|timed out|timeout|resolve"),
    )

    def __init__(self, config: AzureConfig, width: int, *, free: bool = False) -> None:
        self.config = config
        self._choices = pairs(config.sizes, config.zones)
        super().__init__(tuple(self._choices), width, free=free)
        self._clients: tuple[Any, Any] | None = None

    async def check(self) -> None:
        """The account may look at the region, and the sizes are there with the GPUs of a slot."""
        try:
            from pearl.cluster import azure_vm  # noqa: F401
        except ImportError as error:
            said = f"cluster.kind = azure needs dask-cloudprovider with Azure's packages ({error})"
            raise UserError(said, "pip install 'pearl-rl[azure]'") from None
        if not (self.config.subscription or os.environ.get(SUBSCRIPTION)):
            raise UserError("cluster.azure.subscription is not set", f"Set it, or {SUBSCRIPTION}.")
        only = f"location eq '{self.config.location}'"
        try:
            skus = await self._ask(lambda compute, _: list(compute.resource_skus.list(filter=only)))
        except LaunchFailed as error:
            raise UserError(str(error), "See docs/clusters.md, Azure: keys and permissions.") from None
        there = {sku.name: sku for sku in skus if sku.resource_type == "virtualMachines"}
        for size in self.config.sizes:
            if size not in there:
                said = f"cluster.azure.sizes: there is no {size} in {self.config.location} for this subscription"
                raise UserError(said, "az vm list-skus --location … lists them.")
            gpus = sum(int(c.value) for c in there[size].capabilities or () if c.name == "GPUs")
            if gpus not in (0, self.width):
                raise UserError(
                    f"cluster.azure.sizes: {size} has {gpus} GPUs, and a slot takes {self.width}",
                    "Name a size with as many as engine.tensor_parallel.",
                )

    async def create(self, order: WorkerOrder) -> Machine:
        from pearl.cluster.azure_vm import SpotVM

        size, zone = self._choices[order.option]
        name, script = machine_name(order), start_script(order, self.config, "azure", free=self.free)
        machine = Machine(name, order.slot, "Creating", alive=True, there=True)
        compute, network = await self._ask(lambda compute, network: (compute, network))
        asked = SpotVM(self.config, compute, network, size, zone, name, tags(order, self.config), script)
        try:
            await self._saying(asked.create_vm())
        except LaunchFailed:
            await self.delete([machine])  # its network interface was made before it
            raise
        return machine

    async def find(self, cluster: str) -> list[Machine]:
        """Network interfaces and addresses that are left count as one, too."""
        group = self.config.resource_group

        def listed(compute: Any, network: Any) -> list[Machine]:
            machines = {}
            for vm in compute.virtual_machines.list(group):
                if (vm.tags or {}).get(CLUSTER) == cluster:
                    state = vm.provisioning_state
                    machines[vm.name] = Machine(vm.name, vm.tags[SLOT], state, state in ALIVE, there=True)
            for left in (*network.network_interfaces.list(group), *network.public_ip_addresses.list(group)):
                if (left.tags or {}).get(CLUSTER) == cluster:
                    machines.setdefault(left.name, Machine(left.name, left.tags[SLOT], "only its network", False, True))
            return list(machines.values())

        return await self._ask(listed)

    async def delete(self, machines: Sequence[Machine]) -> None:
        """A machine first; what it does not take with it when it goes, at the next time of asking."""
        group = self.config.resource_group

        def deleted(compute: Any, network: Any) -> None:
            from azure.core.exceptions import ResourceNotFoundError

            for machine in machines:
                try:
                    compute.virtual_machines.get(group, machine.id)
                    compute.virtual_machines.begin_delete(group, machine.id, force_deletion=True)
                    continue
                except ResourceNotFoundError:
                    pass
                for kind in (network.network_interfaces, network.public_ip_addresses):
                    try:
                        kind.get(group, machine.id)
                        kind.begin_delete(group, machine.id)
                        break
                    except ResourceNotFoundError:
                        continue

        await self._ask(deleted)

    async def _ask(self, question: Callable[[Any, Any], Any]) -> Any:
        """Of the clients for machines and networks, in a thread."""

        def asked() -> Any:
            if self._clients is None:
                self._clients = self.clients()
            return question(*self._clients)

        return await self._saying(answered("Azure", asyncio.to_thread(asked)))

    async def _saying(self, asked: Any) -> Any:
        """What Azure (or the way to it) says against a request becomes LaunchFailed."""
        from azure.core.exceptions import AzureError, HttpResponseError

        try:
            return await asked
        except (AzureError, OSError) as error:
            said = f"{type(error).__name__}: {error.message if isinstance(error, AzureError) else error}"
            if isinstance(error, HttpResponseError) and error.error is not None:
                said = f"{error.error.code}: {error.error.message}"
            raise LaunchFailed(f"Azure says {said}", self.cause_of(said)) from None

    def clients(self) -> tuple[Any, Any]:
        """Of machines and networks, by the credentials that Azure's library finds."""
        from azure.identity import DefaultAzureCredential
        from azure.mgmt.compute import ComputeManagementClient
        from azure.mgmt.network import NetworkManagementClient

        own = DefaultAzureCredential(), self.config.subscription or os.environ[SUBSCRIPTION]
        return ComputeManagementClient(*own), NetworkManagementClient(*own)
