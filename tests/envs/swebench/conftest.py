"""A repository of two files, its faults and its tests: built without the network, from a directory, with unittest."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from envs.swebench.faults import diff
from envs.swebench.limits import LIMITS
from envs.swebench.record import Recipe, TaskRecord

WRONG = "def double(n):\n    return n + 3\n\n\ndef triple(n):\n    return 3 * n\n"
RIGHT = WRONG.replace("n + 3", "2 * n")
TESTS = """from sums import double, triple


def test_triple():
    assert triple(2) == 6
"""
MORE = TESTS + "\n\ndef test_double():\n    assert double(4) == 8\n"
RUNNER = '''"""A runner with pytest's summary and exit codes, so that tests need no package from anywhere."""
import importlib.util, pathlib, sys, unittest
failed, lines = 0, []
for argument in sys.argv[1:]:
    files = [pathlib.Path(argument)] if argument.endswith(".py") else sorted(pathlib.Path(argument).glob("test_*.py"))
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in list(vars(module).items()):
            if name.startswith("test_"):
                try:
                    test()
                    lines.append(f"PASSED {file}::{name}")
                except unittest.SkipTest:
                    lines.append(f"SKIPPED {file}::{name}")
                except Exception as error:
                    if type(error).__name__ == "XFail":  # as sympy's runner does
                        lines.append(f"XFAIL {file}::{name}")
                        continue
                    failed += 1
                    lines.append(f"FAILED {file}::{name} - {error!r}")
print("=========== short test summary info ===========")
print("\\n".join(lines))
sys.exit(1 if failed else 0)
'''
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
FAILING = "tests/test_sums.py::test_double"
PASSING = "tests/test_sums.py::test_triple"


def record(source: Path, **changes: object) -> TaskRecord:
    fields = {
        "kind": "own",
        "instance_id": "own__sums-1",
        "repo": "own/sums",
        "problem_statement": "double(4) is 7",
        "patch": diff("src/sums.py", WRONG, RIGHT),
        "test_patch": diff("tests/test_sums.py", TESTS, MORE),
        "fail_to_pass": (FAILING,),
        "pass_to_pass": (PASSING,),
        "build": Recipe(
            source=str(source),
            python=PYTHON,
            pythonpath="src",
            test_cmd=("python", "tools/run.py", "tests/test_sums.py"),
        ),
    }
    return TaskRecord.model_validate({**fields, **changes})


@pytest.fixture
async def roomy(directory: Path) -> AsyncIterator[BubblewrapBackend]:
    made = BubblewrapBackend(LIMITS, directory=directory)
    yield made
    await made.close()


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
