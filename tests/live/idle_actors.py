"""Actors that answer at once, or never: for what the driver does around them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.pipeline_turns import NoEngine, NoEnvironment, NoTrainer
from pearl.weights.snapshot import read_tensors, write_snapshot

__all__ = [
    "BrokenTrainer",
    "DyingJoiner",
    "ElasticEngine",
    "ElasticTrainer",
    "FailingJoiner",
    "HangingEngine",
    "HangingOnceEngine",
    "Insomniac",
    "LastingEnvironment",
    "NoEngine",
    "NoEnvironment",
    "NoTrainer",
    "RaisingEnvironment",
    "ReadingEngine",
    "WritingTrainer",
]


class HangingEngine(NoEngine):
    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError


class HangingOnceEngine(NoEngine):
    """Hangs in its slot's first life. (Its name says which life it is: "rollout-0.1".)"""

    async def start(self, *arguments: Any) -> dict[str, Any]:
        self.first = arguments[4].endswith(".1")
        return {}

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.first:
            await asyncio.Event().wait()
        return await super().generate(request)


class BrokenTrainer(NoTrainer):
    async def train(self, *_: Any) -> dict[str, float]:
        raise RuntimeError("loss is not finite")


class RaisingEnvironment(NoEnvironment):
    """Every task of it is broken."""

    async def open(self, trajectory: list[int], *_: Any) -> dict[str, Any]:
        raise ValueError("this task has no files")


class LastingEnvironment(NoEnvironment):
    """Can be opened again where it was."""

    async def reopen(self, *_: Any) -> dict[str, Any]:
        return {"difference": ""}


class ElasticEngine(NoEngine):
    """Can sleep. Takes a moment for an answer, so that a run lasts while things happen to it."""

    ANSWER_S = 0.02

    async def start(self, *arguments: Any) -> dict[str, Any]:
        self.name = arguments[4]
        return {}

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.ANSWER_S)
        return await super().generate(request)

    async def release_memory(self, timeout_s: float) -> dict[str, Any]:
        return {"freed_bytes": 1}

    async def resume_memory(self, timeout_s: float) -> dict[str, Any]:
        return {}

    async def stop(self, grace_s: float = 0.0) -> None:
        pass


class FailingJoiner(ElasticEngine):
    """The second preemptible slot's first engine does not start, when the file `both` is in the run directory;
    nor does any other before that."""

    async def start(self, *arguments: Any) -> dict[str, Any]:
        name, both = arguments[4], Path(arguments[3]) / "both"
        while name.startswith("preemptible-") and not both.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.02)
        if name == "preemptible-1.1":
            raise RuntimeError("its memory is full")
        return await super().start(*arguments)


class DyingJoiner(ElasticEngine):
    """A preemptible slot's first engine dies during a request, its second one is dead when one comes: the actor answers
    the former and raises at the latter."""

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.name == "preemptible-0.2":
            raise RuntimeError("the engine died before")
        if self.name == "preemptible-0.1":
            return {
                "token_ids": [], "logprobs": [], "versions": [], "finish": "lost", "reason": "the engine died",
            }  # fmt: skip
        return await super().generate(request)


class Insomniac(ElasticEngine):
    """An overlap engine that hangs when it is to sleep for the second time, in its first life."""

    releases = 0

    async def release_memory(self, timeout_s: float) -> dict[str, Any]:
        self.releases += 1
        if self.name.endswith(".1") and self.releases == 2:
            await asyncio.Event().wait()
        return await super().release_memory(timeout_s)


class ElasticTrainer(NoTrainer):
    """Moves its states, and refuses to work while they are away."""

    away = False

    async def offload(self) -> dict[str, Any]:
        self.away = True
        return {"seconds": 0.0, "state_bytes": 0, "device_bytes_freed": 0, "device_bytes_left": 0}

    async def reload(self) -> dict[str, Any]:
        self.away = False
        return {"seconds": 0.0, "state_bytes": 0, "device_bytes_taken": 0}

    async def train(self, *_: Any) -> dict[str, float]:
        if self.away:
            raise RuntimeError("its states are away")
        return {}


class WritingTrainer(ElasticTrainer):
    """Its snapshots are there."""

    async def export(self, root: str, version: int) -> dict[str, Any]:
        import torch

        manifest = write_snapshot(Path(root), version, "shape", [("t", torch.full((100_000,), float(version)))])
        return {"checksum": manifest.checksum}


class ReadingEngine(ElasticEngine):
    """Reads its snapshot, which must be of that version and undamaged, and notes from where."""

    async def sync(self, directory: str, version: int, timeout_s: float) -> dict[str, Any]:
        ((_, tensor),) = read_tensors(Path(directory))
        if tensor[0] != version:
            raise RuntimeError(f"{directory} is not version {version}")
        reply = await super().sync(directory, version, timeout_s)
        return {**reply, "checksum": directory}
