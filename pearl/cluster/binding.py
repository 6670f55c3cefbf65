"""Which devices each slot gets. Bindings are fixed for a run: a slot is never moved to another GPU."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.cluster.identity import own_host
from pearl.config import RunConfig
from pearl.core.layout import SlotInfo, Zone
from pearl.errors import UserError


@dataclass(frozen=True, slots=True)
class Binding:
    """`zone`: training, environment, or a rollout slot's (see `pearl.core.layout.Zone`); `devices`: GPU indices on this
    host, none on a CPU."""

    slot: str
    zone: str
    devices: tuple[int, ...]
    threads: int
    trainer_ranks: tuple[int, ...] = ()
    """Of an overlap slot: the ranks on the same GPUs."""
    elsewhere: bool = False
    """Whoever starts the process chooses its devices (and mostly its host), and tells it of them."""
    host: str = ""
    """Of a trainer rank on another host: one of `trainer.hosts`."""

    @property
    def rollout(self) -> bool:
        return self.zone in tuple(Zone)

    def slot_info(self) -> SlotInfo:
        """Of a rollout slot of this machine."""
        host = own_host()
        gpus = tuple(f"{host}/{device}" for device in self.devices)
        return SlotInfo(self.slot, Zone(self.zone), gpus, host, self.trainer_ranks)

    def environment(self) -> dict[str, str]:
        """Environment variables of the slot's process."""
        variables = {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if self.elsewhere:
            return variables
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        if not self.devices:
            variables["DS_ACCELERATOR"] = "cpu"
        return variables


def bind(config: RunConfig, gpus: int) -> dict[str, Binding]:
    """Bindings by slot name: trainer ranks first, then rollout workers (reserved, preemptible, and those that overlap
    with the ranks), then environment workers (no GPU).

    `gpus` = 0 means a CPU run. Raises UserError if the GPUs do not suffice.
    """
    width, threads = config.engine.tensor_parallel, config.engine.threads
    ranks, rollouts, preemptible = (
        config.trainer.ranks_here,
        config.cluster.rollout_workers,
        config.elastic.preemptible_slots,
    )
    here = config.cluster.kind == "local"
    brought = 0 if here or config.cluster.kind == "existing" else preemptible
    """Slots that a provider brings; an existing cluster's have names of their own."""
    preemptible = preemptible if here else 0
    needed = ranks + (rollouts + preemptible) * width
    if gpus and needed > gpus:
        more = f" + elastic.preemptible_slots = {preemptible}," if preemptible else ""
        raise UserError(
            f"trainer.ranks = {ranks} and cluster.rollout_workers x engine.tensor_parallel = {rollouts} x {width}"
            f"{more} need {needed} GPUs, this machine has {gpus}",
            "Lower one of them.",
        )

    def take(first: int, count: int) -> tuple[int, ...]:
        return tuple(range(first, first + count)) if gpus else ()

    slots = [Binding(f"trainer-{r}", "training", take(r, 1), config.trainer.threads) for r in range(ranks)]
    for r in range(ranks, config.trainer.ranks):
        host = config.trainer.hosts[r // ranks - 1]
        slots.append(Binding(f"trainer-{r}", "training", (), config.trainer.threads, elsewhere=True, host=host))
    slots += [Binding(f"rollout-{i}", Zone.RESERVED, take(ranks + i * width, width), threads) for i in range(rollouts)]
    first = ranks + rollouts * width
    slots += [
        Binding(f"preemptible-{i}", Zone.PREEMPTIBLE, take(first + i * width, width), threads)
        for i in range(preemptible)
    ]
    slots += [Binding(f"preemptible-{i}", Zone.PREEMPTIBLE, (), threads, elsewhere=True) for i in range(brought)]
    shared = [tuple(range(i * width, (i + 1) * width)) for i in range(config.elastic.overlap_slots)]
    slots += [Binding(f"overlap-{i}", Zone.OVERLAP, take(own[0], width), threads, own) for i, own in enumerate(shared)]
    slots += [Binding(f"environment-{j}", "environment", (), 1) for j in range(config.environment.workers)]
    return {binding.slot: binding for binding in slots}
