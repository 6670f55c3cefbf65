"""Trajectories for tests: random tokens of the tiny model's vocabulary, two turns, log-probs near a random model's."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.models import resolve_model
from trainer.zero import ZeroTrainer

MODEL = "tiny-random-llama"


def tokens(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 40_000) for _ in range(rng.randint(low, high)))


def turns(rng: random.Random, response: tuple[int, int], version: int) -> list[Segment]:
    result = []
    for _ in range(2):
        generated = tokens(rng, *response)
        logprobs = tuple(-10.8 + rng.uniform(-1.0, 1.0) for _ in generated)
        result.append(Segment(SegmentKind.RESPONSE, generated, logprobs, version))
        result.append(Segment(SegmentKind.OBSERVATION, tokens(rng, 1, 6)))
    return result


def make_group(
    group: int,
    rewards: Sequence[float],
    *,
    prompt: tuple[int, int] = (4, 30),
    response: tuple[int, int] = (2, 12),
    version: int = 0,
) -> list[Trajectory]:
    """All of one prompt, as a group is."""
    rng = random.Random(group)
    question = Segment(SegmentKind.PROMPT, tokens(rng, *prompt))
    return [
        Trajectory(
            id=TrajectoryId(group, index, 0),
            task=f"task-{group}",
            segments=(question, *turns(rng, response, version)),
            turns=2,
            stop=StopReason.SUBMITTED,
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]


def make_groups(step: int) -> list[list[Trajectory]]:
    """Three groups of four, one of them without variance."""
    rewards = ((0.0, 1.0, 0.25, 1.0), (1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0, 1.0))
    return [make_group(10 * step + index, reward) for index, reward in enumerate(rewards)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def config(**values: Any) -> TrainerConfig:
    base = {"zero_stage": 0, "dtype": "float32", "learning_rate": 1e-3, "micro_batch_tokens": 256}
    return TrainerConfig.model_validate(base | values)


def start(trainer_config: TrainerConfig, *, seed: int = 0, temperature: float = 1.0) -> ZeroTrainer:
    """One rank in this process, exporting float32."""
    return ZeroTrainer(
        config=trainer_config,
        model_directory=Path(resolve_model(MODEL)),
        snapshot_dtype="float32",
        rank=0,
        world_size=1,
        master_address="127.0.0.1",
        master_port=free_port(),
        seed=seed,
        total_steps=10,
        temperature=temperature,
        timeout_s=600.0,
    )
