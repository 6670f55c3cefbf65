"""One task: SWE-bench's fields, and how to build the repository and its environment."""

from __future__ import annotations

import json
import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from envs.swebench.patches import PatchError, parse_patch

FORMAT = 1
"""Raised when a field changes its meaning; records of another format are refused."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$"
PYTHON = r"^\d+\.\d+$"
SDIST = r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+$"


def _words(value: Any) -> Any:
    """SWE-bench writes lists as JSON text in some releases."""
    if isinstance(value, str):
        try:
            return json.loads(value) if value.strip() else []
        except ValueError as error:
            raise ValueError("neither a list nor a JSON list") from error
    return [] if value is None else value


def _split(value: Any) -> Any:
    """A command as one text, as SWE-bench's own recipes write it."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


TestIds = Annotated[tuple[str, ...], BeforeValidator(_words)]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Recipe(Model):
    """How to come from nothing to a repository whose tests run: a container image, or a source and its dependencies."""

    image: str | None = None
    """Container image with the repository at `/testbed` (needs a backend for containers)."""
    sdist: str | None = None
    """Exact PyPI requirement, `flask==2.2.3`, whose source distribution is the repository."""
    source: str | None = None
    """Directory that is the repository, instead of an sdist."""
    setup_patch: str = ""
    """Applied before the repository's only commit: the fault of a mutation task."""
    python: str = Field("3.11", pattern=PYTHON)
    deps: tuple[str, ...] = ()
    """Requirements, as pip takes them."""
    install_self: bool = False
    """Also install the repository itself (entry points, metadata); the tree still comes first on the path."""
    pythonpath: str = "."
    """Directories relative to the repository, separated by colons."""
    test_cmd: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field((), max_length=500)
    """Arguments that run the tests; `python` is the environment's."""
    httpbin: bool = False
    """Serve httpbin on the sandbox's own loopback while commands run."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Recipe:
        if sum(source is not None for source in (self.image, self.sdist, self.source)) != 1:
            raise ValueError("a recipe has exactly one of image, sdist and source")
        if self.sdist is not None and not re.fullmatch(SDIST, self.sdist):
            raise ValueError(f"sdist = {self.sdist!r} is not name==version")
        if self.image is None and not self.test_cmd:
            raise ValueError("a recipe without an image needs test_cmd")
        if any(part.startswith("/") or ".." in part.split("/") for part in self.pythonpath.split(":")):
            raise ValueError(f"pythonpath = {self.pythonpath!r} leaves the repository")
        if any("\0" in word for word in (*self.test_cmd, *self.deps, self.pythonpath)):
            raise ValueError("a command or requirement holds a NUL")
        return self


class TaskRecord(Model):
    """Validated; written and read as one JSON object with SWE-bench's names, plus `format`, `kind` and `build`."""

    format: Literal[1] = 1
    kind: Literal["swebench", "mutation", "own"] = "swebench"
    instance_id: str = Field(pattern=NAME, max_length=200)
    repo: str
    version: str = ""
    """Of the repository, as SWE-bench names it."""
    base_commit: str = ""
    created_at: str = ""
    """ISO date of the change; helps to find a release close to it."""
    problem_statement: str
    hints_text: str = ""
    patch: str
    """The gold patch; never shown."""
    test_patch: str = ""
    """Applied before grading; never shown. Empty where the repository's own tests judge."""
    fail_to_pass: TestIds = Field((), alias="FAIL_TO_PASS")
    pass_to_pass: TestIds = Field((), alias="PASS_TO_PASS")
    official_fail_to_pass: TestIds = Field((), alias="official_FAIL_TO_PASS")
    """The benchmark's lists, where FAIL_TO_PASS and PASS_TO_PASS were derived anew by running."""
    official_pass_to_pass: TestIds = Field((), alias="official_PASS_TO_PASS")
    unturned: TestIds = ()
    """Tests that passed on the gold patch although they were turned round (`decoys`), so grading leaves them as they
    are; found by validation."""
    status: str = ""
    """What an earlier validation found: `strict`, `f2p_ok_p2p_partial`, `partial`, …"""
    run_s: float | None = Field(None, gt=0)
    """How long the tests took once."""
    build: Recipe | None = None

    @field_validator("patch", "test_patch")
    @classmethod
    def _is_a_patch(cls, text: str) -> str:
        try:
            parts = parse_patch(text)
        except PatchError as error:
            raise ValueError(str(error)) from None
        for path in (path for part in parts for path in (part.path, part.old_path) if path is not None):
            if "\0" in path or ".git" in path.split("/"):
                raise ValueError(f"the patch changes {path!r}")
        return text

    @field_validator("problem_statement", "hints_text", "patch", "test_patch")
    @classmethod
    def _can_be_written(cls, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("holds half a surrogate pair, which is no text") from error
        return text

    @model_validator(mode="after")
    def _says_something(self) -> TaskRecord:
        if not self.patch.strip():
            raise ValueError("the gold patch is empty: nothing can tell whether the task can be solved")
        return self

    def as_json(self) -> dict[str, Any]:
        """What `load` reads again; fields at their defaults are left out, except `format`."""
        return {"format": FORMAT, **self.model_dump(mode="json", by_alias=True, exclude_defaults=True)}
