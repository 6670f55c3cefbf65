"""Helpers of the engine tests: start a worker, publish snapshots, wait for a condition."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rollout import RolloutWorker
from actors.sglang import transfer
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.weights.snapshot import Manifest, config_hash, snapshot_directory, write_snapshot

MODEL = ModelConfig(path="tiny-random-llama", dtype="float32")
ENGINE = EngineConfig(device="cpu", max_total_tokens=65536, stream_interval=4)
KV_INTERFACE = None if transfer.missing() else "lo"
"""Over which the tests' engines hand KV on, so that they can take every role; without, they are colocated for good."""
START_S = 300.0
TIE = 1e-4
"""Log-probs this close are equal but for rounding; of two random best tokens, one pair in 10,000 is."""


async def start(worker: RolloutWorker, model_directory: Path, run_dir: Path, **more: Any) -> dict[str, Any]:
    engine = EngineConfig.model_validate(ENGINE.model_dump() | more.pop("engine", {}))
    arguments = {"timeout_s": START_S, "kv_interface": KV_INTERFACE} | more
    dumps = engine.model_dump(), MODEL.model_dump()
    return await worker.start(*dumps, str(model_directory), str(run_dir), "e0", 0, **arguments)


def request(rid: str, prompt: Iterable[int] = (1, 2, 3), tokens: int = 32, **more: Any) -> dict[str, Any]:
    """A greedy request unless `temperature` is given."""
    return {"rid": rid, "token_ids": list(prompt), "max_new_tokens": tokens, "temperature": 0.0} | more


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once `condition()` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true within {timeout_s} s"
        await asyncio.sleep(0.01)


def paired(prefill: RolloutWorker, rid: str, prompt: Iterable[int], tokens: int = 32, **more: Any) -> dict[str, Any]:
    """A request that `prefill` and another engine serve together, in a room of its own."""
    assert prefill._kv is not None
    room = uuid.uuid4().int >> 66
    return request(rid, prompt, tokens, pair={"room": room, **prefill._kv.to_wire()}) | more


async def serve(
    prefill: RolloutWorker, decode: RolloutWorker, rid: str, prompt: Iterable[int], tokens: int = 32, **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both halves of a pair say of one request."""
    both = paired(prefill, rid, prompt, tokens, **more)
    halves = await asyncio.gather(prefill.prefill(both), decode.generate(both))
    return halves[0], halves[1]


def check_same_answer(tokens: list[int], logprobs: list[float], whole: dict[str, Any]) -> None:
    """Greedy tokens equal those of `whole`, up to a place where the best two are as good as each other.

    A prefix computed at once and one computed token by token differ by some 3e-5 in the logits; about one token in
    100,000 has its best two closer than that, and from there on the answers are different ones.
    """
    pairs = zip(tokens, whole["token_ids"], strict=True)
    parting = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if parting is not None:
        assert logprobs[parting] == pytest.approx(whole["logprobs"][parting], abs=TIE), f"token {parting}"


def progress(worker: RolloutWorker) -> dict[str, int]:
    """Tokens that arrived, by pending request."""
    assert worker._client is not None
    return worker._client.progress()


@dataclass(frozen=True)
class Snapshot:
    version: int
    directory: Path
    manifest: Manifest


class Snapshots:
    """Random weights, wide enough that greedy answers differ from token to token and from version to version."""

    def __init__(self, model_directory: Path, root: Path) -> None:
        from safetensors.torch import load_file

        self.root = root
        self.config_hash = config_hash(model_directory)
        self.shapes = {name: t.shape for name, t in load_file(model_directory / "model.safetensors").items()}
        self.newest = 0

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.2
            for name, shape in self.shapes.items()
        }

    def publish(
        self, weights: dict[str, torch.Tensor] | None = None, *, version: int | None = None, config: str | None = None
    ) -> Snapshot:
        """Write a snapshot: by default the next version, with weights of its own."""
        self.newest = max(self.newest + 1, version or 0)
        number = version or self.newest
        tensors = self.weights(number) if weights is None else weights
        manifest = write_snapshot(self.root, number, config or self.config_hash, tensors.items())
        return Snapshot(number, snapshot_directory(self.root, number), manifest)
