"""One pod per slot, asked for with dask-kubernetes' client (kr8s); its operator is not needed.

Pods and not the operator's worker groups: it makes Deployments of them, which start a reclaimed worker again, and it
chooses which one goes when there are to be fewer: right for a cluster that outlives runs (`pearl.cluster.pods`) alone.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pearl.cluster.launcher import MODULE, LaunchFailed, WorkerOrder
from pearl.cluster.machines import CLUSTER, SLOT, Machine, MachineLauncher, machine_name
from pearl.cluster.pods import LAST_S, TLS_FOLDER, labels, package, pod_spec, tls_secret
from pearl.cluster.reap import TAG
from pearl.config.clouds import KubernetesConfig
from pearl.core.requests import Cause
from pearl.errors import UserError

REFUSED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
"""Reasons for which a container waits that waiting does not mend."""


class KubernetesLauncher(MachineLauncher):
    name, log = "Kubernetes", "see kubectl logs and kubectl describe"
    causes = (
        (Cause.QUOTA, "exceeded quota|LimitRange|maximum"),
        (Cause.CAPACITY, "Unschedulable|Insufficient|nodes are available|Preempt|Evicted|NodeShutdown|Terminated"),
        (Cause.CREDENTIALS, "forbidden|unauthorized|401|403|certificate"),
        (Cause.CONFIGURATION, f"{'|'.join(REFUSED)}|invalid|not found|unprocessable|StartError"),
        (Cause.UNREACHABLE, "connect|timeout|timed out|unavailable"),
    )

    def __init__(self, config: KubernetesConfig, width: int, *, free: bool = False) -> None:
        self.config = config
        self._pools = {", ".join(f"{k}={v}" for k, v in pool.items()) or "any node": pool for pool in config.node_pools}
        super().__init__(tuple(self._pools), width, free=free)

    async def check(self) -> None:
        """May make such a pod: the API server is asked to only try."""
        package()
        trial = WorkerOrder("check", "check", 0, "preemptible", "tls://check:1", option=self.options[0])
        try:
            await self._ask("POST", "pods", params={"dryRun": "All"}, content=json.dumps(self.pod(trial)))
        except LaunchFailed as error:
            raise UserError(str(error), "See docs/clusters.md, Kubernetes: permissions.") from None

    async def create(self, order: WorkerOrder) -> Machine:
        name, pod = machine_name(order), self.pod(order)
        if order.tls is not None:
            secret = tls_secret(order.tls, name, labels(order, self.config), self.config.lifetime_s)
            await self._ask("POST", "secrets", content=json.dumps(secret))
        try:
            return self._machine(await self._ask("POST", "pods", content=json.dumps(pod)))
        except LaunchFailed:
            await self.delete([Machine(name, order.slot, "refused", alive=False, there=True)])
            raise

    async def find(self, cluster: str) -> list[Machine]:
        """A secret without its pod counts as one, too."""
        mine = {"labelSelector": f"{CLUSTER}={cluster}"}
        machines = {pod["metadata"]["name"]: self._machine(pod) for pod in await self._list("pods", mine)}
        for secret in await self._list("secrets", mine):
            name, slot = secret["metadata"]["name"], secret["metadata"]["labels"][SLOT]
            machines.setdefault(name, Machine(name, slot, "only its secret is left", alive=False, there=True))
        return list(machines.values())

    async def delete(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            for kind in ("pods", "secrets"):
                with contextlib.suppress(_NotThere):
                    await self._ask("DELETE", f"{kind}/{machine.id}", content=json.dumps({"gracePeriodSeconds": 0}))

    def pod(self, order: WorkerOrder) -> dict[str, Any]:
        """Its manifest. It holds no secret: that is mounted."""
        config, name = self.config, machine_name(order)
        grace_s = max(1.0, config.grace_s - LAST_S)
        order = replace(order, notices=order.notices.model_copy(update={"sigterm_grace_s": grace_s}))
        line = order.arguments("nobody" if self.free else "scheduler", tls=TLS_FOLDER if order.tls else None)
        variables = {**order.environment, TAG: order.tag}
        spec = pod_spec(
            config, [MODULE, *line], variables, order.gpus, self._pools[order.option], name if order.tls else None
        )
        spec |= {"restartPolicy": "Never", "activeDeadlineSeconds": round(config.lifetime_s)}
        metadata = {"name": name, "labels": labels(order, config)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _machine(self, pod: Mapping[str, Any]) -> Machine:
        metadata, status = pod["metadata"], pod.get("status", {})
        phase, said = status.get("phase", "Pending"), _reason(status)
        waits_s = _age_s(metadata) if phase == "Pending" else 0.0
        stuck = phase == "Pending" and (waits_s > self.config.pending_s or any(word in said for word in REFUSED))
        alive = phase in ("Pending", "Running") and not stuck
        return Machine(
            metadata["name"], metadata["labels"][SLOT], phase, alive, there=True, reason="" if alive else said
        )

    async def _list(self, kind: str, params: Mapping[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._ask("GET", kind, params=params))["items"]
        return found

    async def _ask(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        async with _asking(self) as api:
            async with api.call_api(method, url=url, namespace=self.config.namespace, **more) as reply:
                answer: dict[str, Any] = reply.json()
                return answer


class _NotThere(LaunchFailed):
    """Nothing of that name."""


@contextlib.asynccontextmanager
async def _asking(launcher: KubernetesLauncher) -> AsyncIterator[Any]:
    """The API; what it (or the way to it) says against a request becomes LaunchFailed."""
    import httpx
    import kr8s
    import kr8s.asyncio

    try:
        yield await kr8s.asyncio.api(namespace=launcher.config.namespace, context=launcher.config.context)
    except (kr8s.ServerError, kr8s.APITimeoutError, httpx.HTTPError, OSError, ValueError) as error:
        said = f"Kubernetes says {error or type(error).__name__}"
        status = error.response.status_code if isinstance(error, kr8s.ServerError) and error.response else 0
        if status == 404:
            raise _NotThere(said, Cause.CONFIGURATION) from None
        raise LaunchFailed(said, launcher.cause_of(f"{said} {status or ''}")) from None


def _reason(status: Mapping[str, Any]) -> str:
    """Why a pod waits or has ended, in Kubernetes' words."""
    said = [status.get("reason", ""), status.get("message", "")]
    for condition in status.get("conditions", ()):
        if condition.get("status") == "False" and condition["type"] == "PodScheduled":
            said += [condition.get("reason", ""), condition.get("message", "")]
    for container in status.get("containerStatuses", ()):
        for state in container.get("state", {}).values():
            code = f"exit code {state['exitCode']}" if "exitCode" in state else ""
            said += [state.get("reason", ""), code, state.get("message", "")]
    return ": ".join(word for word in said if word)


def _age_s(metadata: Mapping[str, Any]) -> float:
    if not (made := metadata.get("creationTimestamp")):
        return 0.0
    return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(made)).total_seconds()
