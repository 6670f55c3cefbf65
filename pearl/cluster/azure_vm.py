"""dask-cloudprovider's AzureVM, for our worker. Needs that package and Azure's.

Used: the requests for address, network interface and machine, and their order. Not used, and why: its cloud-init
(Docker only, with the driver's Dask configuration), its deletion (it knows its machine only as long as its process
lives) and AzureVMCluster. Its requests are amended on their way: disk, interface and address would outlive an eviction.
It writes for the Azure libraries of 2025 (the extra `azure` pins them); newer ones send its requests on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from dask_cloudprovider.azure.azurevm import AzureVM

from pearl.cluster.machines import answered
from pearl.config.clouds import AzureConfig

DELETE = "Delete"


class Amended:
    """Operations of a client (or a client of several), whose `begin_create_or_update` sends another request."""

    def __init__(self, inner: Any, amend: Callable[[dict[str, Any]], None]) -> None:
        self._inner, self._amend = inner, amend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_create_or_update(self, group: str, name: str, parameters: dict[str, Any]) -> Any:
        self._amend(parameters)
        return self._inner.begin_create_or_update(group, name, parameters)


class SpotVM(AzureVM):
    """One machine. It is all that AzureVM needs of its cluster, too."""

    def __init__(
        self, config: AzureConfig, compute: Any, network: Any, size: str, zone: str, name: str, tags: Mapping[str, str],
        script: str,
    ) -> None:  # fmt: skip
        self.own, self._tags, self.script = config, dict(tags), script
        options: dict[str, Any] = {"zones": [zone]} if zone else {}
        if config.spot:
            price = {"max_price": -1.0 if config.max_price_usd is None else config.max_price_usd}
            options |= {"priority": "Spot", "eviction_policy": DELETE, "billing_profile": price}
        super().__init__(
            self,
            {},
            location=config.location,
            vnet=config.vnet,
            subnet=config.subnet,
            public_ingress=config.public_address,
            security_group=config.security_group,
            vm_size=size,
            vm_image={"id": config.image},
            disk_size=config.disk_gb,
            extra_vm_options=options,
        )
        self.cluster, self.debug, self.resource_group = self, False, config.resource_group
        self.name, self.nic_name = name, name
        self.compute_client = _Client(compute, "virtual_machines", self._amend_machine)
        self.network_client = _Client(network, "network_interfaces", self._amend_interface)

    def render_process_cloud_init(self, _: AzureVM) -> str:
        return self.script

    def get_tags(self) -> dict[str, str]:
        return self._tags

    def _log(self, said: str) -> None:
        """Its progress is ours to report."""

    async def call_async(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await answered("Azure", asyncio.to_thread(f, *args, **kwargs))

    def _amend_machine(self, request: dict[str, Any]) -> None:
        request["storage_profile"]["os_disk"]["delete_option"] = DELETE
        for interface in request["network_profile"]["network_interfaces"]:
            interface["delete_option"] = DELETE

    def _amend_interface(self, request: dict[str, Any]) -> None:
        for address in request["ip_configurations"]:
            if "public_ip_address" in address:
                address["public_ip_address"]["delete_option"] = DELETE


class _Client:
    """A client, one of whose groups of operations is amended."""

    def __init__(self, inner: Any, group: str, amend: Callable[[dict[str, Any]], None]) -> None:
        self._inner = inner
        setattr(self, group, Amended(getattr(inner, group), amend))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
