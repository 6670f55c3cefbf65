"""One SGLang server as a process group: start, readiness, death watch, end.

The launcher leads a session of its own, so that one signal reaches every process of the engine. It holds the read end
of a pipe whose write end only this object has: however the owner ends, the kernel closes the pipe and the group is
killed (see `pearl.lifeline`). A daemon thread waits for the launcher, kills what is left of the group, then reaps it;
another one kills the group as soon as a scheduler or the detokenizer ends (SGLang itself takes seconds for that).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import psutil

from actors.sglang.errors import EngineDied, EngineError, EngineTimeout, PortTaken
from actors.sglang.leftovers import shared_files
from pearl.errors import UserError

POLL_S = 0.1
"""Between two looks at a server that starts or stops."""
HEALTH_S = 5.0
"""A server that starts may take a connection and forget it; then it is asked again."""
LOG_LINES = 8
"""Last lines of the log that an error message shows."""
LOG_TAIL_BYTES = 32768
START_MARK = "$ "
"""Begins the line with the command that every start writes into the log."""
PORT_RANGE, PORT_TRIES = 8192, 64
PART_TITLE = "sglang::"
"""How SGLang's schedulers and detokenizer call themselves."""


def free_port() -> int:
    """An unused loopback port, below those that the kernel gives to outgoing connections: a server binds its port only
    after many seconds. Another process may still take it; then `start` raises PortTaken."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest = 32768
    for port in random.sample(range(max(1024, lowest - PORT_RANGE), lowest), PORT_TRIES):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError(f"no free port among {PORT_TRIES} tried below {lowest}")


def require_free(port: int, key: str = "the engine's port") -> None:
    """UserError if a port that the user chose (as `key`) is taken on loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"{key} = {port} cannot be used ({error.strerror})",
                "Choose another port, or leave it out so that a free one is taken.",
            ) from error


