"""How a worker process comes to life somewhere: on this machine, over SSH, as a job of a batch system, in a cloud.

A launcher is all that an adapter for another provider has to bring: start *this* life of *this* slot, say how it ends,
and end it. Membership, actors and the meaning of a loss are the cluster's (`pearl.cluster.cluster`), plan and requests
the adapter's (`pearl.cluster.launching`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pearl.cluster.certificates import Certificates
from pearl.cluster.errors import ActorLost
from pearl.config.cluster import NoticesConfig
from pearl.core.requests import Cause

MODULE = "pearl.cluster.worker"
JOIN_S = 300
"""A worker that its scheduler has not taken after so long at its start ends: its job waited longer than its driver
lived, the command that asked for it was killed, or a person gave it another cluster's address or certificates."""


class LaunchFailed(ActorLost):
    """The provider did not give what was asked for: its reason, and what kind of reason that is."""

    def __init__(self, reason: str, cause: Cause = Cause.OTHER) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One life of one slot that is wanted."""

    cluster: str
    """Of this run or cluster, in no other: letters, digits, dots and dashes."""
    slot: str
    life: int
    zone: str
    scheduler: str
    """Its address, as the worker reaches it."""
    gpus: int = 0
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    notices: NoticesConfig = field(default_factory=NoticesConfig)
    tls: Certificates | None = None
    option: str = ""
    """One of the launcher's `options`."""
    place: int | None = None
    """Number of the slot among all that the provider can have, where the one who asks keeps count of them."""

    @property
    def tag(self) -> str:
        """In the environment of the worker and of all that it starts (`pearl.cluster.reap.TAG`)."""
        return f"{self.cluster}/{self.slot}#{self.life}"

    def arguments(self, owner: str = "stdin", *, tls: str | None = None, host: str | None = None) -> list[str]:
        """Command line of `python -m pearl.cluster.worker`, without secrets.

        `owner`: what the worker ends with, "stdin" (the lifeline), "scheduler", or "nobody": then it is free, its life
        is its own to count, and only the scheduler's end is its own. `tls`: a directory as that host sees it, "-" for
        standard input, "env" for the environment; `host`: the address to listen at, by default the one from which the
        scheduler is reached.
        """
        line = ["--scheduler", self.scheduler, "--slot", self.slot]
        line += [] if owner == "nobody" else ["--incarnation", str(self.life)]
        line += [
            "--zone",
            self.zone,
            "--owner",
            owner,
            "--notices",
            self.notices.model_dump_json(exclude_defaults=True),
        ]
        line += [] if owner == "stdin" else ["--join-s", str(JOIN_S)]
        line += ["--host", host] if host else []
        return [*line, "--tls", tls] if tls else line


def tag_prefix(cluster: str, slot: str | None = None) -> str:
    """What the tags of a cluster, or of all lives of one of its slots, begin with."""
    return f"{cluster}/{slot}#" if slot else f"{cluster}/"


class WorkerProcess(Protocol):
    """One life that was started, as its provider sees it. Nothing here blocks the event loop."""

    def end(self) -> None:
        """Begin to end it with all that it started, by force. Twice is once."""

    async def ended(self) -> None:
        """After `end`: return when it is gone, so that its GPUs are free. Raises ActorTimeout with what is left."""

    async def wait(self) -> object:
        """Until it has ended, for whatever reason. Can be cancelled and asked again."""

    def failed(self) -> LaunchFailed | None:
        """After `wait`: what the provider said, if it was the provider that did not let the worker come."""

    def how(self, otherwise: str) -> str:
        """How it ended, with its last words; `otherwise` while nothing is known."""


class Launcher(Protocol):
    """Starts workers at one provider. Its constructor touches nothing."""

    options: Sequence[str]
    """Ways to ask for the same slot, best first (instance types, availability zones, partitions); at least one."""
    rest_s: float
    """Seconds that an option is left alone after its first failure (`pearl.core.requests`), and then asked again; with
    0 it is asked again by `ClusterAdapter.request` only."""

    def room(self, option: str) -> bool:
        """Whether one more slot could be had in that way, as far as is known here."""

    async def check(self) -> None:
        """Before anything starts. Raises UserError, with the remedy, if the provider cannot be used."""

    async def start(self, order: WorkerOrder) -> WorkerProcess:
        """Ask the provider, and return once it has taken the request: the worker joins later, or `wait` returns.

        Raises LaunchFailed. Whatever it started is found by `left` from before it is started.
        """

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        """What the provider still has of that cluster (of that slot), in words; also what another process started.

        Raises LaunchFailed if it cannot say so.
        """

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        """End all of it, by force; `left` is asked afterwards. Raises LaunchFailed."""
