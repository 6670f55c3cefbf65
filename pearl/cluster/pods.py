"""Manifests of Kubernetes: one slot's pod and its secret, and a standing cluster for dask-kubernetes' operator."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.cluster.certificates import CA, CERTIFICATE, KEY, Certificates
from pearl.cluster.launcher import MODULE, WorkerOrder
from pearl.cluster.machines import CLUSTER, LATE_S, LIFE, SLOT
from pearl.cluster.scheduler import PORT
from pearl.config.clouds import KubernetesConfig
from pearl.errors import UserError

TLS_FOLDER = "/run/pearl/tls"
LAST_S = 3.0
"""Of a pod's grace period: for the worker to say goodbye."""


def pod_spec(
    config: KubernetesConfig,
    module: Sequence[str],
    variables: Mapping[str, str],
    gpus: int,
    pool: Mapping[str, str],
    secret: str | None,
    role: str = "worker",
) -> dict[str, Any]:
    """That of the package for a worker, with our command, devices, notice, and of the secret what `role` needs.

    `module`: what Python runs, with its arguments.
    """
    limits = {"cpu": config.cpu, "memory": config.memory} | ({config.gpu_resource: str(gpus)} if gpus else {})
    made: dict[str, Any] = package().make_worker_spec(image=config.image, n_workers=1, resources={}, env={})["spec"]
    [container] = made["containers"]
    del container["args"], container["ports"]  # of `dask worker` and its pages
    shared: dict[str, Any] = {"name": "shared-memory", "mountPath": "/dev/shm"}
    container |= {
        "command": [config.python or sys.executable, "-u", "-m", *module],
        "workingDir": config.directory or str(Path.cwd()),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [shared],
        "securityContext": {"allowPrivilegeEscalation": False},
        # the notice: SIGTERM now; the kubelet's own comes after this hook, as the second one, which ends the worker
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"kill -TERM 1; sleep {config.grace_s}"]}}},
    }
    made |= {
        "volumes": [{"name": shared["name"], "emptyDir": {"medium": "Memory", "sizeLimit": config.shared_memory}}],
        "terminationGracePeriodSeconds": config.grace_s,
        "nodeSelector": dict(pool),
        "tolerations": [dict(toleration) for toleration in config.tolerations],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if secret is not None:
        container["volumeMounts"].append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
        own = [{"key": file, "path": file} for file in tls_files(role)]
        made["volumes"].append({"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o400, "items": own}})
    if config.service_account:
        made["serviceAccountName"] = config.service_account
    if config.pull_secrets:
        made["imagePullSecrets"] = [{"name": name} for name in config.pull_secrets]
    return made


def standing_manifests(config: KubernetesConfig, name: str, slots: int, gpus: int) -> list[dict[str, Any]]:
    """A DaskCluster for the operator: our scheduler, and `slots` free workers in the first node pool; for each other
    pool a DaskWorkerGroup of none, to be scaled. Its certificates are the secret `<name>-tls`."""
    secret, tls = f"{name}-tls", ["--tls", TLS_FOLDER]
    cluster: dict[str, Any] = package().make_cluster_spec(name=name, image=config.image, n_workers=slots, env={})
    address = f"tls://{name}-scheduler.{config.namespace}.svc:{PORT}"
    slot = ["--slot", "$(DASK_WORKER_NAME)", "--owner", "nobody"]
    worker = [MODULE, "--scheduler", address, *slot, *tls]
    notices = json.dumps({"sigterm_grace_s": max(1.0, config.grace_s - LAST_S)})
    metadata = {"name": name, "namespace": config.namespace, "labels": dict(config.labels)}
    cluster["metadata"] = metadata
    cluster["spec"]["worker"]["spec"] = pod_spec(
        config, [*worker, "--notices", notices], {}, gpus, config.node_pools[0], secret
    )
    alone = pod_spec(config.model_copy(update={"cpu": "1", "memory": "4Gi"}), [], {}, 0, {}, secret, "scheduler")
    [own], [theirs] = alone["containers"], cluster["spec"]["scheduler"]["spec"]["containers"]
    listens = ["pearl.cluster.scheduler", "--host", "0.0.0.0", "--port", str(PORT), *tls]
    probe = {"tcpSocket": {"port": "tcp-comm"}, "periodSeconds": 10}  # its pages know no TLS, and stay on loopback
    del own["lifecycle"]
    own |= {
        "name": "scheduler", "command": [*own["command"][:3], *listens], "ports": theirs["ports"],
        "readinessProbe": probe, "livenessProbe": probe,
    }  # fmt: skip
    cluster["spec"]["scheduler"]["spec"] = alone
    more = [
        {
            "apiVersion": cluster["apiVersion"],
            "kind": "DaskWorkerGroup",
            "metadata": {**metadata, "name": f"{name}-{i}"},
            "spec": {
                "cluster": name,
                "worker": {
                    "replicas": 0,
                    "spec": pod_spec(config, [*worker, "--notices", notices], {}, gpus, pool, secret),
                },
            },
        }
        for i, pool in enumerate(config.node_pools[1:], start=1)
    ]
    return [cluster, *more]


def labels(order: WorkerOrder, config: KubernetesConfig) -> dict[str, str]:
    return {**config.labels, CLUSTER: order.cluster, SLOT: order.slot, LIFE: str(order.life)}


def tls_files(role: str) -> list[str]:
    return [CA, CERTIFICATE.format(role=role), KEY.format(role=role)]


def tls_secret(tls: Certificates, name: str, labels: Mapping[str, str], lifetime_s: float) -> dict[str, Any]:
    """With a worker's certificate made for that pod, which is worth nothing after its lifetime."""
    with tempfile.TemporaryDirectory(prefix="pearl-tls-") as folder:
        tls.issue("worker", Path(folder), lifetime_s + LATE_S)
        data = {file: base64.b64encode((Path(folder) / file).read_bytes()).decode() for file in tls_files("worker")}
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def package() -> Any:
    """Raises UserError if dask-kubernetes is not installed."""
    try:
        import dask_kubernetes.operator
    except ImportError as error:
        said = f"cluster.kind = kubernetes needs dask-kubernetes ({error})"
        raise UserError(said, "pip install 'pearl-rl[kubernetes]'") from None
    return dask_kubernetes.operator
