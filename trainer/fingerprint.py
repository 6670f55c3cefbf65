"""What of the configuration a checkpoint depends on, as flat names and JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pearl.config.trainer import TrainerConfig
from pearl.weights.snapshot import config_hash

ESSENTIAL = ("model", "trainer.zero_stage", "trainer.dtype", "optimizer")
"""A checkpoint does not fit a trainer that differs in one of these. Others change what is learned from here on."""
FREE = frozenset({"ranks", "micro_batch_tokens", "share_prompts", "activation_checkpointing", "threads"})
"""How a step is computed, not what: these may differ."""

Fingerprint = dict[str, Any]


def fingerprint(config: TrainerConfig, model_directory: Path, temperature: float) -> Fingerprint:
    """`model` is the hash of its shape; the rest has the names of the configuration."""
    names = {"model": config_hash(model_directory), "optimizer": "AdamW", "temperature": temperature}
    return names | _flat("trainer", config.model_dump(mode="json", exclude=set(FREE)))


def _flat(prefix: str, values: dict[str, Any]) -> Fingerprint:
    result: Fingerprint = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        result |= _flat(key, value) if isinstance(value, dict) else {key: value}
    return result


def differences(saved: Fingerprint, now: Fingerprint) -> dict[str, tuple[Any, Any]]:
    """Name to (saved, now) where they differ; None stands for a name that one of them lacks."""
    names = [*saved, *(name for name in now if name not in saved)]
    return {name: (saved.get(name), now.get(name)) for name in names if saved.get(name) != now.get(name)}
