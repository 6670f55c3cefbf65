"""The sandboxes that `environment.sandbox.backend` names."""

from __future__ import annotations

from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.containers import ContainerBackend
from envs.sandbox.process import ProcessBackend
from envs.sandbox.protocol import SandboxBackend
from envs.sandbox.remote import RemoteBackend
from pearl.config.environment import SandboxConfig


def make_backend(limits: SandboxConfig, *, name: str) -> SandboxBackend:
    """`name`: of whoever owns them. Raises UserError with the remedy if this machine cannot have such sandboxes."""
    if limits.backend == "bubblewrap":
        return BubblewrapBackend(limits, name=name)
    if limits.backend == "swerex":
        return RemoteBackend(limits, name=name)
    if limits.backend == "process":
        return ProcessBackend(limits, name=name)
    return ContainerBackend(limits, name=name)
