"""`cluster:` where the actors run."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class ClusterConfig(Section):
    kind: Literal["local"] = "local"
    """`local`: this machine, one process per slot."""
    rollout_workers: int = Field(2, ge=1)
    """Rollout workers, each with one SGLang engine."""
    scheduler_port: int = Field(0, ge=0, le=65535)
    """Port of the Dask scheduler on loopback; 0 takes a free one."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Memory that the run may plan with; None takes what the machine (or its cgroup) has free."""
