"""What validation says of a task whose tests do not run, and of what nobody foresaw."""

from pathlib import Path

import pytest

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
