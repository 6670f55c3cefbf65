"""The whole way from a workspace to a reward, on a repository of two files."""

from pathlib import Path
from typing import Any

import pytest

from envs.errors import InfrastructureError
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.protocol import Entry
from envs.swebench import grade as grade_module
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.faults import diff
from envs.swebench.grade import Reward, grade, grade_changes, without_own_excuses
from envs.swebench.parsers import Status
from envs.swebench.trial import Trial, admit, run_tests
from envs.swebench.validate import validate
from tests.envs.swebench.conftest import FAILING, MORE, PASSING, RIGHT, TESTS, WRONG, record

GOLD = {"src/sums.py": Entry("file", RIGHT.encode())}


async def score(
    built: BuiltTask, backend: BubblewrapBackend, changes: dict[str, Entry], reward: Reward = "resolved"
) -> float:
    graded = await grade_changes(
        built,
        backend,
        changes,
        reward=reward,
        test_s=30.0,
        attempts=1,
        timeout_s=60.0,
    )
    return graded.reward


async def test_the_gold_patch_resolves_and_nothing_does_not(
    built: BuiltTask, builder: Builder, roomy: BubblewrapBackend
) -> None:
    gold = builder.changes(built, built.record.patch)
    assert gold == GOLD
    assert await score(built, roomy, gold) == 1.0
    assert await score(built, roomy, {}) == 0.0


async def test_an_agents_work_is_read_from_its_sandbox(built: BuiltTask, roomy: BubblewrapBackend) -> None:
    sandbox = await roomy.create_from(built.image)
    seen = await sandbox.exec(
        "git status --short; git log --oneline | wc -l; python -c 'import sums; print(sums.double(4))'", timeout_s=30
    )
    assert seen.output == "1\n7\n"
    fix = "sed -i 's/n + 3/2 * n/' src/sums.py; rm tests/test_sums.py; ln -s /etc/passwd link"
    await sandbox.exec(f"{fix}; echo x > new.txt; chmod +x new.txt", timeout_s=30)
    changes = await sandbox.diff()
    assert changes == {
        **GOLD,
        "tests/test_sums.py": Entry("missing"),
        "link": Entry("other"),
        "new.txt": Entry("file", b"x\n", True),
    }
    counted, dropped = admit(built, changes)
    assert set(counted) == {"src/sums.py", "new.txt"} and dropped == ["link", "tests/test_sums.py"]
    assert await score(built, roomy, changes) == 1.0


HANGS = {"src/sums.py": Entry("file", b"import time\ntime.sleep(600)\n")}
SAME = (
    b"class Same(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n"
    b"double = triple = lambda n: Same(n)\n"
)


async def test_a_log_that_earns_a_reward_is_not_believed_at_once(built: BuiltTask, roomy: BubblewrapBackend) -> None:
    """More cheats: tests/envs/attacks."""
    changes = {"src/sums.py": Entry("file", SAME)}
    trial = await run_tests(built, roomy, changes, 30.0)
    assert grade(built.record, trial, "resolved").reward == 1.0
    graded = await grade_changes(built, roomy, changes, reward="resolved", test_s=30.0, attempts=1, timeout_s=60.0)
    assert graded.reward == 0.0 and graded.detail["doubted"] == 1.0


async def test_without_a_test_that_can_be_turned_round_the_score_says_so(
    built: BuiltTask, roomy: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade_module, "read_tests", lambda _: {})
    graded = await grade_changes(built, roomy, GOLD, reward="resolved", test_s=30.0, attempts=1, timeout_s=60.0)
    assert graded.reward == 1.0 and graded.detail["unproven"] == 1.0


def test_a_verdict_that_excuses_counts_if_the_gold_patch_has_it_too(tmp_path: Path) -> None:
    made = record(tmp_path, fail_to_pass=("a", "b"), pass_to_pass=("c", "d"))
    own = {"a": Status.XFAIL, "b": Status.PASSED, "c": Status.SKIPPED, "d": Status.SKIPPED}
    gold = {"a": Status.PASSED, "b": Status.PASSED, "c": Status.SKIPPED, "d": Status.XFAIL}
    assert without_own_excuses(made, own, gold) == {**own, "a": Status.FAILED, "d": Status.FAILED}
    assert without_own_excuses(made, own, own) == own
    assert without_own_excuses(made, own, {}) == {"b": Status.PASSED, **dict.fromkeys("acd", Status.FAILED)}


