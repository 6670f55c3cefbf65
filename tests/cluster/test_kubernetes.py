"""Slots as pods: manifests by the schemas that dask-kubernetes ships, requests to a small API server on loopback."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.certificates import Certificates
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.local import LocalCluster
from pearl.cluster_command import app
from pearl.config.clouds import KubernetesConfig
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.support import EVENT_S, ROOT, START_S

pytest.importorskip("dask_kubernetes", reason="needs pip install 'pearl-rl[kubernetes]'")

from pearl.cluster.kubernetes import KubernetesLauncher
from pearl.cluster.pods import TLS_FOLDER, standing_manifests
from tests.cluster.kube import Kube, faults, kubernetes, pod_faults

SPOT = {"karpenter.sh/capacity-type": "spot"}
BIG = {"karpenter.sh/capacity-type": "spot", "family": "big"}
TOLERATION = {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    with kubernetes(tmp_path / "kube") as (kube, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield kube


def config(**more: Any) -> KubernetesConfig:
    fields: dict[str, Any] = {"image": "pearl:1", "namespace": "rl", "node_pools": (BIG, SPOT), "directory": str(ROOT)}
    return KubernetesConfig(**{**fields, "tolerations": (TOLERATION,), "python": sys.executable, **more})


def order(**more: Any) -> WorkerOrder:
    option = more.pop("option", KubernetesLauncher(config(), 1).options[1])
    return WorkerOrder(
        "c0", "w-0", 1, "preemptible", "tls://10.0.0.1:1", 1, environment={"A": "b"}, option=option, **more
    )


def test_a_pod_is_one_slot_with_its_gpu_its_notice_and_a_mounted_secret(tmp_path: Path) -> None:
    tls = Certificates.make(tmp_path / "tls")
    launcher = KubernetesLauncher(config(grace_s=25, pull_secrets=("pull",), service_account="rl"), 1)
    pod = launcher.pod(order(tls=tls))
    assert pod_faults(pod["spec"]) == []
    [container], spec = pod["spec"]["containers"], pod["spec"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "1"}
    assert spec["nodeSelector"] == SPOT and spec["tolerations"] == [TOLERATION] and spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 25 and spec["automountServiceAccountToken"] is False
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1].startswith("kill -TERM 1;")
    assert '"sigterm_grace_s":22' in " ".join(container["command"]), "it drains within the pod's grace"
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == [pod["metadata"]["name"]] and container["command"][-2:] == ["--tls", TLS_FOLDER]
    keys = [path.read_text().splitlines()[1] for path in tls.directory.glob("*.key")]
    assert not any(key in json.dumps(pod) for key in keys)
    assert pod["metadata"]["labels"] == {"pearl-cluster": "c0", "pearl-slot": "w-0", "pearl-life": "1"}


def test_the_schema_would_refuse_a_pod_that_is_not_one() -> None:
    spec = KubernetesLauncher(config(), 1).pod(order())["spec"]
    assert pod_faults(spec | {"terminationGracePeriodSecond": 3}) and pod_faults(spec | {"tolerations": {}})


def test_the_operators_manifests_are_valid_and_bring_free_workers_that_wait_for_a_run() -> None:
    manifests = standing_manifests(config(), "pearl", slots=4, gpus=1)
    assert [manifest["kind"] for manifest in manifests] == ["DaskCluster", "DaskWorkerGroup"]
    assert [faults(manifest["kind"], manifest) for manifest in manifests] == [[], []]
    [cluster, group] = (manifest["spec"] for manifest in manifests)
    assert cluster["worker"]["replicas"] == 4 and group["worker"]["replicas"] == 0 and group["cluster"] == "pearl"
    command = " ".join(cluster["worker"]["spec"]["containers"][0]["command"])
    assert "--scheduler tls://pearl-scheduler.rl.svc:8786 --slot $(DASK_WORKER_NAME) --owner nobody" in command
    scheduler = cluster["scheduler"]["spec"]["containers"][0]
    assert "pearl.cluster.scheduler" in scheduler["command"] and "nvidia.com/gpu" not in str(scheduler["resources"])
    [own] = [each["secret"]["items"] for each in cluster["scheduler"]["spec"]["volumes"] if "secret" in each]
    assert [each["key"] for each in own] == ["ca.pem", "scheduler.pem", "scheduler.key"]
    assert scheduler["livenessProbe"] == {"tcpSocket": {"port": "tcp-comm"}, "periodSeconds": 10}


def test_the_operators_manifests_are_printed_for_kubectl() -> None:
    run = str(ROOT / "examples" / "kubernetes.yaml")
    printed = CliRunner().invoke(app, ["manifests", run, "--name", "gpus", "--slots", "3"])
    assert printed.exit_code == 0 and "&id" not in printed.output, printed.output
    cluster, group = yaml.safe_load_all(printed.output)
    assert (cluster["metadata"]["name"], cluster["spec"]["worker"]["replicas"]) == ("gpus", 3)
    assert faults("DaskCluster", cluster) == [] and faults("DaskWorkerGroup", group) == []


def test_manifests_without_an_image_are_refused() -> None:
    printed = CliRunner().invoke(app, ["manifests", str(ROOT / "examples" / "tiny.yaml")])
    assert isinstance(printed.exception, UserError) and "cluster.kubernetes.image is not set" in str(printed.exception)


async def test_what_kubernetes_says_against_a_request_is_its_reason(kube: Kube, tmp_path: Path) -> None:
    launcher = KubernetesLauncher(config(pending_s=1e-3), 1)
    await launcher.check()
    assert kube.objects["pods"] == {}, "it was only tried"
    tls = Certificates.make(tmp_path / "tls")
    for status, said, cause in (
        (403, 'pods "x" is forbidden: exceeded quota: gpus', Cause.QUOTA),
        (403, "pods is forbidden: User rl cannot create resource pods", Cause.CREDENTIALS),
        (422, "Pod is invalid: spec.image", Cause.CONFIGURATION),
        (503, "unavailable", Cause.UNREACHABLE),
    ):
        kube.refusal = status, said
        with pytest.raises(LaunchFailed, match="Kubernetes says") as failed:
            await launcher.start(order(tls=tls))
        assert failed.value.cause is cause
        assert await launcher.left("c0") == [], "nor its secret"
    with pytest.raises(UserError, match=r"docs/clusters\.md"):
        await launcher.check()
    kube.refusal, kube.full = None, {"big", "spot"}
    process = await launcher.start(order())
    launcher.look_s = 0.01
    await process.wait()
    waited = process.failed()
    assert waited is not None and waited.cause is Cause.CAPACITY and "Unschedulable" in str(waited)
    await launcher.sweep("c0", "w-1")
    assert await launcher.left("c0") == ["machine pearl-c0-w-0-1 (w-0): Pending"]
    await launcher.sweep("c0", "w-0")
    assert await launcher.left("c0") == []


@pytest.mark.slow
async def test_pods_become_slots_get_notice_before_their_node_goes_and_leave_nothing(
    kube: Kube, tmp_path: Path
) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()

    async def event(kind: type[Event]) -> Any:
        event = await asyncio.wait_for(events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event

    cluster = LocalCluster(tmp_path / "workers", lambda *_: None)
    launcher = KubernetesLauncher(config(grace_s=20, pending_s=1e-3), 1)
    launcher.look_s = 0.2
    cluster.launchers[Zone.PREEMPTIBLE] = launcher
    bindings = [Binding("preemptible-0", Zone.PREEMPTIBLE, (), 1, elsewhere=True)]
    adapter = LaunchingAdapter(cluster, bindings, events.put_nowait, START_S)
    kube.full = {"big"}
    async with cluster:
        await adapter.connect()
        await adapter.request(Zone.PREEMPTIBLE, 1, SlotShape(gpus=1))
        failed = await event(RequestFailed)
        assert (failed.cause, failed.option) == (Cause.CAPACITY, launcher.options[0])
        joined = await event(SlotJoined)
        [pod] = kube.objects["pods"]
        assert joined.slot.gpus == (f"{pod}/0",)
        hook = await asyncio.to_thread(kube.drain, pod)
        notice = await event(SlotNotice)
        assert 10 < notice.seconds_left <= 17
        await adapter.request(Zone.PREEMPTIBLE, 0, SlotShape(gpus=1))
        await adapter.release([notice.worker])
        assert (await event(SlotLost)).reason == "given back"
        hook.kill()
        hook.wait()
        assert kube.objects["pods"] == {} and await launcher.left(cluster.id) == []
        await adapter.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_kubernetes.operator", None)
    with pytest.raises(UserError, match=r"needs dask-kubernetes.*pip install 'pearl-rl\[kubernetes\]'"):
        asyncio.run(KubernetesLauncher(config(), 1).check())
