"""What validation says of a task whose tests do not run, and of what nobody foresaw."""

from pathlib import Path

import pytest

from envs.protocol import Score
from envs.sandbox.backend import BubblewrapBackend
from envs.swebench import validate as module
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.trial import Trial
from envs.swebench.validate import compare, validate
from tests.envs.swebench.conftest import record


def test_the_end_of_the_log_is_told_if_no_test_reports(built: BuiltTask) -> None:
    failed = Trial({}, "4 of 4 canary tests were not judged", False, 1.0, "x\n/bin/python: No module named pytest\n\n")
    found = compare(built, [failed], [failed], [], 1.0)
    assert not found.valid and found.reason.startswith("tests_do_not_run: ")
    assert found.reason.endswith("the log ends with '/bin/python: No module named pytest'")


async def test_a_surprise_is_told_and_does_not_end_the_others(
    builder: Builder, roomy: BubblewrapBackend, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(_: object) -> list[str]:
        raise RuntimeError("what nobody foresaw")

    monkeypatch.setattr(module, "find_leaks", surprise)
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0)
    assert not found.valid and found.reason == "unexpected: RuntimeError: what nobody foresaw"


async def test_a_gold_patch_that_grading_does_not_believe_makes_a_task_invalid(
    builder: Builder, roomy: BubblewrapBackend, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0, graded=True)
    assert found.valid and found.reason == ""

    async def doubted(*_: object, **__: object) -> Score:
        return Score(0.0, {"doubted": 1.0})

    monkeypatch.setattr(module, "grade_changes", doubted)
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0, graded=True)
    assert not found.valid and found.reason == "not_graded: the gold patch earns nothing (doubted 1)"
