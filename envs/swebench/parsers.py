"""From a test run's log to the status of each test, as SWE-bench's own parsers read it, for each of its Python repos.

Where two lines disagree about a test the worse one holds: a log can be forged by the code under test, and lines that
were printed before the real ones, or after them, must not win. Names are normalised by `normalise`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum


class Status(StrEnum):
    PASSED = "PASSED"
    XFAIL = "XFAIL"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    ERROR = "ERROR"

    @property
    def passes(self) -> bool:
        """An expected failure counts as passed, a skipped test does not; as in SWE-bench."""
        return self in (Status.PASSED, Status.XFAIL)

    @property
    def kept(self) -> bool:
        """Of a PASS_TO_PASS test: one that is skipped has not been broken; as in SWE-bench since its version 5."""
        return self.passes or self is Status.SKIPPED


Statuses = dict[str, Status]
_BADNESS = {status: rank for rank, status in enumerate(Status)}
_STATUS = "|".join(Status)
_STATUS_FIRST = re.compile(rf"^({_STATUS})\s+(\S+)")
_TEST_FIRST = re.compile(rf"^(\S+)\s+({_STATUS})(?:\s|$)")
_COUNT = re.compile(r"\[\d+\]")
_COLOUR = re.compile(r"\x1b?\[\d+(?:;\d+)*m")
_CONTROL = dict.fromkeys(range(1, 32))


class _Found:
    def __init__(self) -> None:
        self.statuses: Statuses = {}

    def add(self, name: str, status: Status) -> None:
        name = normalise(name)
        before = self.statuses.get(name)
        if before is None or _BADNESS[status] > _BADNESS[before]:
            self.statuses[name] = status


def pytest(log: str) -> Statuses:
    """Lines of the short summary (`PASSED path::test`), of `-v` (`path::test PASSED`), with or without colours."""
    found = _Found()
    for line in log.splitlines():
        line = _COLOUR.sub("", line).translate(_CONTROL)
        if match := _STATUS_FIRST.match(line):
            status, name = Status(match[1]), match[2]
            if not (status is Status.SKIPPED and _COUNT.match(name)):  # "SKIPPED [2] path:line: why" names no test
                found.add(name, status)
        elif match := _TEST_FIRST.match(line):
            found.add(match[1], Status(match[2]))
    return found.statuses


def pytest_options(log: str) -> Statuses:
    """As `pytest`; of a parameter that is an absolute path only the last part stays."""
    found = _Found()
    for name, status in pytest(log).items():
        found.add(_short_option(name), status)
    return found.statuses


def matplotlib(log: str) -> Statuses:
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def django(log: str) -> Statuses:
    """unittest's verbose output; a test's name is its first line, or its docstring's where that is printed last.

    Output of the code under test can stand between a name and its verdict; then the verdict is on a line of its own.
    """
    found = _Found()
    waiting: str | None = None
    for line in (line.strip() for line in log.splitlines()):
        name, dots, rest = line.partition(" ... ")
        if not dots and (match := re.match(r"(.*) \.\.\.  (OK)$", line)):
            name, dots, rest = match[1], " ... ", match[2]
        verdict = _verdict(rest) if dots else None
        if dots:
            name = name.rpartition("...")[2] if name.startswith("Applying ") else name
            waiting = name if verdict is None else None
            if verdict is not None:
                found.add(name, verdict)
            elif late := _verdict(line.rpartition(" ... ")[2]):
                # A test whose subtests failed has no verdict, and the next test's line goes on behind it. SWE-bench
                # takes both for one name, so the next test counts as not run; its lists were made that way.
                found.add(line.rpartition(" ... ")[0], late)
        elif line.startswith(("FAIL: ", "ERROR: ")):
            name, status = line.partition(": ")[2], Status.FAILED if line.startswith("FAIL") else Status.ERROR
            found.add(name, status)
            if subtest := re.match(r"(\w+ \([\w.]+\)) [\[(]", name):
                found.add(subtest[1], status)
        elif waiting is not None and re.match(r"ok\b", line):
            found.add(waiting, Status.PASSED)
            waiting = None
        elif waiting is not None and (end := re.search(r"(?:^|\))(ok|FAIL|ERROR)$", line)):
            found.add(waiting, _VERDICTS[end[1]])
            waiting = None
        if "--version is equivalent to version" in line:
            found.add("--version is equivalent to version", Status.PASSED)
    return found.statuses


_VERDICTS = {
    "ok": Status.PASSED,
    "OK": Status.PASSED,
    "FAIL": Status.FAILED,
    "ERROR": Status.ERROR,
    "expected failure": Status.XFAIL,
    "unexpected success": Status.FAILED,
}


def _verdict(rest: str) -> Status | None:
    rest = rest.strip()
    return Status.SKIPPED if rest.startswith("skipped") else _VERDICTS.get(rest)


_SYMPY_FAILURE = re.compile(r"^_+ (\S.*)\.py:(.*?) _+$", re.MULTILINE)
_SYMPY_LINE = re.compile(r"^(test_\w+)\b.*? (ok|F|E|f|s|w|X|K|T|\[OK\]|\[FAIL\])(?: +\[(?:OK|FAIL)\])?$")
_SYMPY = {"ok": Status.PASSED, "F": Status.FAILED, "E": Status.ERROR, "f": Status.FAILED, "s": Status.FAILED}
"""SWE-bench reads no verdict in an expected failure or a skipped test, so neither passes, nor is kept."""


def sympy(log: str) -> Statuses:
    """sympy's own runner (`bin/test`, `sympy.test`): `test_name ok`, F, E; failures again with their file."""
    found = _Found()
    for match in _SYMPY_FAILURE.finditer(log):
        found.add(f"{match[1]}.py:{match[2]}", Status.FAILED)
    for line in log.splitlines():
        match_ = _SYMPY_LINE.match(line.strip())
        if match_ and (status := _SYMPY.get(match_[2])):
            found.add(match_[1], status)
    return found.statuses


