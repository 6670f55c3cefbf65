"""Which devices each slot gets. Bindings are fixed for a run: a slot is never moved to another GPU."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.config import RunConfig
from pearl.errors import UserError


@dataclass(frozen=True, slots=True)
class Binding:
    """`zone`: training, reserved or preemptible (rollout), or environment; `devices`: GPU indices on this host, none
    on a CPU."""

    slot: str
    zone: str
    devices: tuple[int, ...]
    threads: int

    def environment(self) -> dict[str, str]:
        """Environment variables of the slot's process."""
        variables = {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
        }
        if not self.devices:
            variables["DS_ACCELERATOR"] = "cpu"
        return variables


def bind(config: RunConfig, gpus: int) -> dict[str, Binding]:
    """Bindings by slot name: trainer ranks first, then rollout workers, then environment workers (no GPU).

    `gpus` = 0 means a CPU run. Raises UserError if the GPUs do not suffice.
    """
    width = config.engine.tensor_parallel
    ranks, rollouts = config.trainer.ranks, config.cluster.rollout_workers
    needed = ranks + rollouts * width
    if gpus and needed > gpus:
        raise UserError(
            f"trainer.ranks = {ranks} and cluster.rollout_workers x engine.tensor_parallel = {rollouts} x {width} need "
            f"{needed} GPUs, this machine has {gpus}",
            "Lower one of them.",
        )

    def take(first: int, count: int) -> tuple[int, ...]:
        return tuple(range(first, first + count)) if gpus else ()

    slots = [Binding(f"trainer-{r}", "training", take(r, 1), config.trainer.threads) for r in range(ranks)]
    slots += [
        Binding(f"rollout-{i}", "reserved", take(ranks + i * width, width), config.engine.threads)
        for i in range(rollouts)
    ]
    slots += [Binding(f"environment-{j}", "environment", (), 1) for j in range(config.environment.workers)]
    return {binding.slot: binding for binding in slots}
