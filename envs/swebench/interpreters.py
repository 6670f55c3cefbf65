"""Pythons of several versions: found on this machine, and made visible to the user that runs sandboxed commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envs.sandbox.user import SandboxUser
from envs.swebench.errors import PythonUnavailable
from envs.swebench.store import Store

QUERY_S = 20.0
LEFT_OUT = ("__pycache__", "test", "tests", "idle_test", "site-packages", "ensurepip", "*.a", "config-*", "*.pyc")
"""Not copied: what no test suite needs, and what holds packages (a vendored copy of a fixed version, say)."""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter: `command` runs it here and inside; `binds` make it visible there."""

    version: str
    command: Path
    binds: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]


def find_python(version: str, user: SandboxUser, store: Store) -> Python:
    """The newest patch release of `version` ("3.9") at hand. Raises PythonUnavailable."""
    for candidate in _candidates(version):
        prefix = _prefix(candidate, version)
        if prefix is None:
            continue
        if prefix == Path("/usr") or prefix.is_relative_to("/usr"):
            return Python(version, candidate, (), ())
        library = prefix / "lib" / f"python{version}"
        hidden = tuple(str(library / part) for part in ("site-packages", "ensurepip"))
        if user.can_read(prefix / "bin" / f"python{version}"):
            return Python(version, candidate, ((str(prefix), str(prefix)),), hidden)
        # It lies where that user cannot go (/root): a copy is mounted where the original is.
        key = f"{version}-{zlib.crc32(f'{prefix} {prefix.stat().st_mtime_ns}'.encode()):x}"
        copy = store.make("pythons", key, partial(_copy, prefix))
        return Python(version, candidate, ((str(copy), str(prefix)),), ())
    raise PythonUnavailable(
        f"no Python {version} with venv on this machine (looked in pyenv's and uv's directories and on PATH); "
        f"`pyenv install {version}` gets one"
    )


def _candidates(version: str) -> Iterator[Path]:
    yield Path(sys.base_prefix) / "bin" / f"python{version}"
    homes = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    folders = [Path(home) / "versions" for home in homes if home]
    folders.append(Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python"))
    pattern = re.compile(rf"(?:cpython-)?{re.escape(version)}\.\d+(?:$|-)")
    for folder in folders:
        if folder.is_dir():
            found = [entry for entry in folder.iterdir() if pattern.match(entry.name) and not entry.is_symlink()]
            yield from (entry / "bin" / f"python{version}" for entry in sorted(found, key=_patch, reverse=True))
    for folder in [Path(part) for part in os.environ.get("PATH", "").split(":") if part] + [Path("/usr/bin")]:
        if "shims" not in folder.parts:
            yield folder / f"python{version}"


def _patch(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name)[:3])


def _prefix(command: Path, version: str) -> Path | None:
    """Of an interpreter that runs, has that version and can make virtual environments."""
    if not command.exists():
        return None
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)"
    try:
        said = subprocess.run(
            [command, "-I", "-c", code], capture_output=True, text=True, timeout=QUERY_S, check=True
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(said[1]).resolve() if said[0] == version else None


def _copy(prefix: Path, target: Path) -> None:
    for part in ("bin", "lib"):
        shutil.copytree(prefix / part, target / part, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
