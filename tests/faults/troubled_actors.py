"""Actors that do what brought other systems down. They import next to nothing, so that a process is up at once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from tests.live.hanging_actors import TOKENS, Willing
from trainer.wire import unpack_groups

PUBLISHED = "published"
"""A file in the run directory: the test has seen new weights."""
PART = 2
"""Tokens that an interrupted request has."""


class Dies(Willing):
    """The collector's process ends as soon as it is to collect."""

    async def generate(self, request: dict[str, Any]) -> Any:
        os._exit(3)


class StandsStillInItsFirstLife(Willing):
    """Alive to Dask and to every other call; it only makes no progress."""

    async def start(self, *arguments: Any) -> Any:
        self.version = 0
        self.first = str(arguments[4]).endswith("rollout-0.1")
        return {}

    async def generate(self, request: dict[str, Any]) -> Any:
        if self.first:
            await asyncio.Event().wait()
        return await super().generate(request)


class LastsUntilNewWeights(Willing):
    """Requests of the first weights last until others are published (as the test tells) or until an abort."""

    async def start(self, *arguments: Any) -> Any:
        self.version = 0
        self.published = Path(str(arguments[3])) / PUBLISHED
        self.aborted = asyncio.Event()
        return {}

    async def abort(self, timeout_s: float) -> Any:
        self.aborted.set()
        return {}

    async def generate(self, request: dict[str, Any]) -> Any:
        begun = self.version
        if begun == 0 and not request["rid"].startswith("g0"):
            while not (self.published.exists() or self.aborted.is_set()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reply = await super().generate(request)
        reply["versions"] = [[begun, len(TOKENS)]]
        if self.aborted.is_set() and begun == 0:
            reply |= {"token_ids": TOKENS[:PART], "logprobs": [-1.0] * PART, "versions": [[0, PART]], "finish": "abort"}
        return reply


class RefusesWeights(Willing):
    async def sync(self, directory: str, version: int, timeout_s: float) -> Any:
        raise RuntimeError("/update_weights_from_tensor: status 500, out of memory")


class NeverTrains(Willing):
    async def train(self, *_: Any) -> Any:
        await asyncio.Event().wait()


class Checkpoints(Willing):
    """A checkpoint is a folder."""

    async def save(self, directory: str, tag: str, state: dict[str, Any]) -> Any:
        (Path(directory) / tag).mkdir(parents=True)
        return {}


class BreaksOneMember(Willing):
    """The task itself fails for member 2 of the first group; the trainer says what reached it."""

    async def open(self, trajectory: list[int], *_: Any) -> Any:
        if trajectory[:2] == [0, 2]:
            raise ValueError("this member is broken")
        return await super().open()

    async def train(self, step: int, wire: bytes) -> Any:
        batch = [trajectory for group in unpack_groups(wire) for trajectory in group]
        return {"trajectories": float(len(batch)), "shortest": float(min(t.generated_tokens for t in batch))}
