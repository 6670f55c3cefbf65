"""From a YAML file and dotted overrides to a RunConfig; every fault is a UserError that names key, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from pearl.config.run import RunConfig
from pearl.errors import UserError

SIMILAR = 0.6
"""How close a key must be to a known one to be suggested (difflib's ratio)."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, apply `key.sub=value` overrides (values are YAML), validate. Raises UserError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({why})", "Give the path of a run's YAML file.") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise UserError(f"{path} is not valid YAML: {where}", "Mend the line that is named.") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, not sections", "Start from a file in examples/.")
    for override in overrides:
        _apply(tree, override)
    return make_config(tree, str(path))


def make_config(tree: dict[str, Any], source: str) -> RunConfig:
    """Validate a tree of sections. Raises UserError with one line per fault."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_fault(cast(dict[str, Any], fault)) for fault in error.errors()]
        what = "; ".join(faults)
        raise UserError(f"{source}: {what}", "docs/configuration.md lists every key with its unit.") from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not key.sub=value", "Write for example pipeline.steps=10.")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent} is a value, not a section", "Check the key.")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML", "Quote it.") from error


def _fault(fault: dict[str, Any]) -> str:
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        similar = difflib.get_close_matches(path[-1], _keys(path[:-1]), n=1, cutoff=SIMILAR)
        hint = f" (did you mean {'.'.join([*path[:-1], similar[0]])}?)" if similar else ""
        return f"unknown key {key} = {fault['input']!r}{hint}"
    if fault["type"] == "tuple_type":
        return f"{key} = {fault['input']!r}: input should be a list, written [...]"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{key} = {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _keys(section: list[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for name in section:
        field = model.model_fields.get(name)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
