"""From what a run of the tests said to a reward, by SWE-bench's rule, and to nothing at all if the machine failed.

A log that earns a reward is not believed at once: the tests run a second time, some of them turned round (`decoys`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Literal

from envs.errors import InfrastructureError
from envs.protocol import Score
from envs.sandbox.protocol import Entry, SandboxBackend
from envs.swebench.builder import BuiltTask
from envs.swebench.decoys import Decoy, make_decoy
from envs.swebench.frameworks import named_tests
from envs.swebench.parsers import Status, Statuses, normalise
from envs.swebench.record import TaskRecord
from envs.swebench.trial import Trial, admit, exists, run_tests

Reward = Literal["resolved", "fraction"]
EXPECTED = re.compile(r"xfail|expected_?failure", re.IGNORECASE)
SHARE = 0.9
"""Part of the deadline that the tests may take; the rest is for making and removing the sandbox."""


def grade(record: TaskRecord, trial: Trial, reward: Reward) -> Score:
    """`resolved`: all FAIL_TO_PASS and PASS_TO_PASS tests pass. Tests that did not run, or were skipped, do not pass.

    `fraction`: the share of FAIL_TO_PASS that passes times the share of PASS_TO_PASS that does.
    """
    fixed, kept = passing(record.fail_to_pass, trial.statuses), passing(record.pass_to_pass, trial.statuses)
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


def passing(names: tuple[str, ...], statuses: Statuses) -> int:
    return sum(status.passes for name in names if (status := statuses.get(normalise(name))) is not None)


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

    async def run(tests: Mapping[str, str] | None = None) -> Trial:
        left = SHARE * (end - loop.time())
        trial = await run_tests(built, backend, changes, min(test_s, left), tests)
        if trial.timed_out and left < test_s:
            raise InfrastructureError(
                f"{built.record.instance_id}: scoring's deadline of {timeout_s:g} s came before the tests' own of "
                f"{test_s:g} s; raise deadlines.score_s"
            )
        return trial

    for attempt in range(1, attempts + 1):
        try:
            trial = await run()
            score = grade(built.record, trial, reward)
            if score.reward == 0:
                return score
            sources = await asyncio.to_thread(read_tests, built)
            if doubt := unexpected_failures(built.record, trial.statuses, sources):
                return grade(built.record, replace(trial, doubt=doubt), reward)
            decoy = await asyncio.to_thread(draw_decoy, built.record, trial.statuses, sources)
            if decoy is None:
                return replace(score, detail={**score.detail, "unproven": 1.0})
            again = await run(decoy.sources)
            if again.timed_out:  # tests that fail may hang: no proof of anything
                raise InfrastructureError(f"{built.record.instance_id}: the tests did not end when some of them failed")
            return grade(built.record, replace(trial, doubt=doubt_of(decoy, again)), reward)
        except InfrastructureError:
            if attempt == attempts or end - loop.time() < timeout_s / 2:
                raise
    raise AssertionError("the last attempt returns or raises")


def unexpected_failures(record: TaskRecord, statuses: Statuses, sources: Mapping[str, str]) -> str:
    """An expected failure counts as passed, so only tests may expect one, not the code under test."""
    names = map(normalise, (*record.fail_to_pass, *record.pass_to_pass))
    expected = sum(statuses.get(name) is Status.XFAIL for name in names)
    if expected and not any(EXPECTED.search(text) for text in sources.values()):
        return f"{expected} tests are said to fail as expected, and no test file expects a failure"
    return ""


def draw_decoy(record: TaskRecord, statuses: Statuses, sources: Mapping[str, str]) -> Decoy | None:
    """Drawn from the tests that passed; a failure that was expected proves nothing."""
    to_fix, to_keep = (
        [name for name in map(normalise, names) if statuses.get(name) is Status.PASSED]
        for names in (record.fail_to_pass, record.pass_to_pass)
    )
    mentioned = " ".join([*to_fix, *to_keep])
    near = {path: text for path, text in sources.items() if PurePosixPath(path).stem in mentioned}
    return make_decoy(near or sources, to_fix, to_keep)


def doubt_of(decoy: Decoy, trial: Trial) -> str:
    forged = [name for name in decoy.fail if (status := trial.statuses.get(name)) is not None and status.passes]
    if forged:
        return f"{len(forged)} of {len(decoy.fail)} tests pass although they were turned round"
    return trial.doubt


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
