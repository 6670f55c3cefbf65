"""The ranks that train together: this process's environment, joining and leaving the group, small reductions.

`prepare_process` must run before anything imports DeepSpeed, which reads its accelerator from the environment once; so
nothing in this package imports DeepSpeed at the top of a module.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    def barrier(self) -> None:
        torch.distributed.barrier()

    def synchronise(self) -> None:
        """Wait for what was queued on the GPU; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give freed GPU memory back, so that another process can have it; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def device_bytes(self) -> int:
        """GPU memory that torch holds in this process, used or cached; 0 on a CPU."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def total(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, fp64; collective."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def largest(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, fp64; collective."""
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: list[float], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        tensor: Tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor, operation)
        return tensor.tolist()


def prepare_process(threads: int) -> None:
    """Set what DeepSpeed, transformers and torch read from the environment, and quieten them."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A process has one device, chosen by CUDA_VISIBLE_DEVICES before it started.
    os.environ["LOCAL_RANK"] = "0"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # DeepSpeed's own calls, which torch renames.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _store(rank: int, size: int, address: str, port: int, limit: timedelta) -> torch.distributed.TCPStore:
    """Where the ranks meet. Rank 0 listens on `address` alone; torch's own socket would on every interface."""
    if rank:
        return torch.distributed.TCPStore(address, port, size, False, limit)
    listener = socket.create_server((address, port))
    return torch.distributed.TCPStore(address, port, size, True, limit, master_listen_fd=listener.detach())


def _interface_towards(address: str) -> str:
    """Name of this host's network interface from which `address` is reached. Raises OSError if it is not."""
    ((family, _, _, _, target), *_) = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    for name, addresses in interfaces:
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    raise OSError(f"no interface has the address {own}, from which {address} is reached")


def join_world(rank: int, size: int, address: str, port: int, timeout_s: float) -> World:
    """Join the process group (NCCL on a GPU, gloo on a CPU) whose rank 0 listens on `address:port`.

    Waits at most `timeout_s` for the others, and later as long for any one collective. Raises RuntimeError if this
    process is in a group already.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if torch.distributed.is_initialized():
        raise RuntimeError("this process trains already; close the other trainer first")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    limit = timedelta(seconds=timeout_s)
    # DeepSpeed makes groups of its own and gives them no deadline, so torch's defaults (10 or 30 minutes) would hold.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=address, MASTER_PORT=str(port))
    # Only inference uses this operator, and joining would build it with a C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = get_accelerator()
    device = torch.device("cpu")
    if accelerator.device_name() == "cuda":
        device = torch.device("cuda", 0)
        accelerator.set_device(0)
    interface = _interface_towards(address)  # the ranks' own connections stay there, too
    os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    backend = accelerator.communication_backend_name()
    store = _store(rank, size, address, port, limit)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=limit, verbose=False)
    return World(rank, size, device)


def leave_world(*, abort: bool = False) -> None:
    """Leave the process group so that this process can join another one; nothing to do if it is in none.

    `abort` gives up collectives that a lost rank will never join; NCCL would wait for them. gloo has given up already.
    """
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if torch.distributed.is_initialized():
        if abort and torch.distributed.get_backend() == "nccl":
            torch.distributed.distributed_c10d._abort_process_group()
            groups._release_process_group_references(group=None)
        else:
            # Not torch's own call: DeepSpeed keeps groups of its own, which only this one drops.
            deepspeed.comm.destroy_process_group()
    # Else the next join keeps the dead backend.
    comm.cdb = None
