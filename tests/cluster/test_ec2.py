"""Slots as EC2 machines: a moto server over HTTP, machines that run their user-data, a metadata service that warns."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.certificates import Certificates
from pearl.cluster.ec2 import Ec2Launcher
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.local import LocalCluster
from pearl.cluster.machines import start_script
from pearl.config.clouds import Ec2Config
from pearl.config.cluster import NoticesConfig
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.aws import IMAGE, REFUSALS, Aws, BootAgent, aws
from tests.cluster.clouds import Cloud, serving
from tests.cluster.commands import Commands, here, killed_at_every_moment
from tests.cluster.support import EVENT_S, ROOT, START_S

ONE_GPU = SlotShape(gpus=1)
KEY = "AKIAPEARLTESTKEY0000"
SECRET = "pearl-test-secret-key"
TYPES = ("g6e.xlarge", "g6.xlarge")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dask_cloudprovider.aws", reason="needs pip install 'pearl-rl[ec2]'")
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    with aws(tmp_path_factory.mktemp("aws") / "moto") as server:
        yield server


@pytest.fixture
def cloud(keys: None, server: Aws) -> Aws:
    server.reset()
    return server


def config(cloud: Aws, **more: Any) -> Ec2Config:
    fields: dict[str, Any] = {
        "region": "us-east-1",
        "instance_types": TYPES,
        "image": IMAGE,
        "endpoint_url": cloud.url,
        "directory": str(ROOT),
        "python": sys.executable,
    }
    if "security_groups" not in more and "launch_template" not in more:
        more["security_groups"] = (cloud.security_group(),)
    return Ec2Config(**{**fields, **more})


def order(cluster: str = "c0", option: str = TYPES[0], **more: Any) -> WorkerOrder:
    return WorkerOrder(cluster, "w-0", 1, "preemptible", "tcp://127.0.0.1:1", 1, option=option, **more)


class Setup:
    def __init__(self, folder: Path, cloud: Aws, metadata: Cloud) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        notices = NoticesConfig(url=metadata.url, poll_s=0.2)
        self.cluster = LocalCluster(folder / "workers", lambda *_: None, notices=notices)
        self.launcher = Ec2Launcher(config(cloud), width=1)
        self.launcher.look_s = 0.2
        self.cluster.launchers[Zone.PREEMPTIBLE] = self.launcher
        bindings = [Binding(f"preemptible-{i}", Zone.PREEMPTIBLE, (), 1, elsewhere=True) for i in range(2)]
        self.adapter = LaunchingAdapter(self.cluster, bindings, self.events.put_nowait, START_S)

    async def event(self, kind: type[Event]) -> Any:
        event = await asyncio.wait_for(self.events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event


@pytest.fixture
async def setup(cloud: Aws, tmp_path: Path) -> AsyncIterator[Setup]:
    with serving() as metadata:
        setup = Setup(tmp_path, cloud, metadata)
        setup.metadata = metadata  # type: ignore[attr-defined]
        async with setup.cluster:
            await setup.adapter.connect()
            yield setup
            await setup.adapter.close()


@pytest.mark.slow
async def test_machines_become_slots_get_notice_from_their_metadata_service_and_are_terminated(
    cloud: Aws, setup: Setup, tmp_path: Path
) -> None:
    strangers = await asyncio.to_thread(
        cloud.client().run_instances, ImageId=IMAGE, MinCount=1, MaxCount=1, InstanceType="t3.micro"
    )
    stranger = strangers["Instances"][0]["InstanceId"]
    cloud.asked.clear()
    cloud.refused[TYPES[0]] = "InsufficientInstanceCapacity"
    with BootAgent(cloud, tmp_path / "machines"):
        await setup.adapter.request(Zone.PREEMPTIBLE, 1, ONE_GPU)
        failed = await setup.event(RequestFailed)
        assert (failed.cause, failed.option, failed.again_s) == (Cause.CAPACITY, TYPES[0], 0)
        joined = await setup.event(SlotJoined)
        [machine] = set(cloud.alive()) - {stranger}
        assert joined.slot.gpus == (f"{machine}/0",)
        assert [asked["InstanceType"] for asked in cloud.asked][-1] == TYPES[1] and len(cloud.asked) <= 4, (
            "not for long"
        )

        setup.metadata.preempt(120)  # type: ignore[attr-defined]
        notice = await setup.event(SlotNotice)
        assert notice.worker == joined.slot.name and 100 < notice.seconds_left <= 120
        await setup.adapter.request(Zone.PREEMPTIBLE, 0, ONE_GPU)
        await setup.adapter.release([joined.slot.name])
        assert await setup.event(SlotLost) == SlotLost(joined.slot.name, 1, "given back")
        assert cloud.alive() == [stranger] and await setup.launcher.left(setup.cluster.id) == []
        assert cloud.instances()[machine]["InstanceLifecycle"] == "spot"


@pytest.mark.slow
async def test_a_standing_cluster_of_machines_joins_by_tls_and_down_ends_what_a_killed_command_started(
    cloud: Aws, tmp_path: Path
) -> None:
    c = config(cloud)
    keys = ("region", "image", "endpoint_url", "directory", "python")
    overrides = [f"cluster.ec2.{key}={getattr(c, key)}" for key in keys]
    overrides += [f"cluster.ec2.{key}={json.dumps(getattr(c, key))}" for key in ("instance_types", "security_groups")]
    commands = Commands(tmp_path, "cluster.kind=ec2", "elastic.preemptible_slots=1", *overrides)
    with BootAgent(cloud, tmp_path / "machines"), commands:
        status = await asyncio.to_thread(commands, "up", "--slots", "1")
        assert here(status) == ["slot-0"] and status["address"].startswith("tls://")
        [first] = cloud.alive()
        held_nothing_secret(cloud.user_data(first), commands.directory / "tls")
        await asyncio.to_thread(commands.leaves_nothing)
        assert cloud.alive() == []
        await asyncio.to_thread(killed_at_every_moment, commands, lambda state: cloud.alive())

        cloud.came.clear()
        cloud.answers.clear()  # killed while EC2 has the request and has not answered
        assert await asyncio.to_thread(commands.killed_when, "up", seen=lambda state: cloud.came.is_set())
        cloud.answers.set()
        async with asyncio.timeout(EVENT_S):
            while not await asyncio.to_thread(cloud.alive):
                pass
        await asyncio.to_thread(commands.leaves_nothing)
        assert cloud.alive() == []


def held_nothing_secret(script: str, tls: Path) -> None:
    for path in tls.glob("*.key"):
        assert path.read_text().splitlines()[1] not in script.replace("\\n", "\n"), path.name
    assert KEY not in script and SECRET not in script
    # and so it is with the certificate that it does hold: its own, for so long
    [line] = [line for line in script.splitlines() if line.startswith("export PEARL_TLS=")]
    bundle = json.loads(shlex.split(line)[1].partition("=")[2])
    assert set(bundle) == {"ca", "certificate", "key"}
    valid = x509.load_pem_x509_certificate(bundle["certificate"].encode())
    lived_s = (valid.not_valid_after_utc - valid.not_valid_before_utc).total_seconds()
    assert lived_s < Ec2Config().lifetime_s + 3600, "not the cluster's"


async def test_what_ec2_says_against_a_request_is_its_reason(cloud: Aws) -> None:
    launcher = Ec2Launcher(config(cloud), width=1)
    await launcher.check()
    causes = {
        "InsufficientInstanceCapacity": Cause.CAPACITY,
        "MaxSpotInstanceCountExceeded": Cause.QUOTA,
        "UnauthorizedOperation": Cause.CREDENTIALS,
        "InvalidAMIID.NotFound": Cause.CONFIGURATION,
    }
    for code, cause in causes.items():
        cloud.refused["*"] = code
        with pytest.raises(LaunchFailed, match=f"EC2 says {code}: {REFUSALS[code][1]}") as failed:
            await launcher.start(order())
        assert failed.value.cause is cause
    assert cloud.alive() == []
    nowhere = Ec2Launcher(Ec2Config(region="us-east-1", endpoint_url="http://127.0.0.1:9"), width=1)
    with pytest.raises(LaunchFailed) as unreachable:
        await nowhere.left("c0")
    assert unreachable.value.cause is Cause.UNREACHABLE
    await asyncio.to_thread(cloud.require_keys)
    with pytest.raises(UserError, match=r"AuthFailure.*docs/clusters\.md"):
        await launcher.check()


async def test_a_machine_whose_request_was_withdrawn_meanwhile_is_given_back(cloud: Aws) -> None:
    launcher = Ec2Launcher(config(cloud), width=1)
    cloud.answers.clear()
    request = asyncio.create_task(launcher.start(order()))
    assert await asyncio.to_thread(cloud.came.wait, EVENT_S)
    request.cancel()
    await asyncio.sleep(0)
    assert not request.done()
    cloud.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert len(cloud.instances()) == 1 and cloud.alive() == []


async def test_the_request_says_what_the_configuration_says(cloud: Aws) -> None:
    subnet = cloud.client().describe_subnets()["Subnets"][0]["SubnetId"]
    full = config(
        cloud,
        places=("us-east-1b", subnet),
        max_price_usd=1.25,
        disk_gb=200,
        instance_profile=None,
        labels={"team": "rl"},
    )
    launcher = Ec2Launcher(full, width=1)
    assert launcher.options == tuple(f"{kind} in {place}" for place in full.places for kind in TYPES)
    await launcher.start(order(option=launcher.options[0]))
    [asked] = cloud.asked
    expected = {
        "InstanceType": TYPES[0],
        "Placement.AvailabilityZone": "us-east-1b",
        "InstanceMarketOptions.MarketType": "spot",
        "InstanceMarketOptions.SpotOptions.MaxPrice": "1.2500",
        "InstanceMarketOptions.SpotOptions.SpotInstanceType": "one-time",
        "InstanceInitiatedShutdownBehavior": "terminate",
        "BlockDeviceMapping.1.Ebs.VolumeSize": "200",
        "BlockDeviceMapping.1.Ebs.Encrypted": "true",
        "MetadataOptions.HttpTokens": "required",
        "NetworkInterface.1.AssociatePublicIpAddress": "false",
        "NetworkInterface.1.SecurityGroupId.1": full.security_groups[0],
    }
    assert {name: asked.get(name) for name in expected} == expected
    [made] = cloud.instances().values()
    tags = {tag["Key"]: tag["Value"] for tag in made["Tags"]}
    assert tags | {"team": "rl", "pearl-cluster": "c0", "pearl-slot": "w-0", "pearl-life": "1"} == tags
    assert launcher.causes and "NetworkInterface.1.SubnetId" not in asked

    await launcher.start(replace(order(option=launcher.options[2]), life=2))
    assert (
        cloud.asked[1]["NetworkInterface.1.SubnetId"] == subnet and "Placement.AvailabilityZone" not in cloud.asked[1]
    )
    await launcher.sweep("c0", "w-1")
    assert len(cloud.alive()) == 2, "another slot's"
    await launcher.sweep("c0")
    assert cloud.alive() == []


async def test_a_launch_template_says_what_is_not_set(cloud: Aws) -> None:
    data = {"ImageId": IMAGE, "KeyName": "mine", "SecurityGroupIds": [cloud.security_group()]}
    cloud.client().create_launch_template(LaunchTemplateName="gpu", LaunchTemplateData=data)
    launcher = Ec2Launcher(config(cloud, launch_template="gpu:1", image=None, spot=False), width=1)
    await launcher.check()
    await launcher.start(order())
    [asked] = cloud.asked
    assert asked["LaunchTemplate.LaunchTemplateName"] == "gpu" and asked["LaunchTemplate.Version"] == "1"
    assert not [name for name in asked if name.startswith(("ImageId", "Network", "Block", "InstanceMarket"))]
    [made] = cloud.instances().values()
    assert made["ImageId"] == data["ImageId"] and "InstanceLifecycle" not in made


async def test_what_cannot_be_is_said_before_anything_starts(cloud: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"p4d\.24xlarge has 8 GPUs, and a slot takes 1"):
        await Ec2Launcher(config(cloud, instance_types=("p4d.24xlarge",)), width=1).check()
    groups = ("sg-1",)
    with pytest.raises(UserError, match=r"InvalidInstanceType.*x9\.huge"):
        await Ec2Launcher(config(cloud, instance_types=("x9.huge",), security_groups=groups), width=1).check()
    cpu = Ec2Launcher(config(cloud, instance_types=("t3.micro",), security_groups=groups), width=1)
    await cpu.check()
    with pytest.raises(LaunchFailed, match=r"t3\.micro has no GPU"):
        await cpu.start(order(option="t3.micro"))
    monkeypatch.setitem(sys.modules, "pearl.cluster.ec2_instance", None)
    with pytest.raises(UserError, match=r"needs dask-cloudprovider.*pip install 'pearl-rl\[ec2\]'"):
        await cpu.check()


def test_a_start_script_holds_one_short_lived_certificate_and_no_key_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    tls = Certificates.make(tmp_path / "tls")
    wanted = order(tls=tls, environment={"A": "b c"})
    script = start_script(wanted, Ec2Config(setup=("mount /data",), lifetime_s=7200), "ec2", free=False)
    held_nothing_secret(script, tls.directory)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/sh" and lines[-1] == "shutdown -h now" and "export A='b c'" in lines
    assert lines.index("mount /data") < lines.index("export CUDA_VISIBLE_DEVICES=0")
    [run] = [line for line in lines if "pearl.cluster.worker" in line]
    assert run.startswith("cd /opt/pearl && timeout --signal=TERM --kill-after=90 7200 /opt/pearl/.venv/bin/python -m")
    assert '"source":"ec2"' in run and "--owner scheduler" in run and "--tls env" in run
    assert "--join-s" in run, "nobody pays for a machine that cannot reach the scheduler"
    assert len(base64.b64encode(script.encode())) < 16384, "the most that EC2 takes"

    boxed = start_script(wanted, Ec2Config(container="pearl:1"), "ec2", free=True).splitlines()[-2]
    assert "docker run --rm --net=host" in boxed and "--gpus=all" in boxed and "-e PEARL_TLS " in boxed
    assert "--owner nobody" in boxed and "PRIVATE KEY" not in boxed