Parser = Callable[[str], Statuses]
PARSERS: Mapping[str, Parser] = {
    "django/django": django,
    "matplotlib/matplotlib": matplotlib,
    "psf/requests": pytest_options,
    "pydicom/pydicom": pytest_options,
    "pylint-dev/pylint": pytest_options,
    "sympy/sympy": sympy,
}
"""All other repositories, SWE-bench's and anybody's, use pytest."""


def parser_for(repo: str, test_cmd: tuple[str, ...] = ()) -> Parser:
    """By repository; for those that are not SWE-bench's, by the command that runs the tests."""
    if repo in PARSERS:
        return PARSERS[repo]
    words = " ".join(test_cmd)
    if "pytest" not in words and ("unittest" in words or "runtests.py" in words or "manage.py" in words):
        return django
    return pytest


_UNITTEST = re.compile(r"^(\w+) \(((?:\w+\.)*\w+)\)")


def normalise(name: str) -> str:
    """One name for a test, whichever Python ran it: 3.11's unittest repeats the method, `test_a (mod.Class.test_a)`.

    Pytest's names end where a parameter has a space, as in SWE-bench's lists; some releases have whole ones.
    """
    name = name.strip()
    first = name.split(maxsplit=1)[0] if name else ""
    if "::" in first:
        return first
    if (match := _UNITTEST.match(name)) and match[2].endswith(f".{match[1]}"):
        return f"{match[1]} ({match[2].removesuffix(f'.{match[1]}')}){name[match.end() :]}"
    return name


def _short_option(name: str) -> str:
    match = re.search(r"(.*?)\[(.*)\]", name)
    if match is None:
        return name
    option = match[2]
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rsplit("/", 1)[-1]
    return f"{match[1]}[{option}]"