class EngineProcess:
    """A started server. Make it with `start`; `died` says when and why it ended, whoever ended it."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int, scratch: Path, *, port: int, log: Path) -> None:
        self.pid = popen.pid
        self.port = port
        self.log = log
        self.start_s = 0.0
        """Seconds from the start of the process until it answered."""
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to one message once the launcher has ended and its group was killed; never raises."""
        self._popen = popen
        self._lifeline = lifeline
        self._scratch = scratch
        self._stopping = False
        self._cause = ""
        self._leftovers: set[Path] = set()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name=f"pearl-engine-{self.pid}", daemon=True).start()

    @classmethod
    async def start(
        cls, flags: Sequence[str], environment: Mapping[str, str], *, port: int, log: Path, timeout_s: float
    ) -> EngineProcess:
        """Start a server and wait until it answers `/health`.

        Raises EngineDied as soon as it ends, EngineTimeout after `timeout_s`; nothing of it is left behind then.
        """
        began = time.monotonic()
        process = cls(*_spawn(flags, environment, log), port=port, log=log)
        try:
            await process._wait_ready(began + timeout_s, timeout_s)
        except BaseException:
            await process.stop(grace_s=0.0)
            raise
        process.start_s = time.monotonic() - began
        process._watch_parts()
        return process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def returncode(self) -> int | None:
        """Exit status of the launcher (negative: the signal), None while it runs."""
        return self._popen.returncode

    def processes(self) -> list[psutil.Process]:
        """Live processes of the engine's group (zombies do not count)."""
        return group_members(self.pid)

    def rss_bytes(self) -> int:
        """Resident memory of the whole group."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Last non-empty lines of the log since the last start, each cut to 300 characters."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
            kept: list[str] = []
            for line in text.splitlines():
                if line.startswith(START_MARK):
                    kept.clear()
                elif line.strip():
                    kept.append(line[:300])
            return "\n".join(kept[-lines:])
        return ""

    async def stop(self, grace_s: float = 5.0, timeout_s: float = 30.0) -> None:
        """End the group: SIGINT to the launcher (`launch` blocks SIGTERM), after `grace_s` SIGKILL to all.

        Returns when no process of it is left and it is reaped. Raises EngineTimeout if something survives `timeout_s`
        after the kill. Stopping twice is harmless.
        """
        self._stopping = True
        if self.returncode is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
            await asyncio.wait({self.died}, timeout=grace_s)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + timeout_s
        while not self.died.done() or self.processes():
            if time.monotonic() > deadline:
                left = ", ".join(str(process.pid) for process in self.processes())
                raise EngineTimeout(f"engine processes {left} are still there {timeout_s:g} s after SIGKILL")
            await asyncio.wait({self.died}, timeout=POLL_S)
            if self.died.done() and self.processes():
                self._signal(signal.SIGKILL)
                await asyncio.sleep(POLL_S)

    async def _wait_ready(self, deadline: float, timeout_s: float) -> None:
        async with aiohttp.ClientSession() as session:
            while (left := deadline - time.monotonic()) > 0:
                if self.died.done():
                    taken = "address already in use" in self.log_tail(lines=200).lower()
                    raise (PortTaken if taken else EngineDied)(self.died.result())
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    patience = aiohttp.ClientTimeout(total=min(HEALTH_S, left))
                    async with session.get(f"{self.url}/health", timeout=patience) as reply:
                        if reply.status == 200:
                            return
                await asyncio.wait({self.died}, timeout=POLL_S)
        raise EngineTimeout(f"the engine did not answer within {timeout_s:g} s; its log ends\n{self.log_tail()}")

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        # Look without reaping: as long as the launcher is a zombie, its number cannot name another group.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)
        status = self._popen.wait()
        os.close(self._lifeline)
        shutil.rmtree(self._scratch, ignore_errors=True)
        for path in self._leftovers:
            path.unlink(missing_ok=True)
        how = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        how = self._cause or how
        message = "the engine was stopped" if self._stopping else f"the engine {how}; its log ends\n{self.log_tail()}"

        def tell() -> None:
            if not self.died.done():
                self.died.set_result(message)

        with contextlib.suppress(RuntimeError):  # the owner's loop is closed already
            loop.call_soon_threadsafe(tell)

    def _watch_parts(self) -> None:
        parts = select.poll()
        names: dict[int, str] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                self._leftovers |= shared_files(process.pid)
                title = " ".join(process.cmdline()).strip()
                if title.startswith(PART_TITLE):
                    fd = os.pidfd_open(process.pid)
                    parts.register(fd, select.POLLIN)
                    names[fd] = f"{title} (pid {process.pid})"

        def watch() -> None:
            ended = parts.poll()
            if not self._stopping and self._running():
                self._cause = f"lost its part {names[ended[0][0]]}"
            self._signal(signal.SIGKILL)
            for fd in names:
                os.close(fd)

        if names:
            threading.Thread(target=watch, name=f"pearl-engine-parts-{self.pid}", daemon=True).start()

    def _running(self) -> bool:
        """Whether the launcher runs, asked without reaping it."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        return False

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _spawn(
    flags: Sequence[str], environment: Mapping[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], int, Path]:
    """The launcher, the write end of its lifeline, and its temporary folder."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # SGLang leaves socket files in its temporary folder. Paths of Unix sockets must be short, so not in the run folder.
    scratch = Path(tempfile.mkdtemp(prefix="pearl-engine-"))
    read_end, write_end = os.pipe()
    own = ["--lifeline-fd", str(read_end), "--scratch", str(scratch)]
    command = [sys.executable, "-m", "actors.sglang.launch", *own, *flags]
    try:
        with log.open("ab") as output:
            output.write(f"{START_MARK}{shlex.join(command)}\n".encode())
            output.flush()
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment, "TMPDIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end,),
                start_new_session=True,
            )
    except BaseException:
        os.close(write_end)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(read_end)
    return popen, write_end, scratch


def group_members(group: int) -> list[psutil.Process]:
    """Live processes of one process group; zombies, which only wait for their parent, are left out."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members
