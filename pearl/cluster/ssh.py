"""Worker processes of other hosts, over the `ssh` of this machine: its configuration, agent and known hosts.

One connection per worker. Its standard input brings the TLS material and is the lifeline afterwards: when this process
or the connection ends, the worker ends with all that it started. Nothing secret is on a command line or a remote disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.cluster.errors import ActorTimeout
from pearl.cluster.launcher import MODULE, LaunchFailed, WorkerOrder, tag_prefix
from pearl.cluster.processes import LocalProcess, last_words, said_by
from pearl.cluster.reap import LOOKED, TAG
from pearl.config.cluster import SshConfig
from pearl.core.requests import FIRST_S, Cause
from pearl.errors import UserError

CONNECT_S = 10
COMMAND_S = 60.0
"""A short command on another host, with its connection."""
SSH_FAILED = 255
"""Exit code of `ssh` itself; all others are the remote command's."""
NOBODY = "nobody/"
"""No cluster's tag."""
REACHED = "the host is reached"
"""What a host writes into a worker's log before it starts the worker."""
OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ControlPath=none",  # each connection ends alone
)  # fmt: skip
CAUSES = (
    (Cause.CREDENTIALS, "permission denied|host key verification|too many authentication|identification has changed"),
    (Cause.UNREACHABLE, "timed out|refused|no route|could not resolve|unreachable|connection (reset|closed)"),
    (Cause.CONFIGURATION, "no such file|not found|no module named|can't cd|cannot execute"),
)
"""By what `ssh` or the remote shell says."""


def cause_of(said: str) -> Cause:
    return next((cause for cause, words in CAUSES if re.search(words, said, re.IGNORECASE)), Cause.OTHER)


