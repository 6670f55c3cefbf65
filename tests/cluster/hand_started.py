"""A scheduler and workers that are started by hand, with the lines of docs/clusters.md."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.support import ROOT, START_S


class HandStarted:
    """Their processes, ended at the end of the context."""

    def __init__(
        self, folder: Path, tls: Path | None = None, host: str = "127.0.0.1", scheduler: Sequence[str] = ()
    ) -> None:
        """`scheduler`: more words of its command line."""
        self.folder, self.tls, self.host, self.scheduler = folder, tls, host, scheduler
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""

    def __enter__(self) -> HandStarted:
        told = self.folder / "address"
        told.unlink(missing_ok=True)
        line = ["--host", self.host, "--port", "0", "--address-file", str(told), *self.scheduler]
        self.start("scheduler", "pearl.cluster.scheduler", line)
        until = time.monotonic() + START_S
        while not told.exists():
            assert self.processes["scheduler"].poll() is None, self.log("scheduler")
            assert time.monotonic() < until, "the scheduler does not listen"
            time.sleep(0.05)
        self.address = told.read_text()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def worker(
        self, slot: str, *more: str, prefix: Sequence[str] = (), environment: dict[str, str] | None = None
    ) -> int:
        """Its process id."""
        line = ["--scheduler", self.address, "--slot", slot, *more]
        return self.start(slot, "pearl.cluster.worker", line, prefix, environment)

    def start(
        self,
        name: str,
        module: str,
        line: list[str],
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> int:
        tls = ["--tls", str(self.tls)] if self.tls else []
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *line, *tls], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=variables, start_new_session=True,
            )  # fmt: skip
        return self.processes[name].pid

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()
