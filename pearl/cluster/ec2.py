"""One EC2 machine per slot: spot unless it is said otherwise, several instance types and zones in turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.machines import CLUSTER, SLOT, Machine, MachineLauncher, machine_name, pairs, start_script, tags
from pearl.config.clouds import Ec2Config
from pearl.core.requests import Cause
from pearl.errors import UserError

if TYPE_CHECKING:
    from pearl.cluster.ec2_instance import Account

ALIVE = ("pending", "running")
THERE = (*ALIVE, "stopping", "stopped")
"""A machine that shuts down is no longer paid, and cannot be kept from it."""
TOKEN_CHARACTERS = 64
"""Of a request."""


class Ec2Launcher(MachineLauncher):
    name = "EC2"
    causes = (
        (Cause.QUOTA, "VcpuLimitExceeded|LimitExceeded|MaxSpotInstanceCountExceeded"),
        (Cause.CAPACITY, "Insufficient|SpotMaxPriceTooLow|SpotInstanceTermination|max-price"),
        (
            Cause.CREDENTIALS,
            "AuthFailure|Unauthorized|InvalidClientTokenId|ExpiredToken|RequestExpired|OptInRequired|Blocked|"
            "SignatureDoesNotMatch|credentials|token",
        ),
        (Cause.CONFIGURATION, "Invalid|Unsupported|Missing|Malformed|NotFound|VolumeLimit"),
        (Cause.UNREACHABLE, "could not connect|timeout|timed out|connection|Unavailable|InternalError"),
    )

    def __init__(self, config: Ec2Config, width: int, *, free: bool = False) -> None:
        self.config = config
        self._choices = pairs(config.instance_types, config.places)
        super().__init__(tuple(self._choices), width, free=free)
        self._gpus: dict[str, int] = {}
        self._account: Account | None = None

    async def check(self) -> None:
        """May ask EC2 for such machines, and they have the GPUs of a slot."""
        try:
            from pearl.cluster.ec2_instance import Account, SpotInstance
        except ImportError as error:
            said = f"cluster.kind = ec2 needs dask-cloudprovider ({error})"
            raise UserError(said, "pip install 'pearl-rl[ec2]'") from None
        self._account = Account(self.config)
        try:
            async with self._asking() as client:
                found = await client.describe_instance_types(InstanceTypes=list(self.config.instance_types))
            for entry in found["InstanceTypes"]:
                gpus = sum(gpu["Count"] for gpu in entry.get("GpuInfo", {}).get("Gpus", ()))
                self._gpus[entry["InstanceType"]] = gpus
            kind, place = self._choices[self.options[0]]
            trial = SpotInstance(self._account, kind, place, "pearl-check", {CLUSTER: "check"}, "")
            trial.dry = True
            async with self._asking():
                await trial.create_vm()
        except LaunchFailed as error:
            if "DryRunOperation" not in str(error):
                raise UserError(str(error), "See docs/clusters.md, EC2: keys and permissions.") from None
        for kind, gpus in self._gpus.items():
            if gpus not in (0, self.width):
                raise UserError(
                    f"cluster.ec2.instance_types: {kind} has {gpus} GPUs, and a slot takes {self.width}",
                    "Name a type with as many as engine.tensor_parallel.",
                )

    async def create(self, order: WorkerOrder) -> Machine:
        from pearl.cluster.ec2_instance import SpotInstance

        kind, place = self._choices[order.option]
        if order.gpus and not self._gpus.get(kind, order.gpus):
            raise LaunchFailed(f"{kind} has no GPU", Cause.CONFIGURATION)
        labels = {"Name": machine_name(order), **tags(order, self.config)}
        token = machine_name(order)[-TOKEN_CHARACTERS:]
        script = start_script(order, self.config, "ec2", free=self.free)
        machine = SpotInstance(self._of_account(), kind, place, token, labels, script)
        async with self._asking():
            await machine.create_vm()
        return _machine(machine.instance)

    async def find(self, cluster: str) -> list[Machine]:
        mine = [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}]
        async with self._asking() as client:
            pages = client.get_paginator("describe_instances").paginate(Filters=mine)
            return [_machine(i) async for page in pages for r in page["Reservations"] for i in r["Instances"]]

    async def delete(self, machines: Sequence[Machine]) -> None:
        if machines:
            async with self._asking() as client:
                await client.terminate_instances(InstanceIds=[machine.id for machine in machines])

    def _of_account(self) -> Account:
        if self._account is None:
            from pearl.cluster.ec2_instance import Account

            self._account = Account(self.config)
        return self._account

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[Any]:
        """A client; what EC2 (or the way to it) says against a request becomes LaunchFailed."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            async with self._of_account().client() as client:
                yield client
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, ClientError):
                fault = error.response.get("Error", {})
                said = f"{fault.get('Code')}: {fault.get('Message')}"
            raise LaunchFailed(f"EC2 says {said}", self.cause_of(said)) from None


def _machine(instance: dict[str, Any]) -> Machine:
    state = instance["State"]["Name"]
    labels = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
    said = instance.get("StateReason", {}).get("Message", "") or instance.get("StateTransitionReason", "")
    return Machine(
        instance["InstanceId"],
        labels.get(SLOT, ""),
        state,
        state in ALIVE,
        state in THERE,
        "" if state in ALIVE else said,
    )
