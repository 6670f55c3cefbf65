"""Unified diffs: which files they touch, and which files an agent's work may not touch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath


class PatchError(ValueError):
    """A text is no unified diff, or leaves the repository."""


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a diff that concerns one file."""

    path: str
    """After the change; before it where the file is deleted."""
    old_path: str | None
    """None: the file is new."""
    deleted: bool
    text: str

    @property
    def added(self) -> list[str]:
        return [line[1:] for line in self.text.splitlines() if line.startswith("+") and not line.startswith("+++ ")]


_HEADER = re.compile(r"^diff --git (.*)$", re.MULTILINE)


def parse_patch(text: str) -> list[FilePatch]:
    """One part for each file, in order. Raises PatchError."""
    if not text.strip():
        return []
    starts = [match.start() for match in _HEADER.finditer(text)] or _bare_starts(text)
    if not starts:
        raise PatchError("the patch is not a unified diff")
    return [_file(text[start:end]) for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def keep_files(text: str, dropped: Iterable[str]) -> str:
    """The diff without the parts that touch one of `dropped`, under its old or its new name."""
    names = set(dropped)
    return "".join(part.text for part in parse_patch(text) if not names & {part.path, part.old_path})


def _bare_starts(text: str) -> list[int]:
    return [match.start() for match in re.finditer(r"^--- .*\n\+\+\+ ", text, re.MULTILINE)]


def _file(part: str) -> FilePatch:
    head = part.split("\n@@ ", 1)[0]
    old, new = _name(head, "--- "), _name(head, "+++ ")
    if old is None and new is None:  # a mode change, a rename, a binary file: only git's own header names it
        header = re.match(r'diff --git "?a/(.*?)"? "?b/(.*?)"?$', head.splitlines()[0])
        if header is None:
            raise PatchError(f"a part of the patch names no file: {head.splitlines()[0][:80]!r}")
        old, new = header[1], header[2]
        if "\nnew file mode" in head:
            old = "/dev/null"
        if "\ndeleted file mode" in head:
            new = "/dev/null"
    old, new = old or "/dev/null", new or "/dev/null"
    for name in (old, new):
        if name != "/dev/null" and (name.startswith("/") or ".." in PurePosixPath(name).parts):
            raise PatchError(f"the patch leaves the repository: {name!r}")
    deleted = new == "/dev/null"
    return FilePatch(old if deleted else new, None if old == "/dev/null" else old, deleted, part)


def _name(head: str, mark: str) -> str | None:
    for line in head.splitlines():
        if line.startswith(mark):
            name = line.removeprefix(mark).split("\t")[0].strip().strip('"')
            return name if name == "/dev/null" else re.sub(r"^[ab]/", "", name)
    return None


PROTECTED_NAMES = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml",
    "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "noxfile.py",
    "sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-link", "*.pyc", "*.pyo", "*.so", "*.pyd", ".coveragerc",
    ".env", ".gitattributes", ".gitmodules", "runtests.py", "pyvenv.cfg",
)  # fmt: skip
"""Files that decide how tests run, or what Python does before them."""
PROTECTED_FOLDERS = (
    "__pycache__", ".git", ".hg", ".github", "*.egg-info", "*.dist-info", "*.egg", "egg-info", "site-packages",
)  # fmt: skip
"""Nothing below a directory of such a name counts."""
SHADOWS = ("pytest", "_pytest", "pluggy", "unittest", "pytest_*", "iniconfig", "doctest")
"""New modules and packages of these names would stand in for the tools that judge."""
TEST_FOLDERS = frozenset({"tests", "test", "testing"})


@dataclass(frozen=True, slots=True)
class Guard:
    """Which changes of an agent do not count in grading: they are dropped, and what they touched is as before."""

    tests: frozenset[str]
    """Files and directories that the tests come from."""
    own: frozenset[str] = frozenset()
    """What the gold patch changes, an agent may change, too, unless it is one of `tests`."""
    stand_ins: frozenset[str] = frozenset()
    """Modules, without ".py", that do not exist and would be imported instead of the standard library's, or of an
    installed package's."""

    @classmethod
    def of(cls, test_paths: Iterable[str], own: Iterable[str], stand_ins: Iterable[str] = ()) -> Guard:
        """`test_paths`: files of the test patch, files and directories that the test command names."""
        paths = {path.rstrip("/") for path in test_paths}
        tests = paths | {folder for path in paths for folder in _test_folders(path)}
        return cls(frozenset(tests), frozenset(own), frozenset(stand_ins))

    def drops(self, path: str, *, new: bool) -> bool:
        """Whether a change to `path` is dropped; `new`: the repository has no such file."""
        parents = {str(parent) for parent in PurePosixPath(path).parents}
        if path in self.tests or (path not in self.own and parents & self.tests):
            return True
        if path in self.own:
            return False
        *folders, name = PurePosixPath(path.lower()).parts
        if _matches([name], PROTECTED_NAMES) or _matches(folders, PROTECTED_FOLDERS):
            return True
        if path.removesuffix(".py") in self.stand_ins or parents & self.stand_ins:
            return True
        return new and _matches([*folders, name.removesuffix(".py")], SHADOWS)


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _test_folders(path: str) -> list[str]:
    """The outermost directory above `path` that is named as directories of tests are."""
    parts = PurePosixPath(path).parts
    return ["/".join(parts[: n + 1]) for n, part in enumerate(parts[:-1]) if part in TEST_FOLDERS][:1]
