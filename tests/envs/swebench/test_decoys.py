"""Tests that are turned round cannot pass where the real ones did."""

import ast
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swebench.decoys import Decoy, make_decoy, places

PYTEST = "tests/test_a.py"
SOURCE = '''import unittest


def test_sum():
    values = [1, 2]
    assert sum(values) == 3


def test_text():
    """Says it."""
    assert "ab".upper() == "AB", "message"


def test_multi():
    assert (
        {"a": [1, 2.5], "b": True}
        == dict(a=[1, 2.5], b=True)
    )


def test_name():
    found = "a"
    assert found in "abc"


def test_early():
    for n in range(3):
        if n == 5:
            return
    assert 1 == 1


def test_nothing():
    with open("/dev/null") as file:
        file.read()


async def test_later():
    assert not []


class Tests(unittest.TestCase):
    def test_equal(self):
        """Equal things are equal."""
        self.assertEqual(b"x" * 2, b"xx")

    def test_true(self):
        self.assertTrue(1)

    def test_in(self):
        x = 1; self.assertIn(x, [1])


def helper():
    yield 1
'''
FUNCTIONS = ["test_sum", "test_text", "test_multi", "test_name", "test_early", "test_nothing"]
METHODS = ["test_equal", "test_true", "test_in"]
NAMES = [f"{PYTEST}::{name}" for name in FUNCTIONS] + [f"{PYTEST}::Tests::{name}" for name in METHODS]


def verdicts(source: str) -> dict[str, bool]:
    """Of the tests in `source`, run here."""
    space: dict[str, Any] = {}
    exec(compile(source, PYTEST, "exec"), space)
    found = {}
    tests = {f"{PYTEST}::{name}": space[name] for name in FUNCTIONS}
    tests |= {f"{PYTEST}::Tests::{name}": getattr(space["Tests"](), name) for name in METHODS}
    for name, test in tests.items():
        try:
            test()
            found[name] = True
        except (AssertionError, KeyError):
            found[name] = False
    return found


@given(st.integers(), st.sets(st.sampled_from(NAMES), min_size=1), st.sets(st.sampled_from(NAMES)))
def test_exactly_the_turned_tests_fail(seed: int, to_fix: set[str], to_keep: set[str]) -> None:
    decoy = make_decoy({PYTEST: SOURCE}, sorted(to_fix), sorted(to_keep - to_fix), random.Random(seed))
    assert decoy is not None and decoy.fail <= to_fix | to_keep and decoy.fail & to_fix
    assert all(verdicts(SOURCE).values())
    assert {name for name, passes in verdicts(decoy.sources[PYTEST]).items() if not passes} == decoy.fail


def turned(name: str, seed: int = 0) -> str:
    decoy = make_decoy({PYTEST: SOURCE}, [f"{PYTEST}::{name}"], [], random.Random(seed))
    assert isinstance(decoy, Decoy)
    before, after = SOURCE.splitlines(), decoy.sources[PYTEST].splitlines()
    return "\n".join(line for line in after if line not in before)


def test_a_literal_becomes_another_one_where_there_is_one() -> None:
    changed = {turned("test_sum", seed).strip() for seed in range(20)}
    assert len(changed) > 3 and all(line.startswith("assert sum(values) == ") for line in changed)


def test_else_an_assertion_becomes_its_contrary() -> None:
    assert turned("test_name").strip() == 'assert not found in "abc"'
    assert turned("Tests::test_true").strip() == "self.assertFalse(1)"


def test_else_a_false_assertion_comes_first() -> None:
    assert "assert sum(values) ==" in turned("test_nothing")


def test_what_is_not_sure_to_be_reached_is_left() -> None:
    assert "assert 1 ==" not in turned("test_early")


INDEX = {
    "tests/app/test_a.py": dict.fromkeys(["test_x", "A.test_x", "Says something."]),
    "tests/other/test_b.py": dict.fromkeys(["test_x", "test_y"]),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tests/app/test_a.py::test_x[1-2]", ("tests/app/test_a.py", "test_x")),
        ("app/test_a.py::A::test_x", ("tests/app/test_a.py", "A.test_x")),
        ("test_x (app.test_a.A)", ("tests/app/test_a.py", "A.test_x")),
        ("test_x (app.test_a.Inheriting)", None),
        ("test_y", ("tests/other/test_b.py", "test_y")),
        ("test_x", None),
        ("other/test_b.py:test_x", ("tests/other/test_b.py", "test_x")),
        ("Says something.", ("tests/app/test_a.py", "Says something.")),
        ("tests/none.py::test_x", None),
    ],
)
def test_a_test_is_found_by_the_name_that_its_framework_gives_it(name: str, place: tuple[str, str] | None) -> None:
    assert places(name, INDEX) == ([place] if place else [])


def test_there_is_no_decoy_without_a_test_to_fix() -> None:
    assert make_decoy({PYTEST: SOURCE}, ["tests/gone.py::test_x"], NAMES) is None
    assert make_decoy({PYTEST: "not python ("}, NAMES, []) is None


def test_files_of_any_encoding_and_line_end_stay_as_they_are() -> None:
    source = "# é\r\ndef test_a():\r\n    assert 'é' == 'é'; x = 'é'\r\n"
    decoy = make_decoy({"test_a.py": source}, ["test_a.py::test_a"], [], random.Random(1))
    assert decoy is not None
    text = decoy.sources["test_a.py"]
    ast.parse(text)
    assert text.count("\r\n") == 3 and text.endswith("; x = 'é'\r\n") and text != source
