"""Checkpoints of one number of ranks for another, through DeepSpeed's universal checkpoint.

    directory/<tag>/universal/          converted once, whole or not there; goes with its checkpoint
    directory/.<tag>.converting/        left by a conversion that died; the next one removes it

The converter runs as a process of its own (`python -m trainer.universal <from> <to>`), which ends with its owner.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pearl.lifeline import end_with_owner

FOLDER = "universal"


class ConversionError(ValueError):
    """The checkpoint could not be converted. Nothing was loaded."""


def convert(checkpoint: Path, timeout_s: float) -> None:
    """Write `checkpoint/universal` unless it is there; one rank calls this.

    Raises ConversionError with the converter's last line, also if it takes longer than `timeout_s` seconds.
    """
    target = checkpoint / FOLDER
    if target.is_dir():
        return
    work = checkpoint.with_name(f".{checkpoint.name}.converting")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _run(checkpoint, work, timeout_s)
        (work / FOLDER).rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(checkpoint: Path, work: Path, timeout_s: float) -> None:
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.universal", str(checkpoint), str(work / FOLDER)],
            # The converter watches its stdin: it closes when this process ends, however that is.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            cwd=Path(__file__).parent.parent,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.communicate()
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = f"took longer than {timeout_s:g} s" if code is None else f"ended with {code}"
        raise ConversionError(f"converting {checkpoint} {reason}: {lines[-1] if lines else 'it said nothing'}")


@contextlib.contextmanager
def universal_loading(engine: Any) -> Iterator[None]:
    """Inside, the engine's `load_checkpoint` reads a universal checkpoint, whatever it was configured for."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _main() -> None:
    end_with_owner(sys.stdin.fileno())
    from deepspeed.checkpoint import ds_to_universal

    source, target = sys.argv[1:]
    # No pools: each of their workers would load a whole shard.
    sys.argv[1:] = ["--input_folder", source, "--output_folder", target, "--inject_missing_state"]
    sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    _main()
