"""The weights that a finished run kept in its directory, and the model that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.errors import UserError
from pearl.models import resolve_model
from pearl.weights.snapshot import SnapshotError, config_hash, read_manifest, snapshot_directory

CONFIG, WEIGHTS = "config.yaml", "weights"


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """One snapshot of a run; `model_directory` has the configuration and the tokenizer that go with it."""

    run: Path
    config: RunConfig
    model_directory: Path
    snapshot: Path
    version: int


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def kept_versions(run: Path) -> list[int]:
    """Weight versions that the run kept, ascending."""
    names = (path.name.removeprefix("v") for path in (run / WEIGHTS).glob("v*"))
    return sorted(int(name) for name in names if name.isdigit())


def kept_weights(run: Path, version: int | None = None) -> KeptWeights:
    """The run's weights of `version`, by default the newest. Raises UserError if there are none or they do not fit."""
    run = run.expanduser().resolve()
    if not is_run(run):
        raise UserError(f"{run} is no run directory: it has no {CONFIG}", "Give a directory that `pearl train` made.")
    config = load_config(run / CONFIG)
    versions = kept_versions(run)
    if not versions:
        raise UserError(
            f"{run} kept no weights ({WEIGHTS}/v<version> is missing)",
            "A run keeps them at its last step, and at each checkpoint, if checkpoint.keep_weights is true.",
        )
    chosen = versions[-1] if version is None else version
    if chosen not in versions:
        kept = ", ".join(map(str, versions))
        raise UserError(f"{run} did not keep version {chosen}", f"It has: {kept}.")
    snapshot = snapshot_directory(run / WEIGHTS, chosen)
    model_directory = resolve_model(config.model.path)
    try:
        manifest = read_manifest(snapshot)
    except SnapshotError as error:
        raise UserError(f"the weights in {snapshot} cannot be read ({error})", "Choose another version.") from error
    if manifest.config_hash != config_hash(model_directory):
        raise UserError(
            f"model.path = {config.model.path!r} has other shapes now than the weights in {snapshot}",
            f"Put the model of the run back, or name it in {run / CONFIG}.",
        )
    return KeptWeights(run, config, model_directory, snapshot, chosen)
