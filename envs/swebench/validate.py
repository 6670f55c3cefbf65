"""Does a task work here: its tests fail without the gold patch, pass with it, each time; and nothing tells the fix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.errors import InfrastructureError
from envs.sandbox.protocol import Entry, SandboxBackend
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.errors import TaskError
from envs.swebench.grade import draw_decoy, still_passing
from envs.swebench.leaks import find_leaks
from envs.swebench.parsers import Statuses, normalise
from envs.swebench.record import TaskRecord
from envs.swebench.trial import Trial, run_tests

SHOWN = 3
"""Names that a reason lists."""
LINE_CHARS = 200
"""Of a log's last line."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What running a task's tests before and after its gold patch showed."""

    record: TaskRecord
    """With the lists that were found, where it is valid."""
    valid: bool
    fails_before: bool
    passes_after: bool
    official_match: bool | None
    """The benchmark's own lists hold wholly; None if it has none."""
    seconds: float
    reason: str
    """One word and why; empty if there is nothing to say."""
    flaky: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    logs: tuple[str, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            "instance_id": self.record.instance_id,
            "fails_before": self.fails_before,
            "passes_after": self.passes_after,
            "official_match": self.official_match,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
        }


def not_tried(instance_id: str, reason: str) -> dict[str, Any]:
    """As `Validation.as_dict`, of a row that is no task."""
    return {
        "instance_id": instance_id,
        "fails_before": False,
        "passes_after": False,
        "official_match": None,
        "seconds": 0.0,
        "reason": reason,
    }


async def validate(
    record: TaskRecord, builder: Builder, backend: SandboxBackend, *, runs: int, test_s: float
) -> Validation:
    """Build, run the tests `runs` times before and after the gold patch, scan for leaks.

    Where that makes a valid task, the gold patch also passes the second run of grading: all tests turned round that
    can be. Those that pass nevertheless are left as they are when the task is graded.
    """
    start = time.monotonic()
    try:
        built = await builder.abuild(record)
        gold = await asyncio.to_thread(builder.changes, built, record.patch)
        before, after = [], []
        for _ in range(runs):
            before.append(await run_tests(built, backend, {}, test_s))
            after.append(await run_tests(built, backend, gold, test_s))
        leaks = await asyncio.to_thread(find_leaks, built)
        found = compare(built, before, after, leaks, time.monotonic() - start)
        if found.valid:
            found = await _proved(found, built, backend, gold, after[-1].statuses, test_s)
    except TaskError as error:
        reason = f"{error.reason}: {error}"
    except InfrastructureError as error:
        reason = f"infrastructure: {error}"
    except Exception as error:  # whatever a task holds, the others are still tried
        reason = f"unexpected: {type(error).__name__}: {error}"
    else:
        return replace(found, seconds=time.monotonic() - start)
    return Validation(record, False, False, False, None, time.monotonic() - start, reason)


async def _proved(
    found: Validation,
    built: BuiltTask,
    backend: SandboxBackend,
    gold: Mapping[str, Entry],
    statuses: Statuses,
    test_s: float,
) -> Validation:
    decoy = await asyncio.to_thread(draw_decoy, built, found.record, statuses, share=1.0)
    if decoy is None:
        return replace(found, reason=_and(found.reason, "unproven: no FAIL_TO_PASS test can be turned round"))
    trial = await run_tests(built, backend, gold, test_s, decoy.sources)
    if trial.doubt:
        said = f"not_graded: with the gold patch and tests turned round, {trial.doubt}"
        return replace(found, valid=False, reason=said)
    if not (passing := still_passing(decoy, trial)):
        return found
    said = (
        f"unproven: {len(passing)} of {len(decoy.fail)} tests pass although they were turned round ({_some(passing)})"
    )
    record = found.record.model_copy(update={"unturned": tuple(passing)})
    return replace(found, record=record, reason=_and(found.reason, said))


def _and(reason: str, more: str) -> str:
    return f"{reason}; {more}" if reason else more


