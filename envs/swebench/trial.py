"""One run of a task's tests in a fresh sandbox, with what an agent (or a patch) changed, and what can be believed."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from envs.sandbox.protocol import CommandResult, Entry, SandboxBackend
from envs.swebench.builder import HTTPBIN_PORT, BuiltTask
from envs.swebench.frameworks import Canaries, Framework, framework_of, make_canaries, with_report
from envs.swebench.parsers import Statuses, parser_for

LOG_BYTES = 16 << 20
SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run of the tests said."""

    statuses: Statuses
    doubt: str
    """Why the statuses prove nothing; empty if the canaries and the exit code say what they must."""
    timed_out: bool
    seconds: float
    log: str
    dropped: tuple[str, ...] = ()
    """Changes that do not count: tests, their configuration, start-up files, byte code, links."""


async def run_tests(
    built: BuiltTask,
    backend: SandboxBackend,
    changes: Mapping[str, Entry],
    timeout_s: float,
    tests: Mapping[str, str] | None = None,
) -> Trial:
    """Run the test command on the repository with `changes`, the test patch over them, and other `tests` over that.

    Whatever the code under test does ends in the Trial; InfrastructureError if the sandbox itself fails.
    """
    start = time.monotonic()
    counted, dropped = admit(built, changes)
    canaries = make_canaries(built.recipe.test_cmd, lambda path: exists(built, path))
    own = {
        path: Entry("file", text.encode()) for path, text in {**(tests or {}), canaries.path: canaries.source}.items()
    }
    files = {**counted, **built.tests, **own}
    sandbox = await backend.create_from(built.image, files)
    try:
        command = service(built) + shlex.join([*with_report(built.recipe.test_cmd), *canaries.arguments])
        result = await sandbox.exec(command, timeout_s=timeout_s, keep_bytes=LOG_BYTES)
    finally:
        await sandbox.close()
    statuses, doubt = await asyncio.to_thread(judge, built, canaries, result)
    return Trial(statuses, doubt, result.timed_out, time.monotonic() - start, result.output, tuple(dropped))


def admit(built: BuiltTask, changes: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The changes that count, and the paths of those that do not."""
    counted, dropped = {}, []
    for path, entry in changes.items():
        blocks = any(test.startswith(f"{path}/") or path.startswith(f"{test}/") for test in built.tests)
        new = not (built.image.tree / path).exists()
        if entry.kind == "other" or blocks or built.guard.drops(path, new=new):
            dropped.append(path)
        else:
            counted[path] = entry
    return counted, sorted(dropped)


def judge(built: BuiltTask, canaries: Canaries, result: CommandResult) -> tuple[Statuses, str]:
    """Statuses without the canaries', and the doubt."""
    log = result.output
    framework = framework_of(built.recipe.test_cmd)
    if framework is Framework.PYTEST and (headers := list(SUMMARY.finditer(log))):
        log = log[headers[-1].start() :]  # what tests printed before it is theirs
    statuses = parser_for(built.record.repo, built.recipe.test_cmd)(log)
    wrong = canaries.disagree(statuses)
    statuses = {name: status for name, status in statuses.items() if not canaries.owns(name)}
    if result.exit_code is None or result.over_disk:
        kinds = {"time": result.timed_out, "disk": result.over_disk, "memory": result.over_memory}
        return statuses, "killed: " + next((kind for kind, holds in kinds.items() if holds), "output")
    if wrong:
        return statuses, f"{len(wrong)} of 4 canary tests were not judged as they must be"
    if result.exit_code == 0 or (framework is Framework.PYTEST and result.exit_code != 1):
        return statuses, f"exit code {result.exit_code} although tests fail that must"
    return statuses, ""


def exists(built: BuiltTask, path: str) -> bool:
    """In the repository after the test patch."""
    entry = built.tests.get(path)
    if entry is not None:
        return entry.kind != "missing"
    return os.path.exists(built.image.tree / path)  # noqa: PTH110  (a word of a command may be too long for a name)


def service(built: BuiltTask) -> str:
    """Shell code that starts what a task needs besides its repository, and waits until it answers."""
    if not built.recipe.httpbin:
        return ""
    serve = f"from httpbin import app; app.run(host='127.0.0.1', port={HTTPBIN_PORT}, threaded=True)"
    wait = f"for i in $(seq 100); do (: > /dev/tcp/127.0.0.1/{HTTPBIN_PORT}) 2>/dev/null && break; sleep 0.1; done; "
    return f"PYTHONPATH= python -c {shlex.quote(serve)} >/dev/null 2>&1 & {wait}"
