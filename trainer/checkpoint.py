"""Checkpoints that are there whole or not at all: DeepSpeed writes into an unfinished directory, one rename ends it.

    directory/<tag>/                    DeepSpeed's files of all ranks
    directory/<tag>/pearl.json          number of ranks, fingerprint of the configuration
    directory/<tag>/random.<rank>       states of the random number generators
    directory/<tag>/universal/          the same for another number of ranks, made when one asks (`trainer.universal`)
    directory/latest                    the newest complete tag
    directory/zero_to_*.py              DeepSpeed's converters, which it copies there unasked
    directory/.<tag>.unfinished/        left by a save that died; the next save of that tag removes it

All ranks need the same directory (a shared file system if they are on several hosts).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import randomness, universal
from trainer.fingerprint import ESSENTIAL, Fingerprint, differences
from trainer.world import World

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LATEST = "latest"
DESCRIPTION = "pearl.json"
STATE_KEY = "pearl"


class CheckpointError(ValueError):
    """This checkpoint cannot be loaded here. Nothing was loaded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    state: dict[str, Any]
    """What the save was given."""
    changes: dict[str, tuple[Any, Any]]
    """Settings that were others when it was saved: name to (then, now)."""


def save_checkpoint(
    engine: Any, world: World, directory: Path, tag: str, settings: Fingerprint, state: dict[str, Any]
) -> Path:
    """Write `directory/tag`; collective. Returns its path once it is complete and `latest` names it.

    Raises ValueError for a tag that is no plain name and FileExistsError if the tag is there already.
    """
    if not TAG.fullmatch(tag) or tag == LATEST:
        raise ValueError(f"checkpoint tag {tag!r} is not made of letters, digits, '.', '_' and '-'")
    target = Path(directory) / tag
    if target.exists():
        raise FileExistsError(f"checkpoint {target} exists already")
    unfinished = target.with_name(f".{tag}.unfinished")
    # Nobody may write before all have looked, and before the leftovers are gone.
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    world.barrier()
    engine.save_checkpoint(str(directory), tag=unfinished.name, client_state={STATE_KEY: state}, save_latest=False)
    (unfinished / f"random.{world.rank}").write_bytes(randomness.capture())
    world.barrier()
    if world.rank == 0:
        description = {"ranks": world.size, "settings": settings}
        (unfinished / DESCRIPTION).write_text(json.dumps(description, indent=1))
        unfinished.rename(target)
        new = target.with_name(f".{LATEST}.new")
        new.write_text(tag)
        new.replace(target.with_name(LATEST))
    world.barrier()
    return target


def latest_tag(directory: Path) -> str | None:
    """Newest complete checkpoint in `directory`, None if there is none."""
    try:
        tag = (Path(directory) / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    return tag if is_complete(directory, tag) else None


def is_complete(directory: Path, tag: str) -> bool:
    return TAG.fullmatch(tag) is not None and (Path(directory) / tag).is_dir()


def load_checkpoint(
    engine: Any, world: World, directory: Path, tag: str, settings: Fingerprint, timeout_s: float
) -> Loaded:
    """Restore weights, optimizer, random number generators and the saved state; collective.

    A checkpoint of another number of ranks is converted first, by rank 0 and at most once, within `timeout_s` seconds.
    A rank that the save did not have keeps its random number generators as they are.

    Raises CheckpointError, and has loaded nothing, if `directory/tag` was not written by `save_checkpoint`, is of
    another model, dtype or ZeRO stage, or cannot be converted; look with `is_complete` first.
    """
    target = Path(directory) / tag
    try:
        description = json.loads((target / DESCRIPTION).read_text())
        ranks, changes = description["ranks"], differences(description["settings"], settings)
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise CheckpointError(f"{target} is no checkpoint of this trainer") from error
    for name in ESSENTIAL:
        if name in changes:
            then, now = changes[name]
            raise CheckpointError(f"{target} was saved with {name} = {then}, and this trainer has {now}; use {then}")
    loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ranks != world.size and engine.zero_optimization():
        _convert(world, target, timeout_s)
        tag, loading = f"{tag}/{universal.FOLDER}", universal.universal_loading(engine)
    with loading:
        path, client_state = engine.load_checkpoint(str(directory), tag=tag)
    if path is None or STATE_KEY not in client_state:
        raise RuntimeError(f"DeepSpeed found no state of this trainer in {target}")
    if world.rank < ranks:
        randomness.restore((target / f"random.{world.rank}").read_bytes())
    return Loaded(client_state[STATE_KEY], changes)


def _convert(world: World, checkpoint: Path, timeout_s: float) -> None:
    """On rank 0; all ranks raise if it fails."""
    failed: Exception | None = None
    if world.rank == 0:
        try:
            universal.convert(checkpoint, timeout_s)
        except (universal.ConversionError, OSError) as error:
            failed = error
    if world.total([float(failed is not None)])[0]:
        raise CheckpointError(f"{failed or f'rank 0 could not convert {checkpoint}'}") from failed
