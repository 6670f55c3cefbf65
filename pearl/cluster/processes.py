"""Worker processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pearl.cluster.errors import ActorTimeout
from pearl.cluster.launcher import MODULE, LaunchFailed, WorkerOrder, tag_prefix
from pearl.cluster.reap import TAG, describe, reap, tagged

LOG_TAIL_LINES = 8
KILL_S = 15.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a GPU that fell off the bus)."""
HEIR_S = 3.0
"""What a worker had started ends by itself within this time (`pearl.lifeline`), unless it hangs."""


class LocalProcess:
    """A child process that leads a session of its own."""

    def __init__(self, slot: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.slot, self.process, self.log = slot, process, log
        self.pid = process.pid
        self.heirs: list[psutil.Process] = []
        """What it had started when it was killed."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    async def wait(self) -> int:
        return await self.process.wait()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def terminate(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.status() != psutil.STATUS_ZOMBIE:  # then nobody knows any more what was its
                self.heirs += process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> None:
        try:
            await asyncio.wait_for(self.process.wait(), KILL_S)
        except TimeoutError:
            raise ActorTimeout(f"{self.slot}: process {self.pid} is still there {KILL_S:g} s after SIGKILL") from None
        finally:
            if self.process.stdin:
                self.process.stdin.close()
        if left := await asyncio.to_thread(_bury, self.heirs):
            raise ActorTimeout(f"{self.slot}: what it had started is still there after SIGKILL: {left}")

    def failed(self) -> LaunchFailed | None:
        """This machine refuses nothing."""
        return None

    def how(self, otherwise: str) -> str:
        code = self.process.returncode
        how = otherwise if code is None else f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.name()}: {how}{last_words(self.log)}"

    def name(self) -> str:
        return f"worker process {self.pid}"


class LocalLauncher:
    """One process per slot."""

    options: Sequence[str] = ("",)
    rest_s = 0.0

    def __init__(self, logs: Path, host: str, *, free: bool = False) -> None:
        """`host`: address at which the workers listen; `free`: they belong to no driver and outlive this process."""
        self.logs, self.host, self.free = logs, host, free

    def room(self, option: str) -> bool:
        return True

    async def check(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    async def start(self, order: WorkerOrder) -> LocalProcess:
        tls = str(order.tls.directory) if order.tls else None
        devices = {}
        if order.place is not None:
            first = order.place * order.gpus
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + order.gpus)))}
        log, owner = self.logs / f"{order.slot}.{order.life}.log", "nobody" if self.free else "stdin"
        command = [sys.executable, "-m", MODULE, *order.arguments(owner, tls=tls, host=self.host)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL if self.free else asyncio.subprocess.PIPE,  # the lifeline
                stdout=output,
                stderr=output,
                env={**os.environ, **order.environment, **devices, TAG: order.tag},
                start_new_session=True,
            )
        return LocalProcess(order.slot, process, log)

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        return describe(await asyncio.to_thread(tagged, tag_prefix(cluster, slot)))

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        await asyncio.to_thread(reap, tag_prefix(cluster, slot))


async def said_by(*line: str, timeout_s: float, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Exit code and all that a command said; no code if it was killed at its deadline."""
    process = await asyncio.create_subprocess_exec(
        *line, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=env,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None, f"timed out after {timeout_s:g} s"
    return process.returncode, output.decode(errors="replace").strip()


def last_words(log: Path) -> str:
    """The end of a log, for an error; nothing if there is none."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return ""
    return f"; its last words are in {log}:\n  " + "\n  ".join(lines) if lines else ""


def _bury(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until they have ended by themselves; kill what hangs (a stopped engine reads no lifeline). Who survives."""
    _, hanging = psutil.wait_procs(processes, timeout=HEIR_S)
    for process in hanging:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return psutil.wait_procs(hanging, timeout=HEIR_S)[1]
