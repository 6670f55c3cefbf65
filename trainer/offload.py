"""Moves a trainer's states between its GPU and host memory, so that an engine can use the GPU between two steps.

On a CPU the same calls run, and DeepSpeed's books change, but no byte moves. What stays on a GPU: the CUDA context,
NCCL's buffers, ZeRO-3's small persistent parameters and the model's buffers; `device_bytes_after` tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.world import World


@dataclass(frozen=True, slots=True)
class Moved:
    """One offload or reload of this rank."""

    seconds: float
    state_bytes: int
    """Size of the states that changed place by DeepSpeed's books, and of the reference model."""
    device_bytes_before: int
    """GPU memory that torch held, measured (cached blocks count: no other process can have them). 0 on a CPU."""
    device_bytes_after: int


class Offloader:
    """Offload and reload, in turn; the caller sees to that (`trainer.state`). Both are collective.

    At stages 1 and 2 DeepSpeed moves everything. At stage 3 it moves optimizer states of its own FusedAdam only, which
    needs a compiler: its reload knows that optimizer's two tensors by name, and torch's AdamW has a third, the step. So
    there the fp32 weights and the optimizer's states are moved here, whatever tensors they are.
    """

    def __init__(self, engine: Any, reference: Any, world: World) -> None:
        self._engine, self._reference, self._world = engine, reference, world
        self._stage = int(engine.zero_optimization_stage())

    def refusal(self) -> str | None:
        """Why this engine cannot be offloaded and come back exact; None if it can."""
        if self._stage == 0:
            return "at trainer.zero_stage = 0 DeepSpeed has no states to move; set it to 1, 2 or 3"
        offloaded = self._engine.zero_offload_param()
        if offloaded is not None and offloaded.device != "none":
            return "its parameters are kept in host memory already (offload_param)"
        if self._stage == 3 and len(self._engine.optimizer.param_groups) > 1:
            return "ZeRO-3 puts the weights of several parameter groups back in another order; use one group"
        if self._stage == 3 and not all(p.requires_grad for p in self._engine.module.parameters()):
            return "ZeRO-3 has no place for frozen parameters in its buffer; use stage 1 or 2"
        return None

    def offload(self) -> Moved:
        """To host memory (page-locked on a GPU)."""
        return self._measured(self._to_host)

    def reload(self) -> Moved:
        """Back; every value as it was."""
        return self._measured(self._to_device)

    def _measured(self, move: Any) -> Moved:
        # No rank may take memory away from a collective that another is still in, nor go on before all are done.
        self._world.barrier()
        self._world.synchronise()
        began, before = time.perf_counter(), self._world.device_bytes()
        nbytes = _nbytes(self._tensors())
        move()
        self._world.synchronise()
        self._world.empty_cache()
        after, seconds = self._world.device_bytes(), time.perf_counter() - began
        self._world.barrier()
        return Moved(seconds, nbytes, before, after)

    def _to_host(self) -> None:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States
        from deepspeed.runtime.zero.offload_states import offload_optimizer_states

        if self._reference is not None:
            self._reference.to("cpu")
        if self._stage < 3:
            self._engine.offload_states(pin_memory=True)
            return
        self._engine.offload_states(
            include=[States.lp_params, States.lp_grads, States.contiguous_grad_buffer], pin_memory=True
        )
        optimizer = self._engine.optimizer
        for weights in optimizer.fp32_partitioned_groups_flat:
            host = get_accelerator().pin_empty_like(weights, device="cpu")
            weights.data = host.copy_(weights)
        offload_optimizer_states(optimizer.optimizer, "cpu", pin_memory=True)

    def _to_device(self) -> None:
        from deepspeed.runtime.zero.offload_states import reload_optimizer_states

        if self._stage == 3:
            optimizer = self._engine.optimizer
            for weights in optimizer.fp32_partitioned_groups_flat:
                weights.data = weights.data.to(self._world.device)
            reload_optimizer_states(optimizer.optimizer, self._world.device)
        self._engine.reload_states()
        if self._reference is not None:
            self._reference.to(self._world.device)

    def _tensors(self) -> Iterator[Tensor]:
        """Everything that an offload moves."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            yield from optimizer.fp32_partitioned_groups_flat
            yield optimizer.lp_param_buffer
            yield optimizer.grad_partitions_flat_buffer
        else:
            yield from optimizer.single_partition_of_fp32_groups
            yield from optimizer.bit16_groups_flat
        for state in optimizer.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
        if self._reference is not None:
            yield from self._reference.parameters()


def _nbytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the tensors, each storage once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
