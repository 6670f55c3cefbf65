"""Mutation tasks: a one-line fault in a PyPI package, kept if the package's own tests notice it, and only some do."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.sandbox.protocol import Entry, SandboxBackend
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.errors import BuildFailed
from envs.swebench.faults import Fault, apply_fault, diff, find_faults
from envs.swebench.patches import TEST_FOLDERS
from envs.swebench.record import Recipe, TaskRecord
from envs.swebench.tools import Tools
from envs.swebench.trees import download_sdist, unpack
from envs.swebench.trial import run_tests

MOST = 0.5
"""A fault that more than this share of the tests notices breaks everything, and teaches nothing."""
SLOWER = 10.0
"""A fault that makes the tests take this many times longer (and SLACK_S) hangs them."""
SLACK_S = 20.0
SHOWN = 5
"""Failing tests that the problem statement names."""
SOURCES = ("src", ".")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault: a task, or why it is none."""

    fault: Fault
    record: TaskRecord | None
    reason: str


async def mutate(
    recipe: Recipe, builder: Builder, backend: SandboxBackend, *, seed: int, count: int, tries: int, test_s: float
) -> AsyncIterator[Outcome]:
    """Faults in an order drawn from `seed`, until `count` are valid or `tries` were tried.

    A package whose tests do not pass as it is raises BuildFailed.
    """
    name = (recipe.sdist or "").replace("==", "-")
    base = await builder.abuild(_record(name, recipe, "", "nothing", "--- a/x\n+++ b/x\n", (), ()))
    healthy = [await run_tests(base, backend, {}, test_s) for _ in range(2)]
    passing = [test for test in healthy[0].statuses if all(_passes(trial.statuses, test) for trial in healthy)]
    if any(trial.doubt for trial in healthy) or not passing:
        raise BuildFailed(f"the tests of {name} do not run: {healthy[0].doubt or healthy[0].log[-500:]}")
    limit = min(test_s, SLOWER * healthy[0].seconds + SLACK_S)
    made = 0
    for number, fault in enumerate(draw_faults(base, seed)[:tries]):
        source = (base.image.tree / fault.path).read_text()
        broken = apply_fault(source, fault)
        trial = await run_tests(base, backend, {fault.path: Entry("file", broken.encode())}, limit)
        failing = tuple(test for test in passing if not _passes(trial.statuses, test))
        kept = tuple(test for test in passing if _passes(trial.statuses, test))
        if trial.doubt:
            yield Outcome(fault, None, trial.doubt)
        elif not failing:
            yield Outcome(fault, None, "no test notices it")
        elif len(failing) > MOST * len(passing):
            yield Outcome(fault, None, f"{len(failing)} of {len(passing)} tests notice it")
        else:
            setup, gold = diff(fault.path, source, broken), diff(fault.path, broken, source)
            whole = recipe.model_copy(update={"setup_patch": setup})
            text = problem(fault.path, failing)
            record = _record(f"{name}__{seed}-{number}", whole, recipe.sdist or "", text, gold, failing, kept)
            yield Outcome(fault, record, "")
            made += 1
            if made == count:
                return


def draw_faults(built: BuiltTask, seed: int) -> list[Fault]:
    """All faults of the package's modules, shuffled: files that decide how tests run are left alone."""
    tree = built.image.tree
    root = next(tree / folder for folder in SOURCES if (tree / folder).is_dir())
    faults = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(tree)
        packaged = (file.parent / "__init__.py").exists() or root.name == "src"
        if not packaged or TEST_FOLDERS & set(path.parts) or built.guard.drops(str(path), new=False):
            continue
        source = file.read_text(errors="replace")
        if source.endswith("\n") and "\r" not in source and "\f" not in source:
            faults += find_faults(str(path), source)
    random.Random(f"mutate {seed}").shuffle(faults)
    return faults


def find_recipe(requirement: str, python: str, deps: Sequence[str], tests: str, timeout_s: float) -> Recipe:
    """For a package on PyPI: its own requirements, `deps`, and pytest on `tests`. Blocks; raises BuildFailed."""
    with tempfile.TemporaryDirectory(prefix="pearl-sdist-") as name:
        folder = Path(name) / "tree"
        folder.mkdir()
        unpack(download_sdist(requirement, Path(name), Tools.within(timeout_s)), folder)
        return _recipe(requirement, python, deps, tests, folder)


def _recipe(requirement: str, python: str, deps: Sequence[str], tests: str, folder: Path) -> Recipe:
    information = folder / "PKG-INFO"
    lines = information.read_text(errors="replace").split("\n\n")[0].splitlines() if information.is_file() else []
    own = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    needed = [requirement for requirement in own if "extra ==" not in requirement]
    return Recipe(
        sdist=requirement,
        python=python,
        deps=(*needed, *deps),
        pythonpath="src" if (folder / "src").is_dir() else ".",
        test_cmd=("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider", tests),
    )


def problem(path: str, failing: tuple[str, ...]) -> str:
    names = "\n".join(f"- {test}" for test in failing[:SHOWN])
    more = f"\n- and {len(failing) - SHOWN} more" if len(failing) > SHOWN else ""
    return f"A line of `{path}` is wrong. Because of it these tests fail:\n{names}{more}"


def _record(
    name: str,
    recipe: Recipe,
    version: str,
    text: str,
    gold: str,
    failing: tuple[str, ...],
    kept: tuple[str, ...],
) -> TaskRecord:
    return TaskRecord(
        kind="mutation",
        instance_id=name,
        repo=(recipe.sdist or "").partition("==")[0],
        version=version.partition("==")[2],
        problem_statement=text,
        patch=gold,
        fail_to_pass=failing,
        pass_to_pass=kept,
        build=recipe,
    )


def _passes(statuses: dict, test: str) -> bool:
    return test in statuses and statuses[test].passes
