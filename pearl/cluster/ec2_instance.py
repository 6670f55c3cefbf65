"""dask-cloudprovider's EC2Instance, for our worker. Needs that package.

Used: the request for one machine and its market options, the session, the creation. Not used, and why: its cloud-init
template (Docker only; the driver's Dask configuration goes into it, our certificate does not), its defaults for network
and image (its security group opens the scheduler to the world), its ten retries (a sold-out type is asked again for
minutes while another one is free), its wait for an address, and EC2Cluster (which kills workers to scale down, and
knows its machines only as long as its process lives).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiobotocore.session import get_session
from botocore.config import Config
from dask_cloudprovider.aws.ec2 import EC2Instance

from pearl.config.clouds import Ec2Config

OPEN = "open"
"""Placeholder for what EC2 or the launch template is to say: an empty value would make EC2Instance choose."""
CLIENT = Config(retries={"mode": "standard", "total_max_attempts": 3}, connect_timeout=10, read_timeout=30)


class Account:
    """Who asks EC2, by your AWS configuration."""

    def __init__(self, config: Ec2Config) -> None:
        self.config = config
        self._session = get_session()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Of the EC2 interface."""
        region, url = self.config.region, self.config.endpoint_url
        async with self._session.create_client("ec2", region_name=region, endpoint_url=url, config=CLIENT) as client:
            yield client


class SpotInstance(EC2Instance):
    """One machine, which has its tags from birth."""

    def __init__(
        self, account: Account, instance_type: str, place: str, token: str, tags: Mapping[str, str], script: str
    ) -> None:
        """`place`: an availability zone, a subnet, or "" for what EC2 chooses; `token`: of this request alone."""
        self.account, self.token, self.script = account, token, script
        config = account.config
        super().__init__(
            self,
            {},
            region=config.region,
            ami=config.image or OPEN,
            instance_type=instance_type,
            vpc=OPEN,
            subnet_id=place if place.startswith("subnet-") else OPEN,
            availability_zone=None if place.startswith("subnet-") else place,
            security_groups=list(config.security_groups) or [OPEN],
            filesystem_size=config.disk_gb,
            iam_instance_profile={"Name": config.instance_profile} if config.instance_profile else None,
            instance_tags=dict(tags),
            volume_tags=dict(tags),
            use_private_ip=not config.public_address,
            enable_detailed_monitoring=False,
            spot=config.spot,
        )
        self.boto_session = self  # we are all that EC2Instance needs of its cluster
        self.dry = False
        """Only ask whether it would be given."""

    @contextlib.asynccontextmanager
    async def create_client(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """As a session would; the request goes through `request`."""
        async with self.account.client() as client:
            client.meta.events.register("provide-client-params.ec2.RunInstances", self.request)
            yield client

    def render_process_cloud_init(self, _: EC2Instance) -> str:
        return self.script

    async def configure_vm(self, _: Any) -> tuple[str | None, None]:
        return self.instance.get("PrivateIpAddress"), None

    def request(self, params: dict[str, Any], **context: Any) -> dict[str, Any]:
        """That of EC2Instance, with what it does not know, and without what nobody said."""
        config = self.account.config
        params |= {"ClientToken": self.token, "MetadataOptions": {"HttpTokens": "required"}, "DryRun": self.dry}
        network = params["NetworkInterfaces"][0]
        if network["Groups"] == [OPEN]:
            del network["Groups"]
        if network["SubnetId"] == OPEN:
            del network["SubnetId"]
        if config.launch_template is not None:
            name, _, version = config.launch_template.partition(":")
            template = {"LaunchTemplateId" if name.startswith("lt-") else "LaunchTemplateName": name}
            params["LaunchTemplate"] = template | ({"Version": version} if version else {})
            if not {"Groups", "SubnetId"} & network.keys() and not config.public_address:
                del params["NetworkInterfaces"]
        if params["ImageId"] == OPEN:
            del params["ImageId"]
        if config.disk_gb is None:
            del params["BlockDeviceMappings"]
        else:
            [disk] = params["BlockDeviceMappings"]
            del disk["VirtualName"]
            disk["DeviceName"], disk["Ebs"]["Encrypted"] = config.root_device, True
        if config.spot:
            options: dict[str, str] = params["InstanceMarketOptions"]["SpotOptions"]
            options["InstanceInterruptionBehavior"] = "terminate"
            if config.max_price_usd is not None:
                options["MaxPrice"] = f"{config.max_price_usd:.4f}"
        return params
