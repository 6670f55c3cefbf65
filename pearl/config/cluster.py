"""`cluster:` where the actors run."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from pearl.config.clouds import AzureConfig, Ec2Config, GcpConfig, KubernetesConfig, repeated
from pearl.config.section import Section

ADDRESS = r"^(tls|tcp)://[^/\s]+:[0-9]+$"
"""Of a Dask scheduler: `tls://host:port`."""


class NoticesConfig(Section):
    source: Literal["none", "ec2", "gcp", "azure"] = "none"
    """Which cloud's metadata service each worker asks whether its machine will be taken away. SIGTERM is a notice
    everywhere, also with `none`."""
    url: str | None = Field(None, pattern=r"^http://[^/]+$")
    """Base of the metadata service, `http://host:port`; None is the cloud's own."""
    poll_s: float = Field(5.0, gt=0)
    """Seconds between two questions (GCP answers at once when something changes)."""
    rebalance: bool = True
    """EC2 only: a rebalance recommendation counts as a notice of 120 s. False waits for the instance action."""
    sigterm_grace_s: float = Field(30.0, gt=0)
    """Seconds that a SIGTERM leaves; then, or at a second SIGTERM, the worker ends."""
    sigterm_echo_s: float = Field(0.0, ge=0)
    """A SIGTERM so soon after the first one is the same. Slurm's `srun` passes on what its step gets anyway: there it
    is at least 2."""


class SshConfig(Section):
    hosts: tuple[str, ...] = ()
    """Hosts as `ssh` knows them (`gpu-a`, `user@10.0.0.7`, a name in `~/.ssh/config`), best first. They need the same
    code, Python and model files at the same paths as this machine, and a key that needs no password."""
    devices: tuple[int, ...] = ()
    """GPU indices of each host that slots may use; none on a CPU."""
    slots_per_host: int = Field(1, ge=1)
    """Slots of each host, where `devices` is empty."""
    options: tuple[str, ...] = ()
    """More arguments of `ssh`, e.g. `-p`, `2222`."""
    python: str | None = None
    """Python on the hosts; none: the path of this one."""
    directory: str | None = None
    """Working directory on the hosts; none: that of this process."""

    def fault(self) -> str | None:
        if not self.hosts or not all(self.hosts):
            return "cluster.ssh.hosts is empty; name the hosts"
        if min(self.devices, default=0) < 0:
            return f"cluster.ssh.devices = {list(self.devices)} are no indices of GPUs; count them from 0"
        return repeated("cluster.ssh", self, "hosts", "devices")  # two engines on one GPU


class SlurmConfig(Section):
    partitions: tuple[str, ...] = ()
    """Partitions that are asked, best first; none: the cluster's default."""
    account: str | None = None
    """Account to charge."""
    time_limit: str = "24:00:00"
    """Wall-clock limit of a job (`hours:minutes:seconds`). Its end is a notice."""
    notice_s: int = Field(120, ge=10)
    """Seconds before the time limit at which Slurm signals the worker. Before a preemption it is the partition's
    GraceTime; `cluster.notices.sigterm_grace_s` must not be longer than either."""
    memory: str = "8GB"
    """Memory of a slot's job."""
    gres: str = "gpu"
    """Name of the GPUs' generic resource; a slot's job asks for `gres:<GPUs of an engine>`, on a CPU for none."""
    directives: tuple[str, ...] = ()
    """More `#SBATCH` lines, e.g. `--constraint=h100`."""
    prologue: tuple[str, ...] = ()
    """Shell lines before the worker starts, e.g. `module load cuda`."""
    python: str | None = None
    """Python on the nodes; none: the path of this one."""
    directory: str | None = None
    """Folder for job scripts and logs on a file system that the nodes share; none: the run directory."""
    queue_s: float = Field(3600.0, gt=0)
    """Seconds that a job may wait in the queue before its request failed."""


