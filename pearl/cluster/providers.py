"""Which cluster, launcher and adapter a configuration means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.utils import get_ip

from pearl.cluster.adapter import ClusterAdapter, OnEvent
from pearl.cluster.azure import AzureLauncher
from pearl.cluster.binding import Binding
from pearl.cluster.certificates import Certificates, is_loopback
from pearl.cluster.cluster import Cluster
from pearl.cluster.ec2 import Ec2Launcher
from pearl.cluster.existing import ExistingAdapter, ExistingCluster, probe
from pearl.cluster.gcp import GcpLauncher
from pearl.cluster.kubernetes import KubernetesLauncher
from pearl.cluster.launcher import Launcher
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.local import LocalCluster
from pearl.cluster.local_adapter import LocalAdapter
from pearl.cluster.processes import LocalLauncher
from pearl.cluster.ranks import RanksLauncher
from pearl.cluster.slurm import SlurmLauncher
from pearl.cluster.ssh import SshLauncher
from pearl.config import RunConfig
from pearl.config.clouds import MachinesConfig
from pearl.config.cluster import ClusterConfig
from pearl.core.layout import Zone


def make_cluster(config: RunConfig, logs: Path, on_left: Callable[[str, int, str], None]) -> Cluster:
    """Not opened yet; `logs` of worker processes. Raises UserError for certificates that are not there."""
    cluster = _make_cluster(config, logs, on_left)
    if config.trainer.hosts:
        cluster.launchers["training"] = _ranks_launcher(config, cluster.launcher)
    return cluster


def _ranks_launcher(config: RunConfig, here: Launcher) -> RanksLauncher:
    assert isinstance(here, LocalLauncher)
    return RanksLauncher(here, config.trainer.hosts, config.trainer.ranks_here, config.cluster.ssh)


def _make_cluster(config: RunConfig, logs: Path, on_left: Callable[[str, int, str], None]) -> Cluster:
    c = config.cluster
    if c.kind == "existing":
        assert c.address is not None
        host = c.host if not is_loopback(c.host) else own_address(c.address)
        return ExistingCluster(
            c.address, logs, on_left, host=host, tls=existing_tls(c), silent_loss_s=c.silent_loss_s, notices=c.notices
        )
    cluster = LocalCluster(
        logs, on_left, c.scheduler_port, host=c.host, insecure=c.insecure, silent_loss_s=c.silent_loss_s,
        notices=c.notices,
    )  # fmt: skip
    if (launcher := make_launcher(c, logs, config.engine.tensor_parallel)) is not None:
        cluster.launchers[Zone.PREEMPTIBLE] = launcher
    return cluster


def make_launcher(config: ClusterConfig, logs: Path, width: int, *, free: bool = False) -> Launcher | None:
    """Of preemptible slots; None where they are this machine's or come by themselves.

    `width`: GPUs of a slot; `free`: workers that outlive this process. Raises UserError if the kind needs a package
    that is not installed.
    """
    match config.kind:
        case "ssh":
            return SshLauncher(config.ssh, logs, width, free=free)
        case "slurm":
            return SlurmLauncher(config.slurm, logs, free=free)
        case "ec2":
            return Ec2Launcher(config.ec2, width, free=free)
        case "gcp":
            return GcpLauncher(config.gcp, width, free=free)
        case "azure":
            return AzureLauncher(config.azure, width, free=free)
        case "kubernetes":
            return KubernetesLauncher(config.kubernetes, width, free=free)
    return None


def provider_s(config: ClusterConfig) -> float:
    """Seconds that the provider itself may take until a worker's process starts."""
    match config.kind:
        case "slurm":
            return config.slurm.queue_s
        case "ec2" | "gcp" | "azure":
            machines: MachinesConfig = getattr(config, config.kind)
            return machines.boot_s
        case "kubernetes":
            return config.kubernetes.pending_s
    return 0.0


def make_adapter(
    config: RunConfig, cluster: Cluster, bindings: Sequence[Binding], on_event: OnEvent, *, offered: bool
) -> ClusterAdapter:
    """Of preemptible slots; `offered` as in LocalAdapter."""
    if isinstance(cluster, ExistingCluster):
        return ExistingAdapter(cluster, on_event)
    start_s = config.deadlines.worker_start_s + provider_s(config.cluster)
    if config.cluster.kind == "local":
        return LocalAdapter(cluster, bindings, on_event, start_s, offered)
    return LaunchingAdapter(cluster, bindings, on_event, start_s)


async def check_provider(config: RunConfig) -> None:
    """Before anything starts. Raises UserError if slots cannot come from where they are to come."""
    c = config.cluster
    if config.trainer.hosts:
        here = LocalLauncher(Path(config.run_root) / "probe", c.host)
        await _ranks_launcher(config, here).reach(Path(config.run_root))
    if c.kind == "existing":
        assert c.address is not None
        await probe(c.address, existing_tls(c))
    elif (launcher := make_launcher(c, Path(config.run_root) / "probe", config.engine.tensor_parallel)) is not None:
        await launcher.check()


def existing_tls(config: ClusterConfig) -> Certificates | None:
    """Raises UserError if files are missing, or others can read a key."""
    if config.tls_directory is None:
        return None
    for role in ("client", "worker"):
        Certificates.open(Path(config.tls_directory), role)
    return Certificates(Path(config.tls_directory))


def own_address(scheduler: str) -> str:
    """Address of this machine from which it reaches the scheduler."""
    host = scheduler.partition("://")[2].rpartition(":")[0]
    return str(get_ip(host))
