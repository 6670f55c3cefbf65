"""Which keys may change between a run and its resume: those that move no sample, no weight and no random number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pearl.errors import UserError

HARMLESS = (
    "name", "run_root", "run_dir", "cluster.", "deadlines.", "checkpoint.", "elastic.",
    "engine.device", "engine.threads",
    "engine.log_level", "engine.stream_interval", "engine.max_running_requests", "engine.max_total_tokens",
    "engine.mem_fraction_static", "engine.attention_backend", "engine.disable_radix_cache", "engine.extra_args",
    "trainer.threads", "trainer.ranks", "environment.workers", "environment.sandboxes_per_worker",
    "environment.sandbox.directory", "pipeline.max_concurrent_trajectories", "pipeline.worker_restarts",
    "pipeline.sample_attempts", "pipeline.quarantine_after", "pipeline.on_weight_update",
)  # fmt: skip
"""Keys, and sections with a dot behind. `pipeline.steps` too, where the learning rate does not depend on it.

Another number of ranks rounds sums differently, no more.
"""


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys whose values differ."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            yield prefix + key


def refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise UserError if a run of `before` cannot be resumed as `after`."""
    harmless = list(HARMLESS)
    if after["trainer"]["schedule"]["kind"] == "constant":
        harmless.append("pipeline.steps")
    refused = [
        key
        for key in changed_keys(before, after)
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in harmless)
    ]
    if refused:
        raise UserError(
            f"--resume: the configuration differs from the run's in {', '.join(refused)}",
            "Set these back to what the run's config.yaml says, or start another run.",
        )