def compare(
    built: BuiltTask, before: Sequence[Trial], after: Sequence[Trial], leaks: Sequence[str], seconds: float
) -> Validation:
    record = built.record
    first, last = [trial.statuses for trial in before], [trial.statuses for trial in after]
    flaky = sorted({name for runs in (first, last) for name in set().union(*runs) if _varies(name, runs)})
    steady = [name for name in last[0] if all(_passes(name, run) for run in last) and name not in flaky]
    steady = [name for name in steady if " ... " not in name]  # two tests on one line, see `parsers.django`
    fail_to_pass = tuple(name for name in steady if not any(_passes(name, run) for run in first))
    pass_to_pass = tuple(name for name in steady if all(_passes(name, run) for run in first))
    expected = tuple(map(normalise, record.fail_to_pass)) or fail_to_pass
    fails_before = bool(expected) and not any(_passes(name, run) for name in expected for run in first)
    passes_after = bool(expected) and all(_passes(name, run) for name in expected for run in last)
    official, kept = _official(record)
    match = _match(official, kept, first, last) if official else None
    doubt = next((trial for trial in after if trial.doubt), None)
    valid = bool(fail_to_pass) and doubt is None and not leaks
    if doubt is not None:
        reason = f"{'timeout' if doubt.timed_out else 'tests_do_not_run'}: with the gold patch, {doubt.doubt}"
        if not doubt.statuses:
            reason += f"; no test reported a result, and the log ends with {_last_line(doubt.log)!r}"
    elif leaks:
        reason = f"leak: {'; '.join(leaks[:SHOWN])}"
    elif not fail_to_pass:
        reason = _nothing_flips(expected, first, last)
    else:
        reason = match or ""
    if valid:
        status = "valid" if match is None else "strict" if match == "" else match.partition(":")[0]
        record = record.model_copy(
            update={
                "build": built.recipe,
                "fail_to_pass": fail_to_pass,
                "pass_to_pass": pass_to_pass,
                "official_fail_to_pass": official,
                "official_pass_to_pass": kept,
                "status": status,
                "run_s": round(max(trial.seconds for trial in after), 1),
            }
        )
    logs = (before[-1].log, after[-1].log)
    official_match = None if match is None else match == ""
    return Validation(
        record, valid, fails_before, passes_after, official_match, seconds, reason, tuple(flaky), tuple(leaks), logs
    )


def _official(record: TaskRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The benchmark's lists: those named so, else the only ones, unless the task is our own."""
    if record.official_fail_to_pass:
        return record.official_fail_to_pass, record.official_pass_to_pass
    return (record.fail_to_pass, record.pass_to_pass) if record.kind == "swebench" else ((), ())


def _match(official: Sequence[str], kept: Sequence[str], first: Sequence[Statuses], last: Sequence[Statuses]) -> str:
    """Empty if the benchmark's lists hold wholly, else which part of them does not."""
    already = [name for name in official if any(_passes(normalise(name), run) for run in first)]
    still = [name for name in official if not all(_passes(normalise(name), run) for run in last)]
    lost = [name for name in kept if not all(_keeps(normalise(name), run) for run in last)]
    parts = []
    if already:
        parts.append(f"{len(already)} of {len(official)} official FAIL_TO_PASS pass before ({_some(already)})")
    if still:
        parts.append(f"{len(still)} of {len(official)} official FAIL_TO_PASS do not pass after ({_some(still)})")
    if lost:
        parts.append(f"{len(lost)} of {len(kept)} official PASS_TO_PASS do not pass after ({_some(lost)})")
    word = "partial" if already or still else "f2p_ok_p2p_partial"
    return f"{word}: {'; '.join(parts)}" if parts else ""


def _nothing_flips(expected: Sequence[str], first: Sequence[Statuses], last: Sequence[Statuses]) -> str:
    if not any(last):
        return "no_tests: no test reported a result"
    already = [name for name in expected if any(_passes(name, run) for run in first)]
    still = [name for name in expected if not all(_passes(name, run) for run in last)]
    said = f"; {len(already)} FAIL_TO_PASS pass before ({_some(already)})" if already else ""
    said += f"; {len(still)} do not pass after ({_some(still)})" if still else ""
    return f"nothing_flips: no test fails before and passes after{said}"


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][-LINE_CHARS:] if lines else ""


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def _passes(name: str, statuses: Statuses) -> bool:
    return (status := statuses.get(name)) is not None and status.passes


def _keeps(name: str, statuses: Statuses) -> bool:
    return (status := statuses.get(name)) is not None and status.kept


def _varies(name: str, runs: Sequence[Statuses]) -> bool:
    return len({_passes(name, run) for run in runs}) > 1
