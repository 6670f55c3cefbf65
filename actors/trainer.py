"""Dask actor around one training rank.

Every method but `describe`, `rendezvous` and `stop` is collective: the driver calls it on all ranks at once, with equal
arguments. Methods are synchronous and take and return plain values (dicts, lists, bytes); a batch is `pack_groups`.

Nothing here imports torch or DeepSpeed at the top: a driver imports this module too, and the worker's environment must
be set before DeepSpeed is imported. The constructor and the methods run in different threads, so nothing is kept that
belongs to a thread.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.zero import ZeroTrainer


class TrainerWorker:
    """One rank; `start` again after `stop` joins another group in the same process."""

    def __init__(self) -> None:
        self._trainer: ZeroTrainer | None = None
        self._rank = -1

    def describe(self) -> dict[str, Any]:
        """Who and where this rank is: pid, host, rank (-1 before `start`), state, step, version.

        `changes` names settings in which the loaded checkpoint differs, each with [then, now].
        """
        trainer = self._trainer
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": self._rank,
            "state": trainer.state if trainer else "stopped",
            "step": trainer.step if trainer else 0,
            "version": trainer.version if trainer else 0,
            "changes": {name: list(pair) for name, pair in trainer.changes.items()} if trainer else {},
        }

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this host for `start`; ask rank 0. Another process may take the port first: then
        `start` raises on rank 0 and a new rendezvous helps."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return _reachable_host(), probe.getsockname()[1]

    def start(
        self,
        trainer: dict[str, Any],
        model_directory: str,
        snapshot_dtype: str,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        seed: int,
        total_steps: int,
        temperature: float,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Load the model and join the others; `trainer` is a TrainerConfig as a dict. Returns `describe()` and seconds.

        Raises RuntimeError if this rank is started already.
        """
        if self._trainer is not None:
            raise RuntimeError(f"rank {self._rank} is started already; stop it first")
        began = time.perf_counter()
        from pearl.config.trainer import TrainerConfig
        from trainer.zero import ZeroTrainer

        self._trainer = ZeroTrainer(
            config=TrainerConfig.model_validate(trainer),
            model_directory=Path(model_directory),
            snapshot_dtype=snapshot_dtype,
            rank=rank,
            world_size=world_size,
            master_address=address,
            master_port=port,
            seed=seed,
            total_steps=total_steps,
            temperature=temperature,
            timeout_s=timeout_s,
        )
        self._rank = rank
        return self.describe() | {"seconds": time.perf_counter() - began}

    def train(self, step: int, groups_wire: bytes) -> dict[str, float]:
        """One step on the whole batch, which every rank is sent; metrics as `ZeroTrainer.train_step` names them."""
        from trainer.wire import unpack_groups

        return self._started().train_step(step, unpack_groups(groups_wire))

    def export(self, root: str, version: int) -> dict[str, Any]:
        """Write weight snapshot `version`. Rank 0: version, nbytes, checksum, seconds, directory; other ranks: {}."""
        began = time.perf_counter()
        manifest = self._started().export(Path(root), version)
        if manifest is None:
            return {}
        from pearl.weights.snapshot import snapshot_directory

        return {
            "version": version,
            "nbytes": manifest.nbytes,
            "checksum": manifest.checksum,
            "seconds": time.perf_counter() - began,
            "directory": str(snapshot_directory(Path(root), version)),
        }

    def checksum(self) -> str:
        """Checksum of this rank's (gathered) weights in the snapshot dtype; equals that of an export."""
        return self._started().checksum()

    def save(self, directory: str, tag: str, client_state: dict[str, Any]) -> dict[str, Any]:
        """Write checkpoint `tag`, whole or not at all: its directory and seconds."""
        began = time.perf_counter()
        path = self._started().save_checkpoint(Path(directory), tag, client_state)
        return {"directory": str(path), "seconds": time.perf_counter() - began}

    def load(self, directory: str, tag: str) -> dict[str, Any]:
        """Go back to a checkpoint, of this or another number of ranks; returns the client state that was saved."""
        return self._started().load_checkpoint(Path(directory), tag)

    def offload(self) -> dict[str, Any]:
        """Move this rank's states to host memory; then only `reload` and `stop` are left.

        `seconds`; `state_bytes`, the size of what moved by DeepSpeed's books; `device_bytes_freed` and `_left`, GPU
        memory that torch gave back and still holds, measured (0 on a CPU, where nothing moves). Raises
        TrainerStateError, and changes nothing, if it is offloaded already or zero_stage is 0.
        """
        moved = self._started().offload()
        return {
            "seconds": moved.seconds,
            "state_bytes": moved.state_bytes,
            "device_bytes_freed": moved.device_bytes_before - moved.device_bytes_after,
            "device_bytes_left": moved.device_bytes_after,
        }

    def reload(self) -> dict[str, Any]:
        """Undo `offload`: `seconds`, `state_bytes` and `device_bytes_taken`, measured (0 on a CPU)."""
        moved = self._started().reload()
        return {
            "seconds": moved.seconds,
            "state_bytes": moved.state_bytes,
            "device_bytes_taken": moved.device_bytes_after - moved.device_bytes_before,
        }

    def stop(self) -> None:
        """Leave the group and free the engine; fine at any time."""
        trainer, self._trainer = self._trainer, None
        self._rank = -1
        if trainer is not None:
            trainer.close()

    def _started(self) -> ZeroTrainer:
        if self._trainer is None:
            raise RuntimeError("this rank is not started")
        return self._trainer


def _reachable_host() -> str:
    """Host by which the other Dask workers reach this one; loopback outside Dask."""
    from distributed import get_worker
    from distributed.comm.addressing import get_address_host

    try:
        return get_address_host(get_worker().address)
    except ValueError:
        return "127.0.0.1"
