"""Tasks from files: our own records, SWE-bench's rows (and those of its relatives), directories, Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from envs.swebench.record import Recipe, TaskRecord
from pearl.errors import UserError

RECORD_FIELDS = frozenset(field.alias or name for name, field in TaskRecord.model_fields.items()) | frozenset(
    TaskRecord.model_fields
)
RECIPE_FIELDS = frozenset(Recipe.model_fields)
IMAGE_FIELDS = ("image", "docker_image", "image_name")
HUGGING_FACE = "hf:"


def load_tasks(source: str) -> list[TaskRecord]:
    """Records of `source`: a `.jsonl`, `.json` or `.parquet` file, a directory of tasks, or `hf:NAME[:SPLIT]`.

    Raises UserError that names the row and the field.
    """
    if source.startswith(HUGGING_FACE):
        rows = _hugging_face(source.removeprefix(HUGGING_FACE))
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            rows = _directory(path)
        elif path.is_file():
            rows = _file(path)
        else:
            raise UserError(f"the tasks {source} do not exist", "Give a file, a directory of tasks, or hf:NAME:SPLIT.")
    tasks: dict[str, TaskRecord] = {}
    for where, row in rows:
        record = read_row(row, where)
        if record.instance_id in tasks:
            raise UserError(f"{where}: instance_id {record.instance_id!r} occurs twice", "Give each task its own name.")
        tasks[record.instance_id] = record
    if not tasks:
        raise UserError(f"{source} holds no tasks", "Make some, for example with `pearl env mutate`.")
    return list(tasks.values())


def save_tasks(path: Path, records: Iterable[TaskRecord]) -> None:
    """One JSON object a line, as `load_tasks` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record.as_json()) + "\n" for record in records))


def read_row(row: Any, where: str) -> TaskRecord:
    """A record of our format is taken strictly; of anything else the known fields are, and the rest is ignored."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is no object with fields", "One task is one JSON object.")
    if "format" not in row:
        row = _foreign(row)
    try:
        return TaskRecord.model_validate(row)
    except ValidationError as error:
        name = row.get("instance_id", "a task without instance_id")
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}" for fault in error.errors()]
        raise UserError(
            f"{where} ({name}): {'; '.join(faults[:4])}", "docs/environments.md lists the fields."
        ) from None


def _foreign(row: dict[str, Any]) -> dict[str, Any]:
    """A row of SWE-bench or a relative; where there is a recipe, its fields stand beside the others."""
    known = {name: value for name, value in row.items() if name in RECORD_FIELDS and value is not None}
    recipe = {name: row[name] for name in RECIPE_FIELDS if row.get(name) is not None}
    image = next((row[name] for name in IMAGE_FIELDS if row.get(name)), None)
    if "build" not in known and recipe.get("sdist"):
        known["build"] = {name: value for name, value in recipe.items() if name not in ("image", "source")}
    elif "build" not in known and image:
        known["build"] = {"image": image}
    if "version" in known:
        known["version"] = str(known["version"])
    if not (isinstance(known.get("run_s"), int | float) and known["run_s"] > 0):
        known.pop("run_s", None)
    return known


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # type: ignore[import-untyped]
        except ImportError as error:
            raise UserError(f"{path} needs pyarrow, which is not installed", "Run `pip install pyarrow`.") from error
        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no Parquet file ({error})", "Give the file of the data set.") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    try:
        text = path.read_text()
        if path.suffix == ".json":
            rows = json.loads(text)
            rows = rows if isinstance(rows, list) else [rows]
            yield from ((f"{path}, task {number}", row) for number, row in enumerate(rows, 1))
            return
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Give JSON lines, JSON or Parquet.") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON ({error})", "One task a line.") from error


def _directory(path: Path) -> Iterator[tuple[str, Any]]:
    """Each sub-directory with a `task.yaml`: fields of the record; `problem.md`, `gold.patch`, `test.patch` and the
    repository in `repo/` beside it where the fields are not given."""
    files = sorted(path.glob("*/task.yaml"))
    if (path / "task.yaml").is_file():
        files.insert(0, path / "task.yaml")
    if not files:
        raise UserError(
            f"{path} holds no tasks", "A directory of tasks has one sub-directory with a task.yaml for each."
        )
    for file in files:
        try:
            row = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{file} cannot be read ({error})", "It is YAML with the fields of a task.") from error
        if not isinstance(row, dict):
            raise UserError(f"{file} holds no fields", "It is YAML with the fields of a task.")
        row = {"format": 1, "kind": "own", "instance_id": file.parent.name, "repo": file.parent.name, **row}
        for name, beside in (
            ("problem_statement", "problem.md"),
            ("patch", "gold.patch"),
            ("test_patch", "test.patch"),
        ):
            if name not in row and (file.parent / beside).is_file():
                row[name] = (file.parent / beside).read_text()
        build = row.get("build")
        if isinstance(build, dict) and not {"sdist", "image"} & build.keys():
            row["build"] = {**build, "source": str((file.parent / build.get("source", "repo")).absolute())}
        yield str(file), row


def _hugging_face(name: str) -> Iterator[tuple[str, Any]]:
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
            "Check its name, or load it once with network access so that it is cached.",
        ) from error
    yield from ((f"hf:{name}, row {number}", dict(row)) for number, row in enumerate(rows, 1))
