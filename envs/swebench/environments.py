"""Virtual environments of tasks: shared by all tasks with the same Python and dependencies."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from envs.swebench.errors import BuildFailed, BuildTimeout
from envs.swebench.record import Recipe
from envs.swebench.tools import Tools

OLD_PIPS = {"3.6": "pip==21.3.1"}
"""Pythons whose own pip takes releases that do not support them; the last pip that does support them."""


def make_environment(recipe: Recipe, python: Path, tree: Path, tools: Tools, target: Path, final: Path) -> None:
    """Fill `target`, which is renamed to `final` later: scripts name `final` already.

    pip goes at the end: nothing can be downloaded inside, and the packages that it carries (requests, …) can hold the
    very fix that a task asks for.
    """
    tools.run([python, "-m", "venv", target], target.parent)
    pip: list[str | Path] = [target / "bin" / "python", "-m", "pip", "install", "-q"]
    if recipe.python in OLD_PIPS:
        tools.run([*pip, OLD_PIPS[recipe.python]], target.parent)
    if recipe.deps:
        tools.run([*pip, *recipe.deps], target.parent)
    if recipe.install_self:
        _install_self(pip, recipe, tree, tools)
    if not any(re.match(r"pip\b(?!-)", dep.strip(), re.IGNORECASE) for dep in recipe.deps):
        for site in target.glob("lib/python*/site-packages"):
            for part in [*site.glob("pip"), *site.glob("pip-*.dist-info")]:
                shutil.rmtree(part)
        for script in target.glob("bin/pip*"):
            script.unlink()
    for script in [target / "pyvenv.cfg", *(target / "bin").iterdir()]:
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if str(target).encode() in content and b"\0" not in content[:1024]:
            script.write_bytes(content.replace(str(target).encode(), str(final).encode()))


def _install_self(pip: list[str | Path], recipe: Recipe, tree: Path, tools: Tools) -> None:
    version = (recipe.sdist or "").partition("==")[2] or "0"
    with tempfile.TemporaryDirectory(prefix="pearl-source-") as name:
        source = Path(name) / "source"
        shutil.copytree(tree, source, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        versions = {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
        try:
            tools.run([*pip, "--no-deps", source], Path(name), versions)
        except BuildTimeout:
            raise
        except BuildFailed:  # old build scripts want the dependencies' own setuptools
            tools.run([*pip, "--no-deps", "--no-build-isolation", source], Path(name), versions)
