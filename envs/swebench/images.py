"""Tasks that are container images, as SWE-bench publishes them: the repository is copied out of the image once.

Patches are applied to the copy, as to any other tree. Its history is one commit, which sandboxes get in place of the
image's own: that one can hold the fix.
"""

from __future__ import annotations

import platform
import secrets
from pathlib import Path

from envs.sandbox.engine import Engine
from envs.sandbox.user import SandboxUser
from envs.swebench.errors import BuildFailed
from envs.swebench.patches import parse_patch
from envs.swebench.recipes import NOT_TESTS, PROJECTS, PYTEST
from envs.swebench.record import Recipe, TaskRecord
from envs.swebench.tools import Tools
from envs.swebench.trees import commit, own

CONDA = Path("/opt/miniconda3/envs/testbed")
"""The environment of tasks in SWE-bench's images."""
OFFICIAL = "docker.io/swebench/sweb.eval.{machine}.{name}:latest"


def image_recipe(record: TaskRecord) -> Recipe:
    """The record's image, or SWE-bench's for it, and a command for its tests."""
    recipe = record.build
    if recipe is None:
        machine = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
        name = record.instance_id.lower().replace("__", "_1776_")
        recipe = Recipe(image=OFFICIAL.format(machine=machine, name=name))
    if recipe.test_cmd:
        return recipe
    files = [part.path for part in parse_patch(record.test_patch) if not part.path.endswith(NOT_TESTS)]
    project = PROJECTS.get(record.repo)
    command = project.command(files) if project else (*PYTEST, *(path for path in files if path.endswith(".py")))
    return recipe.model_copy(update={"test_cmd": command})


def make_image_tree(engine: Engine, image: str, workspace: str, user: SandboxUser, tools: Tools, target: Path) -> None:
    """Fill `target` with the image's repository; pulls the image if need be. Raises BuildFailed."""
    variables = engine.variables
    try:
        tools.run([engine.program, "image", "inspect", image], target, variables)
    except BuildFailed as error:
        if error.reason != BuildFailed.reason:
            raise
        tools.run([engine.program, "pull", image], target, variables)
    name = f"pearl-copy-{secrets.token_hex(6)}"
    tools.run(
        [engine.program, "create", "--name", name, "--network", "none", "--entrypoint", "/bin/true", image],
        target,
        variables,
    )
    try:
        tools.run([engine.program, "cp", f"{name}:{workspace}/.", target], target, variables)
    finally:
        tools.run([engine.program, "rm", "--force", name], target, variables)
    commit(target, tools)
    own(target, user)
