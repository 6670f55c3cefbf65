"""`cluster:` where the actors run."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class ClusterConfig(Section):
    kind: Literal["local"] = "local"
    """`local`: this machine, one process per slot."""
    rollout_workers: int = Field(2, ge=1)
    """Rollout workers, each with one SGLang engine."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Memory that the run may plan with; None takes what the machine (or its cgroup) has free."""
