"""Trainer ranks in processes of their own that talk over pipes, so that a test can kill one.

`python -m tests.trainer.ranks` is such a process: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pearl.config.trainer import TrainerConfig
from pearl.models import resolve_model
from tests.trainer.samples import MODEL, free_port, make_groups

PATIENCE_S = 180.0
REPOSITORY = Path(__file__).parent.parent.parent


class RankError(Exception):
    """What the process raised, as its type and text."""


class RankProcess:
    """One process; `send` and `receive` are apart, so that several can be in one collective."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.pid = self._process.pid
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def send(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Answer to the oldest `send`; raises RankError for an error there, EOFError if the process is gone.

        queue.Empty after PATIENCE_S.
        """
        line = self._answers.get(timeout=PATIENCE_S)
        if not line:
            raise EOFError(f"rank process {self.pid} is gone")
        kind, value = json.loads(line)
        if kind == "error":
            raise RankError(value)
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.send(method, *arguments)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


def on_all(processes: Sequence[RankProcess], method: str, *arguments: Any) -> list[Any]:
    """A collective call; all are waited for."""
    for process in processes:
        process.send(method, *arguments)
    return [process.receive() for process in processes]


def form(processes: Sequence[RankProcess], settings: TrainerConfig, seed: int = 0) -> None:
    """Start a trainer over the processes, rank by position."""
    port = free_port()
    for rank, process in enumerate(processes):
        process.send(
            "start", settings.model_dump(mode="json"), str(resolve_model(MODEL)), "float32",
            rank, len(processes), "127.0.0.1", port, seed, 10, 1.0, 600.0,
        )  # fmt: skip
    for process in processes:
        process.receive()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print is no answer.
    from actors.trainer import TrainerWorker
    from trainer.wire import pack_groups

    worker = TrainerWorker()

    def stall() -> None:
        """The next step stops between two micro-batches, says so, and waits to be killed."""
        engine = worker._started()._engine

        def backward(*_: object, **__: object) -> None:
            answers.write(json.dumps(["ok", "stalled"]) + "\n")
            time.sleep(3600)

        engine.backward = backward

    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            if method == "train":
                (step,) = arguments
                value: Any = worker.train(step, pack_groups(make_groups(step)))
            elif method == "train_packed":
                step, path = arguments
                value = worker.train(step, Path(path).read_bytes())
            elif method == "stall":
                value = None
                stall()
            else:
                value = getattr(worker, method)(*arguments)
            answers.write(json.dumps(["ok", value]) + "\n")
        except Exception as error:
            answers.write(json.dumps(["error", f"{type(error).__name__}: {error}"]) + "\n")


if __name__ == "__main__":
    main()
