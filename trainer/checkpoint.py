"""Checkpoints that are there whole or not at all: DeepSpeed writes into an unfinished directory, one rename ends it.

    directory/<tag>/                    DeepSpeed's files of all ranks
    directory/latest                    the newest complete tag
    directory/zero_to_*.py              DeepSpeed's converters, which it copies there unasked
    directory/.<tag>.unfinished/        left by a save that died; the next save of that tag removes it

All ranks need the same directory (a shared file system if they are on several hosts).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from trainer.world import World

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LATEST = "latest"
STATE_KEY = "pearl"


def save_checkpoint(engine: Any, world: World, directory: Path, tag: str, state: dict[str, Any]) -> Path:
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
    if world.rank == 0:
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


def load_checkpoint(engine: Any, directory: Path, tag: str) -> dict[str, Any]:
    """Restore weights, optimizer and the saved state; collective. Needs as many ranks as the save had, and its stage.

    Raises ValueError if `directory/tag` was not written by `save_checkpoint`; look with `is_complete` first.
    """
    path, client_state = engine.load_checkpoint(str(directory), tag=tag)
    if path is None or STATE_KEY not in client_state:
        raise ValueError(f"{Path(directory) / tag} is no checkpoint of this trainer")
    return client_state[STATE_KEY]