class ClusterConfig(Section):
    kind: Literal["local", "existing", "ssh", "slurm", "ec2", "gcp", "azure", "kubernetes"] = "local"
    """Where preemptible slots come from (docs/clusters.md). `local`: this machine, one process per slot; `existing`:
    the workers of the scheduler at `address`; `ssh`, `slurm`, `kubernetes`: started there; `ec2`, `gcp`, `azure`:
    machines that are bought for them. All else runs on this machine."""
    rollout_workers: int = Field(2, ge=1)
    """Rollout workers of this machine that are always there, each with one SGLang engine."""
    address: str | None = Field(None, pattern=ADDRESS)
    """Of a running Dask scheduler: `tls://host:port`."""
    host: str = "127.0.0.1"
    """Address of this machine at which its scheduler and its workers listen, and which other hosts reach. Beyond
    loopback connections are encrypted."""
    scheduler_port: int = Field(0, ge=0, le=65535)
    """Port of the Dask scheduler on `host`; 0 takes a free one."""
    tls_directory: str | None = None
    """Folder with the certificates of an existing cluster: `ca.pem`, and of `client` and `worker` `.pem` and `.key`."""
    insecure: bool = False
    """Allow connections beyond loopback without TLS. Whoever reaches the scheduler's port can then run code as you."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Memory that the run may plan with; None takes what the machine (or its cgroup) has free."""
    silent_loss_s: float = Field(30.0, ge=5)
    """A worker whose event loop sends no heartbeat for this long is lost and its process is killed, though its
    connection may still be open (a stopped process, a cut network). It is seen at most 2 s later."""
    kv_interface: str = "lo"
    """Network interface over which prefill engines hand KV to decode engines; only the cluster may reach it. It matters
    where `elastic.policy` has prefill and decode workers."""
    notices: NoticesConfig = NoticesConfig()
    ssh: SshConfig = SshConfig()
    slurm: SlurmConfig = SlurmConfig()
    ec2: Ec2Config = Ec2Config()
    gcp: GcpConfig = GcpConfig()
    azure: AzureConfig = AzureConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    def fault(self, preemptible_slots: int, trace: str | None, splits: bool) -> str | None:
        """What cannot work, with the remedy; None if nothing is wrong."""
        if self.kind == "local":
            return "cluster.address is set: set cluster.kind to existing" if self.address else None
        if trace is not None:
            return (
                f"elastic.availability.file = {trace} plays a cloud on this machine, and slots come from "
                f"cluster.kind = {self.kind}; set elastic.availability.file to null"
            )
        if not preemptible_slots:
            return f"cluster.kind = {self.kind} brings preemptible slots, and elastic.preemptible_slots is 0; raise it"
        if self.kind == "ssh" and (fault := self.ssh.fault()) is not None:
            return fault
        if self.kind in ("ec2", "gcp", "azure", "kubernetes"):
            section = getattr(self, self.kind)
            if (fault := section.fault()) is not None:
                return str(fault)
            if _is_loopback(f"//{self.host}") and not getattr(section, "endpoint_url", None):
                return f"cluster.host = {self.host} cannot be reached from {self.kind}; give this host's address"
        if self.kind == "existing":
            if self.address is None:
                return "cluster.kind = existing needs cluster.address, e.g. tls://10.0.0.1:8786"
            if self.address.startswith("tls") and self.tls_directory is None:
                return f"cluster.address = {self.address} needs cluster.tls_directory, the folder of its certificates"
            if self.address.startswith("tcp") and self.tls_directory is not None:
                return (
                    f"cluster.address = {self.address} is not encrypted, and cluster.tls_directory is set; write "
                    "tls://, or leave the directory out"
                )
            if self.address.startswith("tcp") and not (self.insecure or _is_loopback(self.address)):
                return (
                    f"cluster.address = {self.address} is not encrypted, so whoever reaches it runs code as you; start "
                    "it with TLS (docs/clusters.md), or set cluster.insecure to true if nobody else can"
                )
        scheduler = self.address if self.kind == "existing" and self.address else f"//{self.host}"
        if splits and self.kv_interface == "lo" and not _is_loopback(scheduler):
            return (
                "elastic.policy splits prefill from decode over cluster.kv_interface = lo, which other hosts do not "
                "reach; name an interface of the cluster's network, or set elastic.prefill_decode to false"
            )
        return None


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
