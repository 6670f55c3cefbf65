"""Virtual machines that are bought by the hour, one for each slot: what EC2, GCP and Azure have in common.

A machine carries the cluster's id from the request on, so that whoever knows the id finds it, and ends nothing else. It
gets a start script and no more. Left alone it ends by itself: with its worker, which ends with the scheduler, and after
its lifetime.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pearl.cluster.certificates import Certificates
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.launcher import MODULE, LaunchFailed, WorkerOrder
from pearl.cluster.reap import TAG
from pearl.config.clouds import MachinesConfig
from pearl.core.requests import FIRST_S, Cause

LOOK_S = 5.0
"""Between two looks at a cluster's machines, of which there is one for all of them."""
ANSWER_S = 600.0
"""A provider's library has done what it was asked for, or said why not, within this time; some wait for a machine."""
GONE_S = 180.0
"""A machine that is to end has begun to within this time."""
UNSEEN_S = 60.0
"""A machine that was just started is in the provider's list within this time."""
LATE_S = 300.0
"""A machine boots and a worker drains within this time: so much longer is its certificate good."""
KILL_S = 60
"""A worker that had its notice at the end of the lifetime is killed then."""
CLUSTER, SLOT, LIFE = "pearl-cluster", "pearl-slot", "pearl-life"
"""Names of the tags (labels)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """As its provider sees it."""

    id: str
    slot: str
    state: str
    """In the provider's word."""
    alive: bool
    """It boots or runs."""
    there: bool
    """It is still to be ended: it costs something."""
    reason: str = ""
    """Why it is no longer alive, if the provider says so."""

    def __str__(self) -> str:
        return f"machine {self.id} ({self.slot}): {self.state}"


class MachineProcess:
    """The worker of one machine, which ends with it."""

    def __init__(self, launcher: MachineLauncher, order: WorkerOrder, machine: Machine) -> None:
        self.launcher, self.order, self.machine = launcher, order, machine
        self._seen = False
        """One that is not in the provider's list is gone."""
        self._ending: asyncio.Future[None] | None = None

    def terminate(self) -> None:
        """The cloud warns its machines."""

    def end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self.launcher.delete([self.machine]))

    async def ended(self) -> None:
        name = f"machine {self.machine.id} of {self.order.slot}"
        try:
            if self._ending is not None:
                await asyncio.shield(self._ending)
            await asyncio.wait_for(self.wait(), GONE_S)
        except TimeoutError:
            raise ActorTimeout(f"{name} is still {self.machine.state} {GONE_S:g} s after it was to end") from None
        except LaunchFailed as error:
            self._ending = None
            raise ActorTimeout(f"{name} could not be ended: {error}") from None

    async def wait(self) -> None:
        """Until the provider says that it is no longer alive; without an answer, nothing is known."""
        waited_s = 0.0
        while self.machine.alive:
            try:
                machines = await self.launcher.look(self.order.cluster)
            except LaunchFailed:
                machines = {}
            else:
                self._seen |= self.machine.id in machines or (self._ending is not None and self._ending.done())
                if self._seen or waited_s > UNSEEN_S:
                    gone = replace(self.machine, state="gone", alive=False, there=False)
                    self.machine = machines.get(self.machine.id, gone)
            if self.machine.alive:
                await asyncio.sleep(self.launcher.look_s)
                waited_s += self.launcher.look_s

    def failed(self) -> LaunchFailed | None:
        """It ended before its worker came, and the provider gives a reason of its own."""
        said = self.machine.reason
        cause = self.launcher.cause_of(said)
        if self.machine.alive or cause is Cause.OTHER:
            return None
        return LaunchFailed(f"{self.order.slot}: {self.launcher.name} ended {self.machine.id}: {said}", cause)

    def how(self, otherwise: str) -> str:
        state = otherwise if self.machine.alive else f"{self.machine.state} {self.machine.reason}".strip()
        return f"{self.launcher.name} machine {self.machine.id} ({self.order.option}): {state}; {self.launcher.log}"


