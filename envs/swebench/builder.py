"""From a record to something that sandboxes can be made of; everything that tasks share is made once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.sandbox.engine import Engine
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.user import SandboxUser
from envs.swebench.environments import make_environment
from envs.swebench.errors import BuildFailed, NoRecipe
from envs.swebench.frameworks import named_tests
from envs.swebench.images import CONDA, image_recipe, make_image_tree
from envs.swebench.interpreters import Python, find_python
from envs.swebench.patches import Guard, parse_patch
from envs.swebench.recipes import PROJECTS, propose
from envs.swebench.record import Recipe, TaskRecord
from envs.swebench.store import Store, default_store
from envs.swebench.tools import Tools
from envs.swebench.trees import apply_patch, make_tree
from pearl.config.swebench import SwebenchConfig

VERSION = 1
"""Raised when trees or environments are made otherwise, so that old ones are not used."""
WORKSPACE = "/testbed"
SYSTEM_PACKAGES = ("/usr/lib/python3/dist-packages", "/usr/local/lib/python{}/dist-packages")
VARIABLES = {"LC_ALL": "C.UTF-8", "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0"}
REPOSITORY_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "sympy/sympy": {"PYTHONWARNINGS": "ignore::UserWarning,ignore::SyntaxWarning", "SYMPY_USE_CACHE": "no"},
}
"""As the official harness sets them."""
HTTPBIN_PORT = 8099
BYTES_PER_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class BuiltTask:
    """A task that can be played and graded."""

    record: TaskRecord
    recipe: Recipe
    image: SandboxImage
    environment: Path
    """The virtual environment."""
    tests: Mapping[str, Entry]
    """What the test patch makes of the files that it touches."""
    guard: Guard


class Builder:
    """Builds tasks in threads, a few at a time. Errors: `envs.swebench.errors`."""

    def __init__(self, config: SwebenchConfig, engine: Engine | None = None) -> None:
        """`engine`: of the containers in which tasks are played, if they are; then images can be built."""
        self._config, self._engine = config, engine
        directory = Path(config.cache) if config.cache else default_store()
        self.store = Store(directory, int(config.cache_gb * BYTES_PER_GB), config.build_s)
        self._user = SandboxUser.here()
        self._pythons: dict[str, Python] = {}
        self._built: dict[str, BuiltTask] = {}
        self._stop = threading.Event()
        # Threads of their own: sandboxes' work in the loop's threads must not wait for a pip.
        self._threads = ThreadPoolExecutor(config.builds, "build")

    def build(self, record: TaskRecord) -> BuiltTask:
        """Blocks; call it in a thread from a coroutine (`abuild`). What this builder has built is at hand at once."""
        if (built := self._built.get(record.instance_id)) is not None and built.record == record:
            return built
        try:
            return self._build(record)
        except (OSError, ValueError) as error:  # a full disk, a name that no file can have
            raise BuildFailed(f"{type(error).__name__}: {error}") from error

    def _build(self, record: TaskRecord) -> BuiltTask:
        recipe = record.build
        if self._engine is not None and (recipe is None or recipe.image is not None):
            return self._build_image(record, self._engine)
        if recipe is None or (recipe.image is not None and record.repo in PROJECTS):
            # The benchmark's own rows name their images; what can be built does not need them.
            recipe = propose(record, self.store, self._tools())
        if recipe.image is not None:
            raise NoRecipe(
                f"{record.instance_id} is a container image ({recipe.image}), which needs "
                "environment.sandbox.backend = podman or docker (`pearl env --backend podman --image IMAGE …`)"
            )
        tools = self._tools()
        python = self._pythons.get(recipe.python) or find_python(recipe.python, self._user, self.store)
        self._pythons[recipe.python] = python
        tree_key = _key(recipe, "sdist", "source", "setup_patch", "python")
        tree = self.store.make(
            "trees", tree_key, lambda target: make_tree(recipe, python.command, self._user, tools, target)
        )
        key = _key(recipe, "python", "deps", "install_self", extra=tree_key if recipe.install_self else "")
        final = self.store.directory / "environments" / key
        environment = self.store.make(
            "environments",
            key,
            lambda target: make_environment(recipe, python.command, tree, tools, target, final),
        )
        tests = apply_patch(tree, record.test_patch, tools)
        image = _image(record, recipe, python, tree, environment)
        built = BuiltTask(record, recipe, image, environment, tests, _guard(record, recipe, tree, environment))
        self._built[record.instance_id] = built
        return built

    def _build_image(self, record: TaskRecord, engine: Engine) -> BuiltTask:
        recipe = image_recipe(record)
        name, tools = str(recipe.image), self._tools()
        key = f"image-{hashlib.sha256(f'{VERSION} {name}'.encode()).hexdigest()[:16]}"
        tree = self.store.make(
            "trees", key, lambda target: make_image_tree(engine, name, WORKSPACE, self._user, tools, target)
        )
        image = SandboxImage(
            tree,
            WORKSPACE,
            path=(str(CONDA / "bin"),),
            variables={**VARIABLES, **REPOSITORY_VARIABLES.get(record.repo, {})},
            container=name,
        )
        tests = apply_patch(tree, record.test_patch, tools)
        built = BuiltTask(record, recipe, image, CONDA, tests, _guard(record, recipe, tree, CONDA))
        self._built[record.instance_id] = built
        return built

    async def abuild(self, record: TaskRecord) -> BuiltTask:
        if (built := self._built.get(record.instance_id)) is not None and built.record == record:
            return built
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.build, record)

    def changes(self, built: BuiltTask, patch: str) -> dict[str, Entry]:
        """What a patch makes of the task's repository."""
        return apply_patch(built.image.tree, patch, self._tools())

    def close(self) -> None:
        """End builds that are under way; let others evict what was built."""
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def _tools(self) -> Tools:
        return Tools.within(self._config.build_s, self._stop)


