"""What validation says of a task whose tests do not run, and of what nobody foresaw."""

from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from envs.swebench import validate as module
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.decoys import Decoy
from envs.swebench.faults import diff
from envs.swebench.grade import grade_changes
from envs.swebench.trial import Trial
from envs.swebench.validate import compare, validate
from tests.envs.swebench.conftest import FAILING, PASSING, TESTS, record


def test_the_end_of_the_log_is_told_if_no_test_reports(built: BuiltTask) -> None:
    failed = Trial({}, "4 of 4 canary tests were not judged", False, 1.0, "x\n/bin/python: No module named pytest\n\n")
    found = compare(built, [failed], [failed], [], 1.0)
    assert not found.valid and found.reason.startswith("tests_do_not_run: ")
    assert found.reason.endswith("the log ends with '/bin/python: No module named pytest'")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_cmd": ("python", "tools/run.py", "tests/test_sums.py", "x" * 300)}, "tests_do_not_run: "),
        ({"test_cmd": ("no-such-program",)}, "tests_do_not_run: "),
        ({"test_cmd": ("sleep", "60")}, "timeout: "),
        ({"test_cmd": ("yes",)}, "tests_do_not_run: with the gold patch, killed: output"),
        ({"source": "/etc/passwd"}, "build_failed: the repository /etc/passwd is no directory"),
        ({"python": "4.0"}, "python_unavailable: "),
    ],
)
async def test_a_recipe_that_does_not_work_has_one_clear_reason(
    builder: Builder, roomy: BubblewrapBackend, source: Path, changes: dict[str, object], reason: str
) -> None:
    whole = record(source).build
    assert whole is not None
    made = record(source, instance_id="odd", build=whole.model_copy(update=changes))
    found = await validate(made, builder, roomy, runs=1, test_s=3.0)
    assert not found.valid and found.reason.startswith(reason)


@pytest.mark.parametrize("name", ["", " ", "é" * 3000, "new\nline", "\ud800", "tests/test_sums.py::test_double[a [b"])
async def test_names_of_tests_that_nobody_has_heard_of(
    builder: Builder, roomy: BubblewrapBackend, source: Path, name: str
) -> None:
    changes = {"kind": "swebench", "fail_to_pass": (FAILING, name), "pass_to_pass": (PASSING, name)}
    found = await validate(record(source, instance_id="names", **changes), builder, roomy, runs=1, test_s=30.0)
    assert found.valid and found.record.fail_to_pass == (FAILING,) and found.official_match is False
    assert "1 of 2 official FAIL_TO_PASS do not pass after" in found.reason


async def test_a_surprise_is_told_and_does_not_end_the_others(
    builder: Builder, roomy: BubblewrapBackend, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(_: object) -> list[str]:
        raise RuntimeError("what nobody foresaw")

    monkeypatch.setattr(module, "find_leaks", surprise)
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0)
    assert not found.valid and found.reason == "unexpected: RuntimeError: what nobody foresaw"


CALM = """

def calm(test):
    def test_calm():
        try:
            test()
        except AssertionError:
            assert double(4) == 8
    return test_calm


@calm
def test_double():
    assert double(4) == 8
"""


async def test_a_test_that_passes_although_it_was_turned_round_is_left_as_it_is_from_then_on(
    builder: Builder, roomy: BubblewrapBackend, source: Path
) -> None:
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0)
    assert found.valid and found.reason == "" and found.record.unturned == ()

    calm = record(source, instance_id="calm", test_patch=diff("tests/test_sums.py", TESTS, TESTS + CALM))
    found = await validate(calm, builder, roomy, runs=1, test_s=30.0)
    assert found.valid and FAILING in found.record.unturned
    assert found.reason.startswith("unproven: 1 of 2 tests pass although they were turned round (" + FAILING)
    built = builder.build(found.record)
    gold = builder.changes(built, built.record.patch)
    score = await grade_changes(built, roomy, gold, reward="resolved", test_s=30.0, attempts=1, timeout_s=60.0)
    assert score.reward == 1.0 and score.detail["unproven"] == 1.0


async def test_tests_that_cannot_be_turned_round_are_told(
    builder: Builder, roomy: BubblewrapBackend, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "draw_decoy", lambda *_, **__: None)
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0)
    assert found.valid and found.reason == "unproven: no FAIL_TO_PASS test can be turned round"


async def test_a_gold_patch_that_grading_would_not_believe_makes_a_task_invalid(
    builder: Builder, roomy: BubblewrapBackend, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because the tests end the process when they are turned round."""
    ends = Decoy({"tests/test_sums.py": "import os\nos._exit(1)\n"}, frozenset({FAILING}))
    monkeypatch.setattr(module, "draw_decoy", lambda *_, **__: ends)
    found = await validate(record(source), builder, roomy, runs=1, test_s=30.0)
    assert not found.valid and found.reason.startswith("not_graded: with the gold patch and tests turned round, 4 of 4")
