"""From what a run of the tests said to a reward, by SWE-bench's rule, and to nothing at all if the machine failed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from envs.errors import InfrastructureError
from envs.protocol import Score
from envs.sandbox.protocol import Entry, SandboxBackend
from envs.swebench.builder import BuiltTask
from envs.swebench.parsers import Statuses, normalise
from envs.swebench.record import TaskRecord
from envs.swebench.trial import Trial, admit, run_tests

Reward = Literal["resolved", "fraction"]
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
    for attempt in range(1, attempts + 1):
        try:
            left = SHARE * (end - loop.time())
            trial = await run_tests(built, backend, changes, min(test_s, left))
            if trial.timed_out and left < test_s:
                raise InfrastructureError(
                    f"{built.record.instance_id}: scoring's deadline of {timeout_s:g} s came before the tests' own of "
                    f"{test_s:g} s; raise deadlines.score_s"
                )
            return grade(built.record, trial, reward)
        except InfrastructureError:
            if attempt == attempts or end - loop.time() < timeout_s / 2:
                raise
    raise AssertionError("the last attempt returns or raises")
