"""The trainer's ranks as actors: trains, publishes, moves off its GPUs and back. A call goes to all ranks at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorError, ActorLost, ActorTimeout
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.trajectory import Trajectory
from pearl.errors import RunFailed
from pearl.live.actors import Actors
from pearl.live.measured import MemoryMoved
from pearl.live.run_directory import RunDirectory
from pearl.live.waits import in_own_thread
from pearl.weights.snapshot import remove_snapshot, snapshot_directory
from trainer.wire import pack_groups

FREED = 0.9
"""Of the bytes of a rank's states that must be free on its GPU before that is lent."""
RENDEZVOUS_S = 30.0
"""Rank 0 only looks for a free port."""


class TrainerGroup:
    """All ranks. Every method answers with events, never with an exception."""

    def __init__(
        self, actors: Actors, config: RunConfig, model_directory: Path, directory: RunDirectory,
        post: Callable[[Event], None],
    ) -> None:  # fmt: skip
        self.actors, self.config, self.directory, self.post = actors, config, directory, post
        self.model_directory = model_directory
        self.refs: list[ActorRef] = []
        self.checksums: dict[int, str] = {}
        """Checksum over all tensors of each published version."""
        self.on_step: Callable[[dict[str, float]], None] = lambda metrics: None
        self.incarnation = 0
        self._told: set[int] = set()
        self._turn = asyncio.Lock()
        self._oldest = 0
        self._away: set[str] = set()
        """Overlap slots that are lent."""
        self._back: tuple[str, ...] = ()
        """Overlap slots that came back while others are lent."""

    @property
    def slots(self) -> list[str]:
        return [f"trainer-{rank}" for rank in range(self.config.trainer.ranks)]

    async def start(self, step: int = 0, version: int = 0) -> None:
        """Bring all ranks up at the checkpoint of `step` (0: the initial model) and publish that as `version`.

        Answers TrainerReady, TrainerLost or TrainerFailed. Ranks of an earlier life are ended first.
        """
        deadlines = self.config.deadlines
        limit = deadlines.trainer_start_s
        # Ranks wait for each other inside a call no longer than the longest call may take.
        collective_s = max(limit, deadlines.train_s, deadlines.publish_s, deadlines.checkpoint_s)
        self.incarnation += 1
        life = self.incarnation
        self.refs, self._away, self._back = [], set(), ()
        try:
            for slot in self.slots:  # a rank that waits for a dead one would hold the turn
                await self.actors.kill(slot, life - 1)
            self._forget_after(step)
            async with self._turn:
                starts = (self.actors.start(slot, life, self.actors.classes.trainer) for slot in self.slots)
                self.refs = list(await asyncio.gather(*starts))
                address, port = await self.actors.call(self.refs[0], "rendezvous", timeout_s=RENDEZVOUS_S)
                config, size = self.config, len(self.refs)
                await self._all(
                    "start",
                    lambda rank: (
                        config.trainer.model_dump(mode="json"), str(self.model_directory), config.model.dtype, rank,
                        size, address, port, config.seed, config.pipeline.steps, config.engine.sampling.temperature,
                        collective_s,
                    ),
                    limit,
                )  # fmt: skip
                if step:
                    root = str(self.directory.checkpoints)
                    await self._all("load", lambda rank: (root, f"step-{step}"), deadlines.checkpoint_s)
                await self._export(version)
            self._say(ev.TrainerReady(version, step), life)
        except (ActorError, RunFailed) as error:
            await self._failed("start", error, life)

    async def train(self, i: ev.TrainBatch, groups: list[list[Trajectory]]) -> None:
        wire, life = pack_groups(groups), self.incarnation
        try:
            async with self._turn:
                replies = await self._all("train", lambda rank: (i.step, wire), self.config.deadlines.train_s)
            if self._goes_on(life):
                self.on_step({**replies[0], "step": i.step})
            self._say(ev.BatchTrained(i.step), life)
        except (ActorError, RunFailed) as error:
            await self._failed(f"step {i.step}", error, life)

    async def publish(self, i: ev.PublishSnapshot, step: int) -> None:
        """Export, tell, then write a checkpoint if one is due (behind the export: engines come first)."""
        life = self.incarnation
        try:
            async with self._turn:
                await self._export(i.version)
                self._say(ev.SnapshotPublished(i.version), life)
                due = self._checkpoint_due(step)
                if due:
                    await self._checkpoint(step, i.version, life)
                if self.config.checkpoint.keep_weights and (due or step == self.config.pipeline.steps):
                    await self.actors.waits.until(
                        "trainer",
                        f"the copy of the weights of version {i.version} (deadlines.checkpoint_s)",
                        self.config.deadlines.checkpoint_s,
                        in_own_thread(self._keep_weights, i.version),
                    )
        except (ActorError, RunFailed, OSError) as error:
            await self._failed(f"publishing version {i.version}", error, life)

    async def offload(self, i: ev.OffloadTrainer) -> None:
        """Free the GPUs of these slots. The ranks move together (their barriers need all of them), so those of other
        slots are away as long."""
        life = self.incarnation
        try:
            async with self._turn:
                replies = await self._all("offload", lambda rank: (), self.config.deadlines.offload_s)
                for slot, reply in zip(self.slots, replies, strict=True):
                    self.post(MemoryMoved("offload", slot, reply))
                    _check_freed(slot, reply, self.actors.bindings[slot].devices)
            self._away = set(i.slots)
            self._say(ev.TrainerOffloaded(i.slots), life)
        except (ActorError, RunFailed) as error:
            await self._failed("offload", error, life)

    async def reload(self, i: ev.ReloadTrainer) -> None:
        """Bring the states back once the last of the slots is free again; until then the answer waits."""
        life = self.incarnation
        self._away -= set(i.slots)
        self._back += i.slots
        if self._away:
            return
        slots, self._back = self._back, ()
        try:
            async with self._turn:
                replies = await self._all("reload", lambda rank: (), self.config.deadlines.offload_s)
                for slot, reply in zip(self.slots, replies, strict=True):
                    self.post(MemoryMoved("reload", slot, reply))
            self._say(ev.TrainerReloaded(slots), life)
        except (ActorError, RunFailed) as error:
            await self._failed("reload", error, life)

    def retire(self, version: int) -> None:
        for old in range(self._oldest, version + 1):
            remove_snapshot(self.directory.snapshots, old)
        self._oldest = max(self._oldest, version + 1)

    def left(self, slot: str, incarnation: int, reason: str) -> None:
        """A rank's process left the cluster."""
        self._lost(f"{slot} is gone: {reason}", incarnation)

    async def idle(self, timeout_s: float) -> None:
        """Wait until nothing is being trained or written; TimeoutError after `timeout_s`."""
        await self.actors.waits.until("driver", "the trainer's last work", timeout_s, self._turn.acquire())
        self._turn.release()

    async def stop(self, timeout_s: float) -> None:
        async def one(ref: ActorRef) -> None:
            try:
                await self.actors.call(ref, "stop", timeout_s=timeout_s, margin=False)
            except ActorError:
                pass  # the process group is killed next

        await asyncio.gather(*(one(ref) for ref in self.refs))

    async def _all(self, method: str, args: Callable[[int], tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """`method` on every rank. After all have answered, a failure is raised: a lost rank's before those of its
        peers, whose collectives broke for that."""
        calls = [
            self.actors.call(ref, method, *args(rank), timeout_s=timeout_s, waiter="trainer")
            for rank, ref in enumerate(self.refs)
        ]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        if failures:
            raise next((f for f in failures if isinstance(f, ActorLost | ActorTimeout)), failures[0])
        return replies

    async def _export(self, version: int) -> None:
        root = str(self.directory.snapshots)
        replies = await self._all("export", lambda rank: (root, version), self.config.deadlines.publish_s)
        self.checksums[version] = replies[0]["checksum"]

    def _checkpoint_due(self, step: int) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and (step % every == 0 or step == self.config.pipeline.steps)

    async def _checkpoint(self, step: int, version: int, life: int) -> None:
        root = str(self.directory.checkpoints)
        state = {"step": step, "version": version}
        await self._all("save", lambda rank: (root, f"step-{step}", state), self.config.deadlines.checkpoint_s)
        self._say(ev.CheckpointWritten(step), life)
        _keep_newest(list(self.directory.checkpoints.glob("step-*")), "step-", self.config.checkpoint.keep)

    def _forget_after(self, step: int) -> None:
        """Remove checkpoints that were written and never told of: their steps are trained again."""
        for folder in self.directory.checkpoints.glob("step-*"):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)

    def _keep_weights(self, version: int) -> None:
        """Copy a snapshot out of memory, whole or not at all."""
        source = snapshot_directory(self.directory.snapshots, version)
        target = snapshot_directory(self.directory.weights, version)
        unfinished = target.with_name(f".{target.name}.unfinished")
        shutil.copytree(source, unfinished)
        unfinished.rename(target)
        _keep_newest(list(self.directory.weights.glob("v*")), "v", self.config.checkpoint.keep)

    async def _failed(self, stage: str, error: Exception, life: int) -> None:
        """A lost or silent rank can be replaced; what a rank raised would be raised again."""
        text = f"the trainer failed at {stage}: {error}"
        if isinstance(error, ActorLost | ActorTimeout):
            causes = await asyncio.gather(*(self.actors.cause_of_death(slot, life) for slot in self.slots))
            dead = [f"{slot} is gone: {cause}" for slot, cause in zip(self.slots, causes, strict=True) if cause]
            self._lost(dead[0] if dead else text, life)
        else:
            self._say(ev.TrainerFailed(text), life)

    def _lost(self, text: str, life: int) -> None:
        """The first cause in a life is the cause; what follows from it is not told again."""
        if self._goes_on(life):
            self._told.add(life)
            self.post(ev.TrainerLost(text))

    def _goes_on(self, life: int) -> bool:
        return life == self.incarnation and life not in self._told

    def _say(self, event: Event, life: int) -> None:
        """Unless the life's loss is told: a rank may die when all have answered, and nothing comes behind that word."""
        if self._goes_on(life):
            self.post(event)


def _check_freed(slot: str, reply: dict[str, Any], devices: tuple[int, ...]) -> None:
    """On a GPU, by what torch gave back; on a CPU nothing moves, so there is nothing to check."""
    if devices and reply["device_bytes_freed"] < FREED * reply["state_bytes"]:
        raise RunFailed(
            f"{slot} freed {reply['device_bytes_freed']:,} bytes of its GPU, its states are {reply['state_bytes']:,}; "
            "its GPU cannot be lent (set elastic.overlap_slots to 0)"
        )


def _keep_newest(folders: list[Path], prefix: str, count: int) -> None:
    for old in sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)))[:-count]:
        shutil.rmtree(old, ignore_errors=True)
