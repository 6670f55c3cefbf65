import random
from pathlib import PurePosixPath
from typing import Any

import pytest

from envs.swebench.frameworks import Framework, framework_of, make_canaries, named_tests, with_report
from envs.swebench.parsers import Status

PYTEST = ("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_a.py")
DJANGO = (
    "python",
    "./tests/runtests.py",
    "--verbosity",
    "2",
    "--settings=test_sqlite",
    "--parallel",
    "1",
    "app.test_a",
)
SYMPY = ("python", "-c", "import sympy; sympy.test()", "sympy/core/tests/test_a.py")
FILES = {
    "tests/test_a.py",
    "tests",
    "tests/app/test_a.py",
    "tests/app",
    "sympy/core/tests/test_a.py",
    "no:cacheprovider",
}


@pytest.mark.parametrize(
    ("command", "framework", "paths", "folder"),
    [
        (PYTEST, Framework.PYTEST, ["tests/test_a.py"], "tests"),
        ((*PYTEST[:-1], "tests"), Framework.PYTEST, ["tests"], "tests"),
        ((*PYTEST[:-1], "tests/test_a.py::test_x"), Framework.PYTEST, ["tests/test_a.py"], "tests"),
        (DJANGO, Framework.DJANGO, ["tests/app/test_a.py"], "tests/app"),
        ((*DJANGO[:-1], "app"), Framework.DJANGO, ["tests/app"], "tests/app"),
        (SYMPY, Framework.SYMPY, ["sympy/core/tests/test_a.py"], "sympy/core/tests"),
    ],
)
def test_canaries_stand_beside_the_tests(
    command: tuple[str, ...], framework: Framework, paths: list[str], folder: str
) -> None:
    assert framework_of(command) is framework
    assert named_tests(command, FILES.__contains__) == paths
    canaries = make_canaries(command, FILES.__contains__, random.Random(1))
    assert str(PurePosixPath(canaries.path).parent) == folder
    compile(canaries.source, canaries.path, "exec")
    stem = PurePosixPath(canaries.path).stem
    expected = {Framework.DJANGO: (f"app.{stem}",)}.get(framework, (canaries.path,))
    assert canaries.arguments == (() if command[-1] == "tests" else expected)


def test_canaries_do_what_their_names_are_listed_for() -> None:
    canaries = make_canaries(PYTEST, FILES.__contains__, random.Random(3))
    space: dict[str, Any] = {}
    exec(canaries.source, space)
    for name in canaries.succeed:
        space[name]()
    for name in canaries.fail:
        with pytest.raises((AssertionError, KeyError)):
            space[name]()


def test_canaries_are_drawn_anew_each_time() -> None:
    drawn = [make_canaries(PYTEST, FILES.__contains__) for _ in range(20)]
    assert len({canaries.path for canaries in drawn}) == 20 and len({canaries.source for canaries in drawn}) == 20


def test_disagreement_is_a_wrong_or_a_missing_verdict() -> None:
    canaries = make_canaries(PYTEST, FILES.__contains__, random.Random(5))
    right = {f"{canaries.path}::{name}": Status.FAILED for name in canaries.fail}
    right |= {f"{canaries.path}::{name}": Status.PASSED for name in canaries.succeed}
    assert canaries.disagree(right) == []
    assert canaries.disagree({}) == sorted(canaries.fail | canaries.succeed)
    assert canaries.disagree(dict.fromkeys(right, Status.PASSED)) == sorted(canaries.fail)
    assert canaries.disagree(dict.fromkeys(right, Status.FAILED)) == sorted(canaries.succeed)
    assert all(canaries.owns(name) for name in right) and not canaries.owns("tests/test_a.py::test_x")


@pytest.mark.parametrize(
    ("command", "added"),
    [
        (("pytest", "-v", "tests"), ["-rA"]),
        (("python", "-m", "pytest", "tests"), ["-rA"]),
        (("/opt/env/bin/py.test", "--tb=no"), ["-rA"]),
        (("pytest", "-rN", "tests"), []),
        (("pytest", "-vrA", "tests"), []),
        (("python", "-m", "unittest", "-v"), []),
        (DJANGO, []),
    ],
)
def test_pytest_lists_each_test_unless_the_command_says_what_it_reports(
    command: tuple[str, ...], added: list[str]
) -> None:
    assert with_report(command) == [*command, *added]
