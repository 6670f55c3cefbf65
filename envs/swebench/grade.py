"""From what a run of the tests said to a reward, by SWE-bench's rule, and to nothing at all if the machine failed.

A log that earns a reward is not believed at once: the tests run a second time, some of them turned round (`decoys`).
Before that, tests that did not pass but count (expected failures, skipped ones) are compared with the gold patch's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Literal

from envs.errors import InfrastructureError
from envs.protocol import Score
from envs.sandbox.protocol import Entry, SandboxBackend
from envs.swebench.builder import BuiltTask
from envs.swebench.decoys import SHARE, Decoy, make_decoy
from envs.swebench.errors import TaskError
from envs.swebench.frameworks import named_tests
from envs.swebench.parsers import Status, Statuses, normalise
from envs.swebench.record import TaskRecord
from envs.swebench.tools import Tools
from envs.swebench.trees import apply_patch
from envs.swebench.trial import Trial, admit, exists, run_tests

Reward = Literal["resolved", "fraction"]
TESTS_SHARE = 0.9
"""Part of the deadline that the tests may take; the rest is for making and removing the sandbox."""
PATCH_S = 60.0


def grade(record: TaskRecord, trial: Trial, reward: Reward) -> Score:
    """`resolved`: all FAIL_TO_PASS tests pass, all PASS_TO_PASS tests pass or are skipped. One that did not run fails.

    `fraction`: the share of FAIL_TO_PASS that passes times the share of PASS_TO_PASS that is kept.
    """
    fixed = sum(status.passes for status in _named(record.fail_to_pass, trial.statuses))
    kept = sum(status.kept for status in _named(record.pass_to_pass, trial.statuses))
    to_fix, to_keep = len(record.fail_to_pass), len(record.pass_to_pass)
    resolved = not trial.doubt and fixed == to_fix and kept == to_keep
    share = 0.0 if trial.doubt else fixed / to_fix * (kept / to_keep if to_keep else 1.0)
    detail = {
        "resolved": float(resolved),
        "fail_to_pass": float(fixed),
        "pass_to_pass": float(kept),
        "doubted": float(bool(trial.doubt)),
        "timed_out": float(trial.timed_out),
        "dropped": float(len(trial.dropped)),
        "tests_s": trial.seconds,
    }
    return Score(float(resolved) if reward == "resolved" else share, detail)


def _named(names: Iterable[str], statuses: Statuses) -> list[Status]:
    return [status for name in names if (status := statuses.get(normalise(name))) is not None]


async def grade_changes(
    built: BuiltTask,
    backend: SandboxBackend,
    changes: Mapping[str, Entry],
    *,
    reward: Reward,
    test_s: float,
    attempts: int,
    timeout_s: float,
) -> Score:
    """Run the tests on what an agent left. A fault of the machine is tried again within `timeout_s`, then raised as
    InfrastructureError: it is no reward. Without a change that counts nothing is run: the tests are known to fail."""
    counted, dropped = admit(built, changes)
    if not counted:
        return Score(0.0, {"resolved": 0.0, "unchanged": 1.0, "dropped": float(len(dropped))})
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s

    async def run(files: Mapping[str, Entry], tests: Mapping[str, str] | None = None) -> Trial:
        left = TESTS_SHARE * (end - loop.time())
        trial = await run_tests(built, backend, files, min(test_s, left), tests)
        if trial.timed_out and left < test_s:
            raise InfrastructureError(
                f"{built.record.instance_id}: scoring's deadline of {timeout_s:g} s came before the tests' own of "
                f"{test_s:g} s; raise deadlines.score_s"
            )
        return trial

    for attempt in range(1, attempts + 1):
        try:
            trial = await run(changes)
            score = grade(built.record, trial, reward)
            if score.reward and excused(built.record, trial.statuses):
                gold = await run(await asyncio.to_thread(gold_changes, built))
                trial = replace(trial, statuses=without_own_excuses(built.record, trial.statuses, gold.statuses))
                score = grade(built.record, trial, reward)
            if score.reward == 0:
                return score
            decoy = await asyncio.to_thread(draw_decoy, built, built.record, trial.statuses)
            if decoy is None:
                return replace(score, detail={**score.detail, "unproven": 1.0})
            again = await run(changes, decoy.sources)
            if again.timed_out:  # tests that fail may hang: no proof of anything
                raise InfrastructureError(f"{built.record.instance_id}: the tests did not end when some of them failed")
            return grade(built.record, replace(trial, doubt=doubt_of(decoy, again)), reward)
        except InfrastructureError:
            if attempt == attempts or end - loop.time() < timeout_s / 2:
                raise
    raise AssertionError("the last attempt returns or raises")


def excused(record: TaskRecord, statuses: Statuses) -> list[str]:
    """Tests that count as passed or kept although they did not pass: expected failures, and skipped ones."""
    names = map(normalise, (*record.fail_to_pass, *record.pass_to_pass))
    return [name for name in names if statuses.get(name) in (Status.XFAIL, Status.SKIPPED)]


def without_own_excuses(record: TaskRecord, statuses: Statuses, gold: Statuses) -> Statuses:
    """Code under test can skip the test that judges it, or expect its failure. It counts if the gold patch's test does
    so, too; else it failed."""
    own = [name for name in excused(record, statuses) if gold.get(name) is not statuses[name]]
    return {**statuses, **dict.fromkeys(own, Status.FAILED)}


def gold_changes(built: BuiltTask) -> dict[str, Entry]:
    """Blocks. Raises InfrastructureError if the gold patch does not apply: such a task cannot be judged."""
    try:
        return apply_patch(built.image.tree, built.record.patch, Tools.within(PATCH_S))
    except TaskError as error:
        raise InfrastructureError(f"{built.record.instance_id}: {error}") from error


def draw_decoy(built: BuiltTask, record: TaskRecord, statuses: Statuses, share: float = SHARE) -> Decoy | None:
    """Of the tests that passed, `share` turned round; a failure that was expected proves nothing. Blocks."""
    left = {normalise(name) for name in record.unturned}
    to_fix, to_keep = (
        [name for name in map(normalise, names) if statuses.get(name) is Status.PASSED and name not in left]
        for names in (record.fail_to_pass, record.pass_to_pass)
    )
    sources = read_tests(built)
    mentioned = " ".join([*to_fix, *to_keep])
    near = {path: text for path, text in sources.items() if PurePosixPath(path).stem in mentioned}
    return make_decoy(near or sources, to_fix, to_keep, share=share)


def doubt_of(decoy: Decoy, trial: Trial) -> str:
    forged = still_passing(decoy, trial)
    if forged:
        return f"{len(forged)} of {len(decoy.fail)} tests pass although they were turned round"
    return trial.doubt


def still_passing(decoy: Decoy, trial: Trial) -> list[str]:
    return sorted(name for name in decoy.fail if (status := trial.statuses.get(name)) is not None and status.passes)


def read_tests(built: BuiltTask) -> dict[str, str]:
    """The files that the tests come from, after the test patch."""
    tree = built.image.tree
    paths = set(built.tests)
    for named in named_tests(built.recipe.test_cmd, lambda path: exists(built, path)):
        inside = (tree / named).rglob("*.py") if (tree / named).is_dir() else [tree / named]
        paths |= {str(path.relative_to(tree)) for path in inside}
    found = {}
    for path in sorted(paths):
        entry = built.tests.get(path)
        if not path.endswith(".py"):
            continue
        try:
            data = entry.data if entry is not None else (tree / path).read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if (entry is None or entry.kind == "file") and "\r" not in text.replace("\r\n", ""):
            found[path] = text
    return found