def _image(record: TaskRecord, recipe: Recipe, python: Python, tree: Path, environment: Path) -> SandboxImage:
    path = ":".join(str(Path(WORKSPACE, part)) for part in recipe.pythonpath.split(":"))
    system = [Path(text.format(recipe.python)) for text in SYSTEM_PACKAGES]
    service = {"HTTPBIN_URL": f"http://127.0.0.1:{HTTPBIN_PORT}/"} if recipe.httpbin else {}
    return SandboxImage(
        tree,
        WORKSPACE,
        binds=(*python.binds, (str(environment), str(environment))),
        hidden=(*python.hidden, *(str(folder) for folder in system if folder.is_dir())),
        path=(str(environment / "bin"),),
        variables={
            **VARIABLES,
            **REPOSITORY_VARIABLES.get(record.repo, {}),
            **service,
            "PYTHONPATH": path,
            "VIRTUAL_ENV": str(environment),
        },
    )


def _guard(record: TaskRecord, recipe: Recipe, tree: Path, environment: Path) -> Guard:
    named = [part.path for part in parse_patch(record.test_patch)]
    # Path's own would raise for a word that is longer than a name may be.
    named += named_tests(recipe.test_cmd, lambda path: os.path.exists(tree / path))  # noqa: PTH110
    named += [str(PurePosixPath(word)) for word in recipe.test_cmd if os.path.isfile(tree / word)]  # noqa: PTH113
    own = [path for part in parse_patch(record.patch) for path in (part.path, part.old_path) if path is not None]
    return Guard.of(named, own, _stand_ins(recipe, tree, environment))


def _stand_ins(recipe: Recipe, tree: Path, environment: Path) -> Iterator[str]:
    """See `Guard`: names that are taken, in the directories that come before the environment's."""
    installed = {entry.name.partition(".")[0] for entry in environment.glob("lib/python*/site-packages/*")}
    for root in {".", *recipe.pythonpath.split(":")}:
        for name in installed | sys.stdlib_module_names:
            path = PurePosixPath(root, name)
            if not (tree / path).exists() and not (tree / f"{path}.py").exists():
                yield str(path)


def _key(recipe: Recipe, *fields: str, extra: str = "") -> str:
    """A short hash; the name before it is for people who look at the directory."""
    chosen = recipe.model_dump(mode="json", include=set(fields))
    digest = hashlib.sha256(json.dumps([VERSION, chosen, extra], sort_keys=True).encode()).hexdigest()[:16]
    name = (recipe.sdist or Path(recipe.source or "own").name).replace("==", "-")
    return f"{name if 'sdist' in fields or extra else 'deps'}-py{recipe.python}-{digest}"