class MachineLauncher(ABC):
    """A Launcher of machines (or of pods). A subclass says how one provider makes, lists and deletes them."""

    name: str
    """Of the provider."""
    log = "its log is on it, in /var/log/cloud-init-output.log or the journal"
    causes: Sequence[tuple[Cause, str]]
    """By what the provider says (a regular expression)."""
    rest_s = FIRST_S

    def __init__(self, options: Sequence[str], width: int, *, free: bool) -> None:
        """`width`: GPUs of a slot; `free`: workers belong to no driver, and end with the scheduler alone."""
        self.options, self.width, self.free = options, width, free
        self.look_s = LOOK_S
        self._looking = asyncio.Lock()
        self._looked_at_s = float("-inf")
        self._seen: dict[str, Machine] = {}

    @abstractmethod
    async def check(self) -> None:
        """As a Launcher's."""

    @abstractmethod
    async def create(self, order: WorkerOrder) -> Machine:
        """Ask for a machine that starts the worker. Raises LaunchFailed."""

    @abstractmethod
    async def find(self, cluster: str) -> list[Machine]:
        """All machines of that cluster; those that are gone may be among them. Raises LaunchFailed."""

    @abstractmethod
    async def delete(self, machines: Sequence[Machine]) -> None:
        """Begin to. Those that are gone already mean nothing. Raises LaunchFailed."""

    def room(self, option: str) -> bool:
        return True

    async def start(self, order: WorkerOrder) -> MachineProcess:
        creation = asyncio.ensure_future(self.create(order))
        try:
            machine = await asyncio.shield(creation)
        except asyncio.CancelledError:  # the request is on its way: what it brings is given back
            with contextlib.suppress(LaunchFailed):
                await self.delete([await creation])
            raise
        return MachineProcess(self, order, machine)

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        return [str(machine) for machine in await self._there(cluster, slot)]

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        until = asyncio.get_running_loop().time() + GONE_S
        while (machines := await self._there(cluster, slot)) and asyncio.get_running_loop().time() < until:
            await self.delete(machines)
            await asyncio.sleep(min(1.0, self.look_s))

    async def look(self, cluster: str) -> dict[str, Machine]:
        """By id, as they were at most `look_s` ago. Raises LaunchFailed."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now - self._looked_at_s >= self.look_s:
                self._seen = {machine.id: machine for machine in await self.find(cluster)}
                self._looked_at_s = now
        return self._seen

    def cause_of(self, said: str) -> Cause:
        return next((cause for cause, words in self.causes if re.search(words, said, re.IGNORECASE)), Cause.OTHER)

    async def _there(self, cluster: str, slot: str | None) -> list[Machine]:
        machines = await self.find(cluster)
        return [machine for machine in machines if machine.there and slot in (None, machine.slot)]


async def answered(provider: str, asked: Awaitable[Any]) -> Any:
    """What the provider's library says. Raises LaunchFailed if it says nothing."""
    try:
        return await asyncio.wait_for(asked, ANSWER_S)
    except TimeoutError:
        raise LaunchFailed(f"{provider} did not answer within {ANSWER_S:g} s", Cause.UNREACHABLE) from None


def pairs(kinds: Sequence[str], places: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Options in the order of preference, by name: (kind of machine, place); a place is "" where there is no choice."""
    return {f"{kind} in {place}" if place else kind: (kind, place) for place in places or ("",) for kind in kinds}


def machine_name(order: WorkerOrder) -> str:
    """Valid as a name of a machine with all providers: lower case, no other life's."""
    return f"pearl-{order.cluster}-{order.slot}-{order.life}".lower()


def tags(order: WorkerOrder, config: MachinesConfig) -> dict[str, str]:
    return {**config.labels, CLUSTER: order.cluster, SLOT: order.slot, LIFE: str(order.life)}


def start_script(
    order: WorkerOrder, config: MachinesConfig, cloud: Literal["ec2", "gcp", "azure"], *, free: bool
) -> str:
    """What the machine runs as root; it asks its `cloud` for notices, unless the order says otherwise.

    Who can read it can act as this one worker for the machine's lifetime: it holds a certificate of its own that ends
    then, and neither the authority's key nor a client's, nor any key of the cloud.
    """
    if order.notices.source == "none":
        order = replace(order, notices=order.notices.model_copy(update={"source": cloud}))
    variables = {**order.environment, TAG: order.tag, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(order.gpus)))}
    line = order.arguments("nobody" if free else "scheduler", tls="env" if order.tls else None)
    command = [config.python, "-m", MODULE, *line]
    if order.tls is not None:
        variables["PEARL_TLS"] = short_lived(order.tls, config.lifetime_s + config.boot_s + LATE_S)
    if config.container is not None:
        passed = [word for name in variables for word in ("-e", name)]  # by name: values stay out of command lines
        gpus = ["--gpus=all"] if order.gpus else []
        run = ["docker", "run", "--rm", "--net=host", "--ipc=host", *gpus, *passed, "-w", config.directory]
        command = [*run, config.container, *command]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    life = f"timeout --signal=TERM --kill-after={KILL_S + round(order.notices.sigterm_grace_s)} {config.lifetime_s:.0f}"
    where = "" if config.container is not None else f"cd {shlex.quote(config.directory)} && "
    return "\n".join(
        [
            "#!/bin/sh",
            "umask 077",
            "export HOME=${HOME:-/root}",
            *config.setup,
            *exports,
            f"{where}{life} {shlex.join(command)}",
            "shutdown -h now",
            "",
        ]
    )


def short_lived(tls: Certificates, valid_s: float) -> str:
    """A line of `Certificates.bundle` with a worker's certificate made for one machine."""
    with tempfile.TemporaryDirectory(prefix="pearl-tls-") as folder:
        return tls.issue("worker", Path(folder), valid_s).bundle().decode().strip()
