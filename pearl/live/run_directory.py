"""The run directory and the shared-memory folder of its snapshots.

config.yaml            the resolved configuration
journal.bin            what a resume needs: tokens, ends, steps (see `journal.py`)
events.jsonl           every event and instruction, append-only
metrics.jsonl          one object per optimizer step (also as TensorBoard scalars under tensorboard/)
trajectories.msgpack   every sample that ended, with its tokens, append-only
workers/  engines/     logs of the processes
checkpoints/           DeepSpeed checkpoints
profile.yaml           costs of the engine and shape of the workload, as `pearl plan --profile` takes them
summary.json           what was achieved
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import psutil
import yaml

from pearl.config import RunConfig
from pearl.config.changes import refuse_changes
from pearl.errors import UserError
from pearl.weights.copies import SHARED_MEMORY

PREFIX = "pearl-"


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.journal = path / "journal.bin"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.trajectories = path / "trajectories.msgpack"
        self.workers = path / "workers"
        self.engines = path / "engines"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.profile = path / "profile.yaml"
        self.summary = path / "summary.json"
        self.snapshots = _snapshot_folder(path)

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make the directory and write the resolved configuration. Raises UserError if it cannot be used."""
        path = Path(config.run_dir) if config.run_dir else Path(config.run_root) / _stamped(config.name)
        key = "run_dir" if config.run_dir else "run_root"
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"{key} = {str(path)!r} cannot be written ({error.strerror})", "Choose another place."
            ) from error
        if any(path.iterdir()):
            raise UserError(
                f"{key} = {str(path)!r} is not empty", "Choose a new directory; a run never overwrites another."
            )
        directory = cls(path.resolve())
        (path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        for folder in (directory.workers, directory.engines):
            folder.mkdir()
        directory._lock()
        sweep_shared_memory()
        directory.snapshots.mkdir()
        return directory

    @classmethod
    def reopen(cls, config: RunConfig) -> RunDirectory:
        """The directory of an interrupted run: `run_dir`, or the newest one of this name under `run_root`.

        Raises UserError if there is none, if it is in use, or if the configuration changed in what matters.
        """
        path = Path(config.run_dir) if config.run_dir else _newest(Path(config.run_root), config.name)
        if path is None or not (path / "journal.bin").exists():
            where = config.run_dir or f"{config.run_root}/{config.name}-*"
            raise UserError(f"--resume: no run at {where}", "Name its directory with run_dir=..., or start without.")
        directory = cls(path.resolve())
        directory._lock()
        refuse_changes(yaml.safe_load((path / "config.yaml").read_text()), config.model_dump(mode="json"))
        sweep_shared_memory()
        directory.snapshots.mkdir(parents=True)
        return directory

    def _lock(self) -> None:
        """One driver per directory; the kernel drops the lock however the driver ends."""
        self._lock_file = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{self.path} is in use by another `pearl train`", "Stop that one first.") from error

    def close(self) -> None:
        """Free what lies in memory."""
        shutil.rmtree(self.snapshots, ignore_errors=True)


def _newest(root: Path, name: str) -> Path | None:
    stamp = "[0-9]" * 8 + "-" + "[0-9]" * 6
    return max(root.glob(f"{name}-{stamp}"), key=lambda path: path.name, default=None)


def _stamped(name: str) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _snapshot_folder(path: Path) -> Path:
    """In memory where there is shared memory, named after its owner so that leftovers can be told."""
    if os.access(SHARED_MEMORY, os.W_OK):
        started = int(psutil.Process().create_time() * 100)
        return SHARED_MEMORY / f"{PREFIX}{os.getpid()}-{started}-{path.name}"
    return path / "snapshots"


def sweep_shared_memory() -> None:
    """Remove snapshot folders whose owner is dead (a driver that was killed cannot clean up)."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        pid, _, rest = folder.name.removeprefix(PREFIX).partition("-")
        started = rest.partition("-")[0]
        if pid.isdigit() and started.isdigit() and not _is_alive(int(pid), int(started)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int, started: int) -> bool:
    try:
        return int(psutil.Process(pid).create_time() * 100) == started
    except psutil.Error:
        return False
