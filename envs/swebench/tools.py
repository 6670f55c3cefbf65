"""Run pip, git and the like on this machine while building: bounded, with all that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envs.swebench.errors import BuildFailed, BuildTimeout

PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Variables of ours that a build sees; besides PIP_*, XDG_* and proxies. Packages' setup scripts run in it."""
GIT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
SAID_CHARS = 600
SAID_LINES = 3
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Tools:
    """Commands that share a deadline (`time.monotonic()`), and end when `stop` is set."""

    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def within(cls, timeout_s: float, stop: threading.Event | None = None) -> Tools:
        return cls(time.monotonic() + timeout_s, stop or threading.Event())

    def run(self, argv: Sequence[str | Path], cwd: Path, extra: Mapping[str, str] | None = None) -> str:
        """Standard output. Raises BuildFailed with the end of what was said, or BuildTimeout."""
        process = subprocess.Popen(
            [str(part) for part in argv],
            cwd=cwd,
            env={**_environment(), **(extra or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        what = " ".join(str(part) for part in argv[:4])
        try:
            said = self._wait(process, what)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise BuildFailed(f"`{what} …` failed: {_told(said)}")
        return said

    def _wait(self, process: subprocess.Popen[str], what: str) -> str:
        while True:
            left = self.deadline - time.monotonic()
            try:
                return process.communicate(timeout=min(max(left, 0.0), POLL_S))[0]
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise BuildTimeout(f"`{what} …` did not end within the build's deadline") from None
                if self.stop.is_set():
                    raise BuildFailed(f"`{what} …` was stopped") from None

    def git(self, tree: Path, *arguments: str) -> str:
        options = ("-c", "init.defaultBranch=main", "-c", "gc.auto=0", "-c", "core.autocrlf=false")
        ceiling = {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        return self.run(["git", *options, *arguments], tree, {**GIT, **ceiling})


def _told(said: str) -> str:
    """What went wrong, in one line: what calls itself an error, else the last that was said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error:", "fatal:"))]
    return "; ".join((errors or lines)[-SAID_LINES:])[-SAID_CHARS:]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in PASSED_ON}
    kept |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "XDG_")) or name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "LC_ALL": "C.UTF-8"}
