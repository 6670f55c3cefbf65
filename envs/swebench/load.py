"""From rows to tasks: records of our own format strictly, SWE-bench's rows and those of its relatives leniently."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.swebench.record import Recipe, TaskRecord
from envs.swebench.rows import Row, read_rows
from pearl.errors import UserError

RECORD_FIELDS = frozenset(field.alias or name for name, field in TaskRecord.model_fields.items())
LISTS = ("fail_to_pass", "pass_to_pass")
"""Some relatives write these names in lower case."""
TEXTS = ("version", "created_at", "base_commit", "hints_text")
"""Numbers or dates in some releases, of which nothing is asked but that they can be written down."""
RECIPE_FIELDS = frozenset(Recipe.model_fields)
IMAGE_FIELDS = ("image", "docker_image", "image_name")
SHOWN = 3
"""Faults of one row that are told."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no task."""

    where: str
    instance_id: str
    """As far as it has one; else `where`."""
    fault: str

    reason = "bad_row"

    def __str__(self) -> str:
        named = f" ({self.instance_id})" if self.instance_id != self.where else ""
        return f"{self.where}{named}: {self.fault}"


def read_tasks(source: str) -> list[TaskRecord | BadRow]:
    """What each row of `source` (see `read_rows`) is, in order. Raises UserError if it has none."""
    found: list[TaskRecord | BadRow] = []
    names = set()
    for row in read_rows(source):
        task = read_row(row)
        if isinstance(task, TaskRecord):
            if task.instance_id in names:
                task = BadRow(row.where, task.instance_id, "instance_id occurs twice; the first holds")
            names.add(task.instance_id)
        found.append(task)
    if not found:
        raise UserError(f"{source} holds no tasks", "Make some, for example with `pearl env mutate`.")
    return found


def load_tasks(source: str) -> list[TaskRecord]:
    """All tasks of `source`. Raises UserError that names the first bad row and its fault."""
    found = read_tasks(source)
    bad = [row for row in found if isinstance(row, BadRow)]
    if bad:
        more = f", and {len(bad) - 1} more such rows" if len(bad) > 1 else ""
        raise UserError(
            f"{bad[0]}{more}",
            "docs/environments.md lists the fields; `pearl env validate TASKS --output VALID.jsonl` leaves such rows "
            "out.",
        )
    return [row for row in found if isinstance(row, TaskRecord)]


def save_tasks(path: Path, records: Iterable[TaskRecord]) -> None:
    """One JSON object a line, as `load_tasks` reads it. Raises UserError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record.as_json()) + "\n" for record in records))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror})", "Give a file in a directory of yours."
        ) from error


def add_task(path: Path, record: TaskRecord) -> None:
    """One more line of a file that `save_tasks` wrote."""
    with path.open("a") as file:
        file.write(json.dumps(record.as_json()) + "\n")


def read_row(row: Row) -> TaskRecord | BadRow:
    if row.fault:
        return BadRow(row.where, row.where, row.fault)
    if not isinstance(row.value, dict):
        return BadRow(row.where, row.where, "not an object with fields")
    fields = row.value if "format" in row.value else _foreign(row.value)
    try:
        return TaskRecord.model_validate(fields)
    except ValidationError as error:
        name = row.value.get("instance_id")
        return BadRow(row.where, name if isinstance(name, str) and name else row.where, _said(error))


def _said(error: ValidationError) -> str:
    faults = error.errors()
    told = [f"{'.'.join(map(str, fault['loc'])) or 'the task'}: {_plain(fault)}" for fault in faults[:SHOWN]]
    return "; ".join([*told, f"{len(faults) - SHOWN} more"] if len(faults) > SHOWN else told)


def _plain(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "extra_forbidden":
        return "is no field of a task"
    text = str(fault["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
    given = fault["input"]
    return f"{text}, not {given!r}" if isinstance(given, str | int | float | bool) and len(str(given)) < 80 else text


def _foreign(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row of another format the known fields; where there is a recipe, its fields stand beside the others."""
    row = {**row, **{name.upper(): row[name] for name in LISTS if name in row and name.upper() not in row}}
    known = {name: value for name, value in row.items() if name in RECORD_FIELDS and value is not None}
    recipe = {name: row[name] for name in RECIPE_FIELDS if row.get(name) is not None}
    image = next((row[name] for name in IMAGE_FIELDS if row.get(name)), None)
    if "build" not in known and recipe.get("sdist"):
        known["build"] = {name: value for name, value in recipe.items() if name not in ("image", "source")}
    elif "build" not in known and image:
        known["build"] = {"image": image}
    known.update({name: str(known[name]) for name in TEXTS if name in known})
    if not (isinstance(known.get("run_s"), int | float) and known["run_s"] > 0):
        known.pop("run_s", None)
    return known
