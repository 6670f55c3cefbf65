"""Trainer ranks on several hosts: this machine's first, the others' over SSH.

Ranks write and read checkpoints in the run's directory, each its own part, so all hosts must see the same one. Rank 0,
which exports weights, stays on this machine.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from pearl.cluster.launcher import WorkerOrder, WorkerProcess
from pearl.cluster.processes import LocalLauncher
from pearl.cluster.ssh import SSH_FAILED, SshLauncher
from pearl.config.cluster import SshConfig
from pearl.errors import UserError


class RanksLauncher:
    """An order's `option` is the host, or empty for this machine."""

    rest_s = 0.0

    def __init__(self, here: LocalLauncher, hosts: Sequence[str], ranks: int, ssh: SshConfig) -> None:
        """`ranks`: of each host; each has the device of its number there, if there are any."""
        config = ssh.model_copy(update={"hosts": tuple(hosts), "devices": tuple(range(ranks))})
        self.here, self.there = here, SshLauncher(config, here.logs, 1)
        self.options: Sequence[str] = ("", *hosts)

    def room(self, option: str) -> bool:
        return self.there.room(option) if option else self.here.room(option)

    async def check(self) -> None:
        await self.here.check()

    async def reach(self, folder: Path) -> None:
        """Raises UserError unless every host answers and sees `folder` as it is here."""
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / f".hosts-{secrets.token_hex(8)}"
        token.write_text(token.name)
        try:
            line = f"cat {shlex.quote(str(token.absolute()))}"
            hosts = self.options[1:]
            said = await asyncio.gather(*(self.there.run(host, line) for host in hosts))
        finally:
            token.unlink()
        for host, (code, text) in zip(hosts, said, strict=True):
            if code == SSH_FAILED:
                raise UserError(f"trainer.hosts: {host} does not answer: {text}", "See docs/clusters.md, SSH.")
            if text != token.name:
                raise UserError(
                    f"trainer.hosts: {host} does not see {folder.absolute()} as this machine does: {text}",
                    "Ranks keep parts of one checkpoint there: put run_root on a file system that all of them share.",
                )

    async def start(self, order: WorkerOrder) -> WorkerProcess:
        return await (self.there if order.option else self.here).start(order)

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        return [*await self.here.left(cluster, slot), *await self.there.left(cluster, slot)]

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        await self.here.sweep(cluster, slot)
        await self.there.sweep(cluster, slot)
