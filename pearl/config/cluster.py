"""`cluster:` where the actors run."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


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


class ClusterConfig(Section):
    kind: Literal["local"] = "local"
    """`local`: this machine, one process per slot."""
    rollout_workers: int = Field(2, ge=1)
    """Rollout workers, each with one SGLang engine."""
    scheduler_port: int = Field(0, ge=0, le=65535)
    """Port of the Dask scheduler on loopback; 0 takes a free one."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Memory that the run may plan with; None takes what the machine (or its cgroup) has free."""
    silent_loss_s: float = Field(30.0, ge=5)
    """A worker whose event loop sends no heartbeat for this long is lost and its process is killed, though its
    connection may still be open (a stopped process, a cut network). It is seen at most 2 s later."""
    kv_interface: str = "lo"
    """Network interface over which prefill engines hand KV to decode engines; only the cluster may reach it. It matters
    where `elastic.policy` has prefill and decode workers."""
    notices: NoticesConfig = NoticesConfig()
