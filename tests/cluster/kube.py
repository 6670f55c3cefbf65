"""A small Kubernetes on loopback: the part of the API that is used, strict about pods, and one node that runs them.

Not the real thing: pods are validated by the schemas of dask-kubernetes' resources, which hold the whole of a pod's
specification, and run as processes of this machine.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import psutil
import yaml

from pearl.cluster.pods import TLS_FOLDER
from tests.cluster.http_server import Answer, Asked, answering

TOKEN = "token-of-this-test"


@cache
def schema(kind: str) -> dict[str, Any]:
    """Of a custom resource of the package, in which no field may be that it does not know."""
    import dask_kubernetes

    charts = Path(dask_kubernetes.__file__).parent / "operator/deployment/helm/dask-kubernetes-operator/crds"
    resource = yaml.safe_load((charts / f"{kind.lower()}.yaml").read_text())
    return strict(resource["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def strict(part: Any) -> Any:
    if isinstance(part, list):
        return [strict(each) for each in part]
    if not isinstance(part, dict):
        return part
    made = {name: strict(value) for name, value in part.items()}
    if isinstance(part.get("properties"), dict) and "additionalProperties" not in part and part.get("type") == "object":
        made["additionalProperties"] = False
    return made


def faults(kind: str, manifest: dict[str, Any]) -> list[str]:
    """What the API server would say against a custom resource."""
    own = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata")}
    validator = jsonschema.Draft202012Validator(schema(kind))
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in validator.iter_errors(own)]


def pod_faults(spec: dict[str, Any]) -> list[str]:
    return faults("DaskWorkerGroup", {"spec": {"cluster": "c", "worker": {"replicas": 1, "spec": spec}}})


class Kube:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, dict[str, Any]] = {"pods": {}, "secrets": {}}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.refusal: tuple[int, str] | None = None
        """Of every pod."""
        self.full: set[str] = set()
        """Values of node selectors whose nodes are taken."""
        self.lock = threading.RLock()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.rstrip("/") == "/version":
            return 200, {"gitVersion": "v1.33.0"}
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        words = url.path.strip("/").split("/")
        if words[:3] != ["api", "v1", "namespaces"] or words[3] != "rl":
            return 403, {"message": f"{url.path} is forbidden"}
        kind, name = words[4], words[5] if len(words) > 5 else ""
        with self.lock:
            if method == "GET":
                wanted = dict([query["labelSelector"].split("=")])
                items = [o for o in self.objects[kind].values() if wanted.items() <= o["metadata"]["labels"].items()]
                return 200, {"items": [self._seen(kind, each) for each in items]}
            if method == "DELETE":
                if name not in self.objects[kind]:
                    return 404, {"message": f"{kind} {name} not found"}
                assert json.loads(body)["gracePeriodSeconds"] == 0
                self._kill(name if kind == "pods" else "")
                return 200, self.objects[kind].pop(name)
            return self._post(kind, json.loads(body), dry=query.get("dryRun") == "All")

    def _post(self, kind: str, manifest: dict[str, Any], dry: bool) -> tuple[int, dict[str, Any]]:
        name = manifest["metadata"]["name"]
        if kind == "pods":
            if self.refusal:
                return self.refusal[0], {"message": self.refusal[1]}
            if said := pod_faults(manifest["spec"]):
                return 422, {"message": f"Pod {name} is invalid: {said}"}
        if name in self.objects[kind]:
            return 409, {"message": f"{name} already exists"}
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made = {**manifest, "metadata": {**manifest["metadata"], "creationTimestamp": now}}
        if not dry:
            self.objects[kind][name] = made
            if kind == "pods" and not self.full & set(manifest["spec"]["nodeSelector"].values()):
                self._run(name, manifest["spec"])
        return 201, self._seen(kind, made)

    def _seen(self, kind: str, made: dict[str, Any]) -> dict[str, Any]:
        if kind != "pods":
            return made
        process = self.processes.get(made["metadata"]["name"])
        status: dict[str, Any] = {"phase": "Running"}
        if process is None:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are"}
            status = {"phase": "Pending", "conditions": [said]}
        elif (code := process.poll()) is not None:
            ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
            status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": ended}]}
        return {**made, "status": status}

    def _run(self, name: str, spec: dict[str, Any]) -> None:
        [container] = spec["containers"]
        own = {each["name"]: each["value"] for each in container["env"]}
        own |= {"PATH": os.environ["PATH"], "PEARL_HOST": name, "HOME": str(self.folder)}
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))  # as the device plugin does
        mounted = self.folder / name
        for volume in spec["volumes"]:
            if "secret" in volume:
                mounted.mkdir(mode=0o700)
                for file, content in self.objects["secrets"][volume["secret"]["secretName"]]["data"].items():
                    (mounted / file).write_bytes(base64.b64decode(content))
                    (mounted / file).chmod(volume["secret"]["defaultMode"])
        command = [word.replace(TLS_FOLDER, str(mounted)) for word in container["command"]]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, env=own, cwd=container["workingDir"], stdout=log, stderr=log, start_new_session=True
            )

    def drain(self, name: str) -> subprocess.Popen[bytes]:
        """The node will go: the pod's hook, as the kubelet runs it. The process that runs it."""
        [hook] = self.objects["pods"][name]["spec"]["containers"]
        shell = [
            w.replace("-TERM 1;", f"-TERM {self.processes[name].pid};")
            for w in hook["lifecycle"]["preStop"]["exec"]["command"]
        ]
        return subprocess.Popen(shell)

    def _kill(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self.processes):
            self._kill(name)


@contextlib.contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[Kube, Path]]:
    """And the kubeconfig for it."""
    folder.mkdir()
    kube = Kube(folder)

    def answer(asked: Asked) -> Answer:
        return Answer.of_json(
            *kube.answer(asked.method, asked.path, asked.headers.get("authorization", ""), asked.body)
        )

    with answering(answer) as url:
        own = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        config = folder / "kubeconfig"
        config.write_text(yaml.safe_dump(own))
        try:
            yield kube, config
        finally:
            kube.close()
