"""`docs/configuration.md` from the models: every key, its type, default, bounds and meaning."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pearl.config.run import RunConfig

INTRODUCTION = """# Configuration

A run is one YAML file (`examples/` has some to start from). Any key can be set on the command line as
`section.key=value`, and `pearl train RUN.yaml --dry-run` prints the whole resolved configuration without starting
anything. An unknown key, a wrong type or sizes that do not fit are refused before any process starts.

This page is generated from the models in `pearl/config/` by `make docs`.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, doc, rows in _sections(RunConfig, "", (RunConfig.__module__)):
        parts.append(f"\n## {title}\n\n{doc}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts.extend(rows)
    return "\n".join(parts) + "\n"


def _sections(model: type[BaseModel], prefix: str, module: str) -> Iterator[tuple[str, str, list[str]]]:
    doc = " ".join((sys.modules[model.__module__].__doc__ or "").split()) if prefix.count(".") < 2 else ""
    rows, inner = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner.append((kind, f"{prefix}{name}."))
        else:
            rows.append(_row(prefix + name, field))
    if rows:
        yield (f"`{prefix.rstrip('.')}`" if prefix else "The run"), doc, rows
    for kind, path in inner:
        yield from _sections(kind, path, module)


def _row(key: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    default = field.default
    shown = "none" if default is None else str(list(default)) if isinstance(default, tuple) else str(default)
    return f"| `{key}` | {_type(field.annotation)}{_bounds(field)} | `{shown}` | {meaning} |"


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type(a) for a in get_args(annotation))
    if origin is tuple:
        return f"list of {_type(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _bounds(field: FieldInfo) -> str:
    signs = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
    found = [f"{sign} {getattr(m, name)}" for m in field.metadata for kind, name, sign in signs if isinstance(m, kind)]
    return f", {', '.join(found)}" if found else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