SKIPS = MORE + "\n\ndef test_elsewhere():\n    import unittest\n    raise unittest.SkipTest('no database')\n"
SKIPPED = "tests/test_sums.py::test_elsewhere"


async def test_a_test_that_is_skipped_here_whatever_the_code_does_is_kept(
    builder: Builder, roomy: BubblewrapBackend, source: Path
) -> None:
    changes = {"test_patch": diff("tests/test_sums.py", TESTS, SKIPS), "pass_to_pass": (PASSING, SKIPPED)}
    skipping = record(source, instance_id="skipping", kind="swebench", **changes)
    built = builder.build(skipping)
    assert await score(built, roomy, GOLD) == 1.0
    hides = RIGHT.replace("return 3 * n", "import unittest\n    raise unittest.SkipTest('x')")
    assert await score(built, roomy, {"src/sums.py": Entry("file", hides.encode())}, "fraction") == 0.5
    found = await validate(skipping, builder, roomy, runs=1, test_s=30.0)
    assert found.valid and found.official_match and found.record.pass_to_pass == (PASSING,)


async def test_a_test_framework_that_lets_all_pass_is_noticed(built: BuiltTask, roomy: BubblewrapBackend) -> None:
    """As a conftest.py that rewrites outcomes does: here the code under test takes the exit and the printing over."""
    cheat = (
        "import builtins, sys\nreal = print\n"
        "def fake(*texts): real(*(str(t).replace('FAILED', 'PASSED') for t in texts))\n"
        "builtins.print = fake\nreal_exit = sys.exit\nsys.exit = lambda code=0: real_exit(0)\n" + WRONG
    )
    trial = await run_tests(built, roomy, {"src/sums.py": Entry("file", cheat.encode())}, 30.0)
    assert trial.statuses[FAILING].passes and "2 of 4 canary tests" in trial.doubt
    assert grade(built.record, trial, "fraction").reward == 0.0


def trial(doubt: str = "", **statuses: Status) -> Trial:
    return Trial({name.replace("__", "::"): status for name, status in statuses.items()}, doubt, False, 1.0, "")


@pytest.mark.parametrize(
    ("statuses", "resolved", "fraction"),
    [
        ({"a": Status.PASSED, "b": Status.PASSED, "c": Status.PASSED}, 1.0, 1.0),
        ({"a": Status.PASSED, "b": Status.XFAIL, "c": Status.PASSED}, 1.0, 1.0),
        ({"a": Status.PASSED, "b": Status.FAILED, "c": Status.PASSED}, 0.0, 0.5),
        ({"a": Status.PASSED, "b": Status.PASSED, "c": Status.FAILED}, 0.0, 0.0),
        ({"a": Status.PASSED, "b": Status.PASSED}, 0.0, 0.0),
        ({"a": Status.SKIPPED, "b": Status.PASSED, "c": Status.PASSED}, 0.0, 0.5),
        ({"a": Status.PASSED, "b": Status.PASSED, "c": Status.SKIPPED}, 1.0, 1.0),
        ({}, 0.0, 0.0),
    ],
)
def test_rewards(tmp_path: Path, statuses: dict[str, Status], resolved: float, fraction: float) -> None:
    made = record(tmp_path, fail_to_pass=("a", "b"), pass_to_pass=("c",))
    assert grade(made, trial(**statuses), "resolved").reward == resolved
    assert grade(made, trial(**statuses), "fraction").reward == fraction
    assert grade(made, trial("a doubt", **statuses), "fraction").reward == 0.0


