"""Where rows of tasks come from: JSON lines, JSON, Parquet, directories, Hugging Face data sets. Not what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pearl.errors import UserError

HUGGING_FACE = "hf:"
BESIDE = (("problem_statement", "problem.md"), ("patch", "gold.patch"), ("test_patch", "test.patch"))
"""Fields of a task in a directory that may stand in files of their own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One task as it was found; `fault` says why nothing was, and is empty otherwise."""

    where: str
    value: Any = None
    fault: str = ""


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a `.jsonl`, `.json` or `.parquet` file, a directory of tasks, or `hf:NAME[:SPLIT]`.

    Raises UserError if the source as a whole cannot be read.
    """
    if source.startswith(HUGGING_FACE):
        return _hugging_face(source.removeprefix(HUGGING_FACE))
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if not path.is_file():
        raise UserError(f"the tasks {source} do not exist", "Give a file, a directory of tasks, or hf:NAME:SPLIT.")
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _json(path, json.loads(text)) if path.suffix == ".json" else _json_lines(path, text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Give JSON lines, JSON or Parquet.") from error


def read_text(path: Path) -> str:
    """As it is: a patch for a file with Windows line ends has them, too."""
    return path.read_bytes().decode()


def _json(path: Path, found: Any) -> Iterator[Row]:
    """A list of tasks, an object of tasks by name, or one task."""
    if isinstance(found, dict) and "instance_id" not in found and all(isinstance(one, dict) for one in found.values()):
        found = [{"instance_id": name, **row} for name, row in found.items()]
    rows = found if isinstance(found, list) else [found]
    return (Row(f"{path}, task {number}", row) for number, row in enumerate(rows, 1))


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON text may hold U+2028 and the like
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield Row(where, json.loads(line))
            except ValueError as error:
                yield Row(where, fault=f"not JSON ({error})")


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow, which is not installed", "Run `pip install pyarrow`.") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no Parquet file ({error})", "Give the file of the data set.") from error
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _directory(path: Path) -> Iterator[Row]:
    """Each sub-directory with a `task.yaml`: fields of the record; `problem.md`, `gold.patch`, `test.patch` and the
    repository in `repo/` beside it where the fields are not given."""
    files = sorted(path.glob("*/task.yaml"))
    if (path / "task.yaml").is_file():
        files.insert(0, path / "task.yaml")
    if not files:
        raise UserError(
            f"{path} holds no tasks", "A directory of tasks has one sub-directory with a task.yaml for each."
        )
    return (_own(file) for file in files)


def _own(file: Path) -> Row:
    try:
        row = yaml.safe_load(file.read_text()) or {}
        if not isinstance(row, dict):
            return Row(str(file), fault="not YAML with the fields of a task")
        row = {"format": 1, "kind": "own", "instance_id": file.parent.name, "repo": file.parent.name, **row}
        for name, beside in BESIDE:
            if name not in row and (file.parent / beside).is_file():
                row[name] = read_text(file.parent / beside)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return Row(str(file), fault=f"cannot be read ({error})")
    build = row.get("build")
    if isinstance(build, dict) and not {"sdist", "image"} & build.keys():
        row["build"] = {**build, "source": str((file.parent / str(build.get("source", "repo"))).absolute())}
    return Row(str(file), row)


def _hugging_face(name: str) -> Iterator[Row]:
    """From the local cache if HF_HUB_OFFLINE is set (or the network is gone), else from the hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"hf:{name} needs datasets, which is not installed", "Run `pip install datasets`.") from error
    dataset, _, split = name.partition(":")
    try:
        rows = load_dataset(dataset, split=split or "test")
    except Exception as error:  # it raises whatever its many parts raise
        raise UserError(
            f"the data set {dataset} (split {split or 'test'}) cannot be loaded ({error})",
            "Check its name and split (hf:NAME:SPLIT), or load it once with network access so that it is cached.",
        ) from error
    return (Row(f"hf:{name}, row {number}", dict(row)) for number, row in enumerate(rows, 1))
