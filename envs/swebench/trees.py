"""Repositories: unpacked from a PyPI sdist or copied, one commit without history, byte code beside the sources."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from envs.sandbox.protocol import Entry
from envs.sandbox.user import SandboxUser
from envs.swebench.errors import BuildFailed, PatchDoesNotApply
from envs.swebench.patches import FilePatch, PatchError, parse_patch
from envs.swebench.record import Recipe
from envs.swebench.tools import Tools

IGNORED = "__pycache__/\n*.pyc\n.pytest_cache/\n*.egg-info/\n"


def make_tree(recipe: Recipe, python: Path, user: SandboxUser, tools: Tools, target: Path) -> None:
    """Fill `target`. Byte code is checked against its source by hash where Python can (3.7 on), so no edit goes
    unnoticed; without it each command would compile all it imports anew."""
    if recipe.sdist is not None:
        with tempfile.TemporaryDirectory(prefix="pearl-sdist-") as folder:
            unpack(download_sdist(recipe.sdist, Path(folder), tools), target)
    else:
        assert recipe.source is not None
        if not Path(recipe.source).is_dir():
            raise BuildFailed(f"the repository {recipe.source} is no directory")
        shutil.copytree(recipe.source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    for path, entry in apply_patch(target, recipe.setup_patch, tools).items():
        _put(target / path, entry)
    commit(target, tools)
    mode = [] if recipe.python == "3.6" else ["--invalidation-mode", "checked-hash"]
    try:
        tools.run([python, "-m", "compileall", "-q", *mode, "-x", r"[/\\]\.git[/\\]", "."], target)
    except BuildFailed as error:
        if error.reason != BuildFailed.reason:  # files of another Python in the tree do not compile; the deadline holds
            raise
    own(target, user)


def commit(target: Path, tools: Tools) -> None:
    """One commit of all that is there, in place of any history."""
    if (target / ".git").is_dir():
        shutil.rmtree(target / ".git")
    tools.git(target, "init", "-q", "--template=")
    (target / ".git" / "info").mkdir(exist_ok=True)
    (target / ".git" / "info" / "exclude").write_text(IGNORED)
    tools.git(target, "add", "-A", "-f", ".")
    tools.git(target, "commit", "-q", "--no-verify", "-m", "base")


def download_sdist(requirement: str, folder: Path, tools: Tools) -> Path:
    """pip cannot do it: it builds an sdist's metadata even to download it, and old ones fail."""
    index = os.environ.get("PIP_INDEX_URL")
    options = ["--index-url", index] if index else []
    said = tools.run(
        [sys.executable, "-m", "unearth", requirement, "--no-binary", "--download", folder, *options], folder
    )
    try:
        return folder / Path(json.loads(said[said.index("{") :])["local_path"]).name
    except (ValueError, KeyError) as error:
        raise BuildFailed(f"no source distribution of {requirement} was found: {said[-300:]}") from error


def unpack(archive: Path, target: Path) -> None:
    """The contents of the archive's one directory; owners are dropped, links out of it are refused."""
    with tempfile.TemporaryDirectory(prefix="pearl-unpack-") as name:
        folder = Path(name)
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(folder)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
        except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise BuildFailed(f"{archive.name} cannot be unpacked: {error}") from error
        inside = list(folder.iterdir())
        root = inside[0] if len(inside) == 1 and inside[0].is_dir() else folder
        shutil.copytree(root, target, symlinks=True, dirs_exist_ok=True)


def apply_patch(tree: Path, patch: str, tools: Tools, *, fuzz: bool = True) -> dict[str, Entry]:
    """What a patch makes of `tree`, which stays as it is. Raises PatchDoesNotApply.

    Exact context first; then, with `fuzz`, as loosely as the official harness does.
    """
    try:
        parts = parse_patch(patch)
    except PatchError as error:
        raise PatchDoesNotApply(str(error)) from None
    if not parts:
        return {}
    touched = {path for part in parts for path in (part.path, part.old_path) if path is not None}
    with tempfile.TemporaryDirectory(prefix="pearl-patch-") as name:
        folder = Path(name)
        scratch = folder / "tree"
        for path in touched:
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            if (tree / path).is_file():
                shutil.copy(tree / path, scratch / path)
        _apply(scratch, parts, folder / "patch", tools, fuzz)
        return {path: _entry(scratch / path) for path in sorted(touched)}


def _apply(scratch: Path, parts: list[FilePatch], file: Path, tools: Tools, fuzz: bool) -> None:
    """git takes all or nothing; as it is first, then with the files' line ends, which some data sets lose."""
    said = ""
    exact = "".join(part.text for part in parts)
    fitted = "".join(_with_line_ends(part, scratch) for part in parts)
    for text in dict.fromkeys((exact, fitted)):
        file.write_bytes((text if text.endswith("\n") else text + "\n").encode())
        try:
            tools.git(scratch, "apply", "--whitespace=nowarn", str(file))
            return
        except BuildFailed as error:
            said = said or str(error)
    if not fuzz or shutil.which("patch") is None:
        raise PatchDoesNotApply(said)
    try:
        tools.run(["patch", "--batch", "--binary", "--fuzz=5", "-p1", "-s", "-i", file], scratch)
    except BuildFailed:
        raise PatchDoesNotApply(said) from None


def _with_line_ends(part: FilePatch, tree: Path) -> str:
    text = part.text.replace("\r\n", "\n")
    file = tree / (part.old_path or part.path)
    if not file.is_file() or b"\r\n" not in file.read_bytes():
        return text
    head, mark, hunks = text.partition("\n@@ ")
    ended = "".join(
        line[:-1] + "\r\n" if line[:1] in "+- " and line.endswith("\n") else line for line in _lines(mark[1:] + hunks)
    )
    return f"{head}\n{ended}" if mark else text


def _lines(text: str) -> list[str]:
    return [line + "\n" for line in text.split("\n")[:-1]] + [rest for rest in [text.rpartition("\n")[2]] if rest]


def _entry(path: Path) -> Entry:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return Entry("other")
    if not path.exists():
        return Entry("missing")
    return Entry("file", path.read_bytes(), bool(path.stat().st_mode & 0o100))


def _put(path: Path, entry: Entry) -> None:
    if entry.kind == "missing":
        path.unlink(missing_ok=True)
    elif entry.kind == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.data)
        path.chmod(0o755 if entry.executable else 0o644)


def own(tree: Path, user: SandboxUser) -> None:
    """A file of anybody but the user that runs commands could not be changed in the overlay."""
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            path = Path(folder) / name
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o600 | (0o100 if path.is_dir() else 0))
            user.own(path)
    user.own(tree)
