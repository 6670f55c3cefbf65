"""Tiny Python repositories with a one-line bug each, written for this project."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

MODULES = ("calc", "tools", "lib", "util", "core", "work", "helper", "ops")


@dataclass(frozen=True, slots=True)
class Bug:
    """`wrong` stands in `source` where `right` belongs. The first case fails before the fix, and is the one shown."""

    kind: str
    source: str
    wrong: str
    right: str
    cases: tuple[tuple[str, str], ...]
    """Expression and the repr of its value. Those past `visible` are not in the repository's own tests."""
    passing: int
    """How many of the cases pass before the fix."""
    visible: int = 3


@dataclass(frozen=True, slots=True)
class BugTask:
    name: str
    bug: Bug
    module: str
    """File name; the only file whose change counts."""

    @property
    def files(self) -> dict[str, bytes]:
        stem = self.module.removesuffix(".py")
        checks = "".join(f"    assert repr({case}) == {value!r}, {case!r}\n" for case, value in self.visible)
        tests = f"from {stem} import *\n\n\ndef test_{stem}():\n{checks}\n\ntest_{stem}()\nprint('passed')\n"
        return {self.module: self.module_source, f"test_{self.module}": tests.encode()}

    @property
    def module_source(self) -> bytes:
        return self.bug.source.encode()

    @property
    def visible(self) -> Sequence[tuple[str, str]]:
        return self.bug.cases[: self.bug.visible]

    @property
    def solution(self) -> str:
        return sed(self.bug.wrong, self.bug.right, self.module)


def sed(wrong: str, right: str, path: str) -> str:
    """The command that mends a line; the first place in each line, as `wrong` is chosen to be unambiguous."""
    pattern = re.sub(r"([][.*^$/\\])", r"\\\1", wrong)
    replacement = re.sub(r"([/&\\])", r"\\\1", right)
    return f"sed -i 's/{pattern}/{replacement}/' {path}"


def make_bugs(seed: int, count: int) -> list[BugTask]:
    """The first `count` tasks of a seed: every bug before any comes twice, file names at random."""
    draw = random.Random(f"bugfix {seed}")
    tasks: list[BugTask] = []
    while len(tasks) < count:
        for bug in draw.sample(BUGS, len(BUGS))[: count - len(tasks)]:
            tasks.append(BugTask(f"{bug.kind}-{len(tasks)}", bug, f"{draw.choice(MODULES)}.py"))
    return tasks