def _all(answers: list[Any]) -> list[Any]:
    """After every host was asked. Raises what the first one raised."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


class SshProcess(LocalProcess):
    """The `ssh` that runs one worker."""

    def __init__(
        self, launcher: SshLauncher, host: str, order: WorkerOrder, process: asyncio.subprocess.Process, log: Path
    ) -> None:
        super().__init__(order.slot, process, log)
        self.launcher, self.host, self.tag = launcher, host, order.tag

    def terminate(self) -> None:
        """Of the worker, not of `ssh`: its host warns it, and nobody here does."""

    async def ended(self) -> None:
        """The connection is cut, which ends the worker; one that hangs is looked for on its host."""
        await super().ended()
        if REACHED not in self.log.read_text(errors="replace"):
            return  # nothing was started
        try:
            await self.launcher.sweep_tag(self.host, self.tag)
        except LaunchFailed as error:
            raise ActorTimeout(f"{self.slot}: nobody can say that it has ended; {error}") from None

    def failed(self) -> LaunchFailed | None:
        if self.returncode not in (SSH_FAILED, 126, 127):
            return None
        said = last_words(self.log)
        what = f"{self.slot} did not start on {self.host}: ssh ended with {self.returncode}"
        return LaunchFailed(what + said, cause_of(said))

    def name(self) -> str:
        return f"ssh to {self.host} (process {self.pid})"


class SshLauncher:
    """Slots of the hosts in the configuration. Host and GPUs are chosen when a slot is asked for."""

    def __init__(self, config: SshConfig, logs: Path, width: int, *, free: bool = False) -> None:
        """`width`: GPUs of a slot; `free`: workers belong to no driver and stay when this process ends."""
        self.config, self.logs, self.width, self.free = config, logs, width, free
        self.rest_s = FIRST_S
        self.options: Sequence[str] = config.hosts
        self.capacity = len(config.devices) // width if config.devices else config.slots_per_host
        self._taken: dict[str, dict[int, LocalProcess | None]] = {host: {} for host in config.hosts}
        """None: its process is about to be started."""
        self._ssh = ["ssh", *OPTIONS, *config.options]
        self._python = config.python or sys.executable
        self._directory = config.directory or str(Path.cwd())

    def room(self, option: str) -> bool:
        return self._place(option) is not None

    async def check(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        if shutil.which("ssh") is None:
            raise UserError("cluster.kind = ssh needs the program ssh", "Install the OpenSSH client.")
        if not self.capacity:
            raise UserError(
                f"cluster.ssh.devices = {list(self.config.devices)} holds no slot of {self.width} GPUs",
                "Name more GPUs, or lower engine.tensor_parallel.",
            )
        tried = await asyncio.gather(*(self._try(host) for host in self.options))
        if all(tried):
            said = "; ".join(tried)
            raise UserError(f"no host of cluster.ssh.hosts can be used: {said}", "See docs/clusters.md, SSH.")

    async def start(self, order: WorkerOrder) -> SshProcess:
        host, place = order.option, self._place(order.option) if order.place is None else None
        if order.place is not None and order.place < self.capacity * len(self.options):
            host, place = self.options[order.place // self.capacity], order.place % self.capacity
        if place is None:
            raise LaunchFailed(f"{host} has {self.capacity} slots, and all are taken", Cause.CAPACITY)
        devices = self.config.devices[place * self.width : (place + 1) * self.width]
        variables = {**order.environment, TAG: order.tag, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        log = self.logs / f"{order.slot}.{order.life}.log"
        self._taken[host][place] = None  # others may ask before it has started
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *self._ssh, host, self._remote(order, variables),
                    stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                    env={**os.environ, TAG: order.tag},
                )  # fmt: skip
        except BaseException:
            del self._taken[host][place]
            raise
        started = SshProcess(self, host, order, process, log)
        self._taken[host][place] = started
        if order.tls is not None and process.stdin is not None:
            process.stdin.write(order.tls.bundle())
        if self.free and process.stdin is not None:
            process.stdin.close()
        return started

    def _remote(self, order: WorkerOrder, variables: Mapping[str, str]) -> str:
        """What the remote shell runs."""
        words = [f"{name}={value}" for name, value in variables.items()]
        if not self.free:
            line = order.arguments(tls="-" if order.tls else None)
            command = shlex.join(["env", *words, self._python, "-m", MODULE, *line])
            return f"cd {shlex.quote(self._directory)} && echo {shlex.quote(REACHED)} && exec {command}"
        line = order.arguments("nobody", tls="env" if order.tls else None)
        command = shlex.join(["env", *words, "setsid", "nohup", self._python, "-m", MODULE, *line])
        log = f"$HOME/.cache/pearl/{order.cluster}/{order.slot}.{order.life}.log"
        secret = "IFS= read -r PEARL_TLS; export PEARL_TLS; " if order.tls else ""
        return (
            f"umask 077; cd {shlex.quote(self._directory)} && mkdir -p $HOME/.cache/pearl/{order.cluster} && "
            f"{{ {secret}{command} </dev/null >{log} 2>&1 & }}"
        )

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        asked = [self._reap(host, tag_prefix(cluster, slot), "--list") for host in self.options]
        found = _all(await asyncio.gather(*asked, return_exceptions=True))
        return [f"{host}: {line}" for host, lines in zip(self.options, found, strict=True) for line in lines]

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        asked = [self.sweep_tag(host, tag_prefix(cluster, slot)) for host in self.options]
        _all(await asyncio.gather(*asked, return_exceptions=True))

    async def sweep_tag(self, host: str, tag: str) -> None:
        """End what has that tag on that host. Raises LaunchFailed if it cannot be reached, or something survives."""
        if lines := await self._reap(host, tag):
            raise LaunchFailed(f"on {host} there is still {'; '.join(lines)}")

    async def _reap(self, host: str, tag: str, *more: str) -> list[str]:
        line = shlex.join([self._python, "-m", "pearl.cluster.reap", tag, *more])
        code, said = await self.run(host, f"cd {shlex.quote(self._directory)} && {line}")
        if code or not said.endswith(LOOKED):
            raise LaunchFailed(f"{host} does not say what runs there: {said or f'exit code {code}'}", cause_of(said))
        return [text for text in said.splitlines() if text.startswith("process ")]

    async def _try(self, host: str) -> str:
        """What is wrong with the host, or nothing."""
        try:
            await self._reap(host, NOBODY, "--list")  # what `down` will ask it
        except LaunchFailed as error:
            return str(error)
        return ""

    async def run(self, host: str, command: str) -> tuple[int, str]:
        """Exit code and what was printed; `SSH_FAILED` if the host does not answer."""
        code, said = await said_by(*self._ssh, host, command, timeout_s=COMMAND_S)
        return SSH_FAILED if code is None else code, " ".join(said.split("\r\n"))

    def _place(self, host: str) -> int | None:
        """The first place of the host that nobody has."""
        taken = self._taken[host]
        for place in [place for place, process in taken.items() if process and process.returncode is not None]:
            del taken[place]
        return next((place for place in range(self.capacity) if place not in taken), None)