async def test_a_fault_of_the_machine_is_tried_again_and_then_raised(
    built: BuiltTask, roomy: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = roomy.create_from, [InfrastructureError("once")]

    async def unreliable(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real(*arguments)

    monkeypatch.setattr(roomy, "create_from", unreliable)
    limits: dict[str, Any] = {"reward": "resolved", "test_s": 30.0, "attempts": 2, "timeout_s": 60.0}
    assert (await grade_changes(built, roomy, GOLD, **limits)).reward == 1.0
    failures += [InfrastructureError("again"), InfrastructureError("and again")]
    with pytest.raises(InfrastructureError, match="again"):
        await grade_changes(built, roomy, GOLD, **limits)


async def test_a_deadline_of_the_caller_that_is_too_short_is_no_reward(
    built: BuiltTask, roomy: BubblewrapBackend
) -> None:
    with pytest.raises(InfrastructureError, match=r"deadlines\.score_s"):
        await grade_changes(built, roomy, HANGS, reward="resolved", test_s=300.0, attempts=1, timeout_s=2.0)


async def test_validation_derives_the_lists(builder: Builder, roomy: BubblewrapBackend, source: Path) -> None:
    found = await validate(record(source, fail_to_pass=(), pass_to_pass=()), builder, roomy, runs=2, test_s=30.0)
    assert found.valid and found.fails_before and found.passes_after and found.official_match is None
    assert found.record.fail_to_pass == (FAILING,) and found.record.pass_to_pass == (PASSING,)
    assert set(found.as_dict()) == {
        "instance_id", "fails_before", "passes_after", "official_match", "seconds", "reason",
    }  # fmt: skip


async def test_validation_compares_with_the_benchmarks_lists(
    builder: Builder, roomy: BubblewrapBackend, source: Path
) -> None:
    official = record(source, kind="swebench", fail_to_pass=(FAILING, PASSING), pass_to_pass=("gone",))
    found = await validate(official, builder, roomy, runs=1, test_s=30.0)
    assert found.valid and found.official_match is False and not found.fails_before and found.passes_after
    assert found.reason.startswith("partial: 1 of 2 official FAIL_TO_PASS pass before") and "gone" in found.reason
    assert found.record.official_fail_to_pass == (FAILING, PASSING) and found.record.fail_to_pass == (FAILING,)


FLAKY = "import pathlib\n\ndef test_flaky():\n    import os\n    assert os.urandom(1)[0] % 2\n"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch": diff("src/sums.py", WRONG, WRONG + "\n\nx = 1\n")}, "nothing_flips"),
        ({"patch": diff("src/sums.py", "other\n", "text\n")}, "patch_does_not_apply"),
        ({"test_patch": diff("tests/test_sums.py", "other\n", "text\n")}, "patch_does_not_apply"),
        ({"build": None}, "no_recipe"),
        ({"build": {"image": "some/image"}}, "no_recipe"),
        ({"build": {"source": ".", "python": "2.0", "test_cmd": ["x"]}}, "python_unavailable"),
        ({"build": {"source": "/nonexistent", "test_cmd": ["x"]}}, "build_failed"),
    ],
)
async def test_validation_says_why_a_task_does_not_work(
    builder: Builder, roomy: BubblewrapBackend, source: Path, changes: dict[str, object], reason: str
) -> None:
    found = await validate(record(source, instance_id="bad", **changes), builder, roomy, runs=1, test_s=30.0)
    assert not found.valid and found.reason.startswith(f"{reason}: ")


async def test_a_copy_of_the_fix_is_found(
    builder: Builder, roomy: BubblewrapBackend, source: Path, tmp_path: Path
) -> None:
    import shutil

    leaky = tmp_path / "leaky"
    shutil.copytree(source, leaky)
    (leaky / "build" / "src").mkdir(parents=True)
    (leaky / "build" / "src" / "sums.py").write_text(RIGHT)
    (leaky / "tests" / "test_sums.py").write_text(MORE)
    made = record(leaky, instance_id="leaky", test_patch="")
    found = await validate(made, builder, roomy, runs=1, test_s=30.0)
    assert not found.valid and found.reason.startswith("leak: ") and "build/src/sums.py" in found.reason


def test_what_would_stand_in_for_installed_modules_is_known(built: BuiltTask) -> None:
    guard = built.guard
    assert guard.drops("src/json.py", new=True) and guard.drops("random.py", new=True)
    assert guard.drops("tools/run.py", new=False), "the test command names it"
    assert not guard.drops("src/sums.py", new=False) and not guard.drops("src/other.py", new=True)