BUGS = (
    Bug(
        "add",
        "def add(a, b):\n    return a - b\n",
        "a - b",
        "a + b",
        (("add(2, 3)", "5"), ("add(4, 0)", "4"), ("add(-1, 1)", "0"), ("add(7, 8)", "15"), ("add(0.5, 1)", "1.5")),
        1,
    ),
    Bug(
        "area",
        "def area(width, height):\n    return width + height\n",
        "width + height",
        "width * height",
        (("area(2, 3)", "6"), ("area(5, 1)", "5"), ("area(0, 9)", "0"), ("area(7, 4)", "28"), ("area(2, 2)", "4")),
        1,
    ),
    Bug(
        "largest",
        "def largest(items):\n    return min(items)\n",
        "min",
        "max",
        (
            ("largest([1, 4, 2])", "4"),
            ("largest([3])", "3"),
            ("largest([-5, -2])", "-2"),
            ("largest('abc')", "'c'"),
            ("largest([0, 9, 9])", "9"),
        ),
        1,
    ),
    Bug(
        "is_even",
        "def is_even(n):\n    return n % 2 == 1\n",
        "== 1",
        "== 0",
        (("is_even(4)", "True"), ("is_even(7)", "False"), ("is_even(0)", "True"), ("is_even(-3)", "False")),
        0,
    ),
    Bug(
        "last",
        "def last(items):\n    return items[0]\n",
        "[0]",
        "[-1]",
        (("last([1, 2, 3])", "3"), ("last([7])", "7"), ("last('xyz')", "'z'"), ("last((4, 5))", "5")),
        1,
    ),
    Bug(
        "upper",
        "def shout(text):\n    return text.lower() + '!'\n",
        "lower",
        "upper",
        (("shout('hi')", "'HI!'"), ("shout('')", "'!'"), ("shout('123')", "'123!'"), ("shout('Ab c')", "'AB C!'")),
        2,
    ),
    Bug(
        "mean",
        "def mean(values):\n    total = sum(values)\n    return total / 2\n",
        "/ 2",
        "/ len(values)",
        (
            ("mean([1, 2, 3])", "2.0"),
            ("mean([4, 6])", "5.0"),
            ("mean([8])", "8.0"),
            ("mean([1, 1, 1, 5])", "2.0"),
            ("mean([0, 0, 3])", "1.0"),
        ),
        1,
    ),
    Bug(
        "adult",
        "def is_adult(age):\n    return age > 18\n",
        "> 18",
        ">= 18",
        (("is_adult(18)", "True"), ("is_adult(17)", "False"), ("is_adult(30)", "True"), ("is_adult(18.0)", "True")),
        2,
    ),
    Bug(
        "square",
        "def square(n):\n    return n * 2\n",
        "n * 2",
        "n * n",
        (("square(3)", "9"), ("square(2)", "4"), ("square(0)", "0"), ("square(-4)", "16"), ("square(10)", "100")),
        2,
    ),
    Bug(
        "join",
        "def join(first, last):\n    return last + first\n",
        "last + first",
        "first + last",
        (("join('a', 'b')", "'ab'"), ("join('x', 'x')", "'xx'"), ("join('', 'b')", "'b'"), ("join('1', '2')", "'12'")),
        2,
    ),
    Bug(
        "absolute",
        "def absolute(n):\n    if n > 0:\n        return -n\n    return n\n",
        "n > 0",
        "n < 0",
        (("absolute(-3)", "3"), ("absolute(5)", "5"), ("absolute(0)", "0"), ("absolute(-1)", "1")),
        1,
    ),
    Bug(
        "first_n",
        "def first_n(items, n):\n    return items[n:]\n",
        "[n:]",
        "[:n]",
        (
            ("first_n([1, 2, 3], 2)", "[1, 2]"),
            ("first_n('abcd', 2)", "'ab'"),
            ("first_n([], 1)", "[]"),
            ("first_n([5, 6], 0)", "[]"),
            ("first_n((1, 2, 3), 1)", "(1,)"),
        ),
        1,
    ),
    Bug(
        "factorial",
        "def factorial(n):\n    result = 0\n    for i in range(1, n + 1):\n        result *= i\n    return result\n",
        "result = 0",
        "result = 1",
        (("factorial(3)", "6"), ("factorial(1)", "1"), ("factorial(0)", "1"), ("factorial(5)", "120")),
        0,
    ),
    Bug(
        "count_up",
        "def count_up(n):\n    return list(range(n))\n",
        "range(n)",
        "range(1, n + 1)",
        (("count_up(3)", "[1, 2, 3]"), ("count_up(0)", "[]"), ("count_up(1)", "[1]"), ("count_up(2)", "[1, 2]")),
        1,
    ),
    Bug(
        "reverse",
        "def reverse(text):\n    return text[::1]\n",
        "::1",
        "::-1",
        (("reverse('abc')", "'cba'"), ("reverse('aa')", "'aa'"), ("reverse('')", "''"), ("reverse([1, 2])", "[2, 1]")),
        2,
    ),
    Bug(
        "either",
        "def either(a, b):\n    return a and b\n",
        "a and b",
        "a or b",
        (
            ("either(True, False)", "True"),
            ("either(True, True)", "True"),
            ("either(False, False)", "False"),
            ("either(False, True)", "True"),
        ),
        2,
    ),
)  # fmt: skip
