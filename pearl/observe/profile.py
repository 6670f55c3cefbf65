"""`profile.yaml`: what the Runtime Tracker learnt in a run, for `pearl plan` and later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.profile import RuntimeTracker
from pearl.core.trajectory import Trajectory
from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile
from pearl.profiles import write_profile

GUESSED_FLOPS = 1e11
GUESSED_BYTES_PER_S = 1e10
"""Of a machine of which nothing is known yet: one core. Measured within the first turns."""


class ProfileObserver:
    """Observer that writes what a tracker knows when it is closed, and feeds one of its own where nobody else does."""

    def __init__(self, path: Path, prior: Profile, fed: RuntimeTracker | None = None) -> None:
        """`fed`: the scheduler's tracker, which has its own prior."""
        self.path = path
        self.tracker = fed or RuntimeTracker(prior)
        self._feeds = fed is None

    def saw(self, now: float, entry: Event | Instruction) -> None:
        if self._feeds:
            self.tracker.observe(entry, now)

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        pass

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def close(self) -> None:
        write_profile(self.path, self.tracker.profile())


def live_prior(config: RunConfig, model_directory: Path) -> Profile:
    """Before the first turn: sizes from the configuration, costs of a slow machine, turns of half their limits."""
    shape = json.loads((model_directory / "config.json").read_text())
    width = 2 if config.model.dtype == "bfloat16" else 4
    kv_heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    parameters = _parameters(shape)
    engine = EngineProfile(
        prefill_fixed_s=0.01,
        prefill_s_per_token=2 * parameters / GUESSED_FLOPS,
        prefill_s_per_token2=4 * shape["num_hidden_layers"] * shape["hidden_size"] / GUESSED_FLOPS,
        decode_fixed_s=parameters * width / GUESSED_BYTES_PER_S,
        decode_s_per_sequence=2 * parameters / GUESSED_FLOPS,
        decode_s_per_kv_token=2 * shape["num_hidden_layers"] * kv_heads * head * width / GUESSED_BYTES_PER_S,
        kv_bytes_per_token=2 * shape["num_hidden_layers"] * kv_heads * head * width,
        kv_capacity_tokens=config.engine.max_total_tokens,
        transfer_bytes_per_s=1e9,
        max_running_requests=config.engine.max_running_requests,
    )
    pipeline = config.pipeline
    turn = TurnShape(1.0, pipeline.max_trajectory_tokens / 4, pipeline.max_response_tokens / 2, 1.0, 0.0)
    work = WorkloadProfile(
        (turn,), 1.0, turn.new_tokens, turn.response_tokens, 1.0, group_size=float(pipeline.group_size)
    )
    return Profile(engine, work)


def _parameters(shape: dict[str, Any]) -> float:
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    block = 4 * hidden * hidden + 3 * hidden * shape["intermediate_size"]
    return layers * block + shape["vocab_size"] * hidden
