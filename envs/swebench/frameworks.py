"""Test frameworks: what a test command names, and canaries, whose verdicts are known before the tests run.

An agent's code runs in the process that judges it, and can make every test "pass", end that process early, or print
results of its own. So tests that must fail and tests that must pass run along with the real ones, under names and with
contents drawn for each grading, in a file beside the real ones. They look like tests that an agent has not seen.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from envs.swebench.parsers import Statuses


class Framework(StrEnum):
    PYTEST = "pytest"
    DJANGO = "django"
    SYMPY = "sympy"


def framework_of(test_cmd: Iterable[str]) -> Framework:
    words = list(test_cmd)
    if any(word.endswith("runtests.py") for word in words):
        return Framework.DJANGO
    if any("sympy.test" in word or word.endswith("bin/test") for word in words):
        return Framework.SYMPY
    return Framework.PYTEST


def named_tests(test_cmd: Iterable[str], exists: Callable[[str], bool]) -> list[str]:
    """Files and directories of tests that a command names, relative to the repository; Django's labels as paths."""
    words = list(test_cmd)[1:]
    django = framework_of(words) is Framework.DJANGO
    found = []
    for word in words:
        path = word.split("::")[0].rstrip("/")
        if not re.fullmatch(r"[\w][\w./+-]*", path) or path.isdigit() or path.endswith(("runtests.py", "bin/test")):
            continue
        label = "tests/" + path.replace(".", "/")
        candidates = [f"{label}.py", label] if django else [path]
        found += [candidate for candidate in candidates if exists(candidate)][:1]
    return found


def with_report(test_cmd: Iterable[str]) -> list[str]:
    """The command; pytest's also lists each test with its verdict, in place of what it reports otherwise."""
    words = list(test_cmd)
    pytest = any(PurePosixPath(word).name in ("pytest", "py.test") for word in words)
    reports = any(re.match(r"-r[A-Za-z]|-[qvsxl]+r", word) for word in words)
    return [*words, "-rA"] if pytest and not reports else words


@dataclass(frozen=True, slots=True)
class Canaries:
    path: str
    source: str
    arguments: tuple[str, ...]
    """To be added to the test command."""
    fail: frozenset[str]
    succeed: frozenset[str]

    def disagree(self, statuses: Statuses) -> list[str]:
        """Canaries without the verdict that they must have."""
        verdicts = {name: status.passes for name, status in statuses.items()}
        wrong = [name for name in self.fail if self._look_up(verdicts, name) is not False]
        return sorted(wrong + [name for name in self.succeed if self._look_up(verdicts, name) is not True])

    def owns(self, name: str) -> bool:
        """Whether a status is one of the canaries'."""
        return any(canary in name for canary in self.fail | self.succeed)

    @staticmethod
    def _look_up(verdicts: dict[str, bool], canary: str) -> bool | None:
        found = [passes for name, passes in verdicts.items() if re.search(rf"\b{canary}\b", name)]
        return all(found) if found else None


_WORDS = (
    "alias", "append", "basic", "cached", "chain", "combined", "copy", "default", "empty", "escape", "explicit",
    "falsy", "filter", "fallback", "inherit", "invalid", "iter", "keys", "large", "lazy", "merge", "missing",
    "multiple", "nested", "none", "order", "override", "partial", "prefix", "quoted", "repeat", "reverse",
    "simple", "single", "sorted", "strict", "subset", "suffix", "swap", "unicode", "union", "update", "zero",
)  # fmt: skip


def make_canaries(
    test_cmd: tuple[str, ...], exists: Callable[[str], bool], draw: random.Random | None = None
) -> Canaries:
    """Two tests that must fail (one by an assertion, one by an exception), two that must pass, in random order."""
    draw = draw or random.SystemRandom()
    framework = framework_of(test_cmd)
    named = named_tests(test_cmd, exists)
    first = named[0] if named else ("tests" if exists("tests") else ".")
    folder = PurePosixPath(first).parent if first.endswith(".py") else PurePosixPath(first)
    stem = f"test_{_name(draw)}"
    path = str(folder / f"{stem}.py")
    names = [f"test_{_name(draw)}" for _ in range(4)]
    bodies = [_sums(draw, right=False), _raises(draw), _sums(draw, right=True), _sorts(draw)]
    tests = list(zip(names, bodies, strict=True))
    draw.shuffle(tests)
    arguments: tuple[str, ...]
    if framework is Framework.DJANGO:
        methods = "".join(f"\n    def {name}(self):\n{_indented(body)}" for name, body in tests)
        source = f"from django.test import SimpleTestCase\n\n\nclass {stem.title().replace('_', '')}(SimpleTestCase):"
        source += methods
        arguments = (str(folder / stem).removeprefix("tests/").replace("/", "."),)
    else:
        source = "\n\n".join(f"def {name}():\n{body}" for name, body in tests)
        covered = not named or any(not word.endswith(".py") and path.startswith(f"{word}/") for word in named)
        arguments = () if covered else (path,)
    return Canaries(path, source, arguments, frozenset(names[:2]), frozenset(names[2:]))


def false_assertion(draw: random.Random) -> str:
    """Statements that fail."""
    return textwrap.dedent(_sums(draw, right=False))


def _name(draw: random.Random) -> str:
    return "_".join([*draw.sample(_WORDS, 3), str(draw.randrange(10, 100))])


def _numbers(draw: random.Random) -> list[int]:
    return draw.sample(range(2, 99), 4)


def _sums(draw: random.Random, *, right: bool) -> str:
    numbers = _numbers(draw)
    total = sum(numbers) + (0 if right else draw.randrange(1, 9))
    return f"    values = {numbers}\n    assert sum(values) == {total}\n"


def _sorts(draw: random.Random) -> str:
    numbers = _numbers(draw)
    return f"    values = {numbers}\n    assert sorted(values)[0] == {min(numbers)}\n"


def _raises(draw: random.Random) -> str:
    numbers = _numbers(draw)
    return f"    values = dict.fromkeys({numbers}, 1)\n    assert values[{max(numbers) + 1}] == 1\n"


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.splitlines())
