"""Actors that answer at once, or never: for what the driver does around them."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.pipeline_turns import NoEngine, NoEnvironment, NoTrainer

__all__ = [
    "BrokenTrainer",
    "HangingEngine",
    "HangingOnceEngine",
    "NoEngine",
    "NoEnvironment",
    "NoTrainer",
    "RaisingEnvironment",
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
