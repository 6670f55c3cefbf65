"""Where an agent could read the fix instead of finding it: another copy of the repaired file, or git history."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from envs.swebench.builder import BuiltTask
from envs.swebench.errors import BuildFailed
from envs.swebench.patches import FilePatch, parse_patch
from envs.swebench.tools import Tools

LINE_CHARS = 6
"""A line with fewer is found anywhere."""
GIT_S = 60.0


def find_leaks(built: BuiltTask) -> list[str]:
    """One sentence for each; empty if none was found.

    A copy leaks if it has the name and directory of a file that the gold patch changes, and every line that the patch
    adds, while the task's own file lacks some of them.
    """
    found = []
    places = [Path(here) for here, inside in built.image.binds if inside not in built.image.hidden]
    hidden = [Path(folder) for folder in built.image.hidden]
    for part in parse_patch(built.record.patch):
        added = [line.strip() for line in part.added if len(re.sub(r"\W", "", line)) >= LINE_CHARS]
        own = built.image.tree / part.path
        if not added or (own.is_file() and _holds(own, added)):
            continue
        for place in [*places, built.image.tree]:
            for copy in _copies(place, part):
                if copy != own and not any(copy.is_relative_to(folder) for folder in hidden) and _holds(copy, added):
                    found.append(f"{copy} holds the fix of {part.path}")
    return found + _history(built.image.tree)


def _copies(place: Path, part: FilePatch) -> Iterator[Path]:
    """Files below `place` with the same name in a directory of the same name."""
    parts = Path(part.path).parts
    for copy in place.rglob(parts[-1]):
        if copy.is_file() and (len(parts) == 1 or copy.parent.name == parts[-2]):
            yield copy


def _holds(path: Path, lines: list[str]) -> bool:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    have = {line.strip() for line in text.splitlines()}
    return all(line in have for line in lines)


def _history(tree: Path) -> list[str]:
    tools = Tools.within(GIT_S)
    try:
        commits = tools.git(tree, "-c", "safe.directory=*", "rev-list", "--all", "--reflog", "--count").strip()
    except BuildFailed as error:
        return [f"git history cannot be read: {error}"]
    return [] if commits == "1" else [f"git history holds {commits} commits"]
