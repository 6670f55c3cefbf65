"""What a SWE-bench sandbox costs: start, command, step, tests, and 64 at once, each beside the same thing without it.

    python -m bench.env_cost [--tasks examples/swebench.jsonl] [--rounds 40] [--sandboxes 64] [--json FILE]

`step` is `SwebenchEnvironment.step` of `true` and the state's fingerprint, as a worker does both each turn;
what it adds is its median less that of `bash -c true` run bare. `tests` is a whole trial (fresh sandbox, canaries,
parsing) beside the bare test command in a copy of the repository. The limit: a step adds 25 ms at the median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from envs.families.swebench import SwebenchEnvironment, SwebenchFamily
from envs.sandbox.backend import BubblewrapBackend
from envs.swebench.builder import BuiltTask
from envs.swebench.limits import LIMITS
from envs.swebench.trial import run_tests
from pearl.config.environment import EnvironmentConfig
from pearl.config.swebench import SwebenchConfig

STEP_LIMIT_MS = 25.0
TIMEOUT_S = 300.0


async def timed(rounds: int, work: Callable[[], Awaitable[Any]]) -> list[float]:
    """Milliseconds of each of `rounds` runs, one after the other."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        await work()
        found.append(1000 * (time.perf_counter() - start))
    return found


async def cpu_ms(rounds: int, work: Callable[[], Awaitable[Any]]) -> float:
    """Processor time of one run, ours and that of all processes that ended in it; other load hardly changes it."""
    before = _cpu_s()
    for _ in range(rounds):
        await work()
    return 1000 * (_cpu_s() - before) / rounds


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


async def bare(argv: list[str], folder: Path, variables: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=folder, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    await process.communicate()


async def step(environment: SwebenchEnvironment) -> None:
    await environment.step("true", TIMEOUT_S)
    await environment.fingerprint()


async def many(family: SwebenchFamily, count: int, commands: int) -> dict[str, float]:
    """`count` sandboxes open at once, each with `commands` steps; failures are raised, so none is counted here."""

    async def one(index: int) -> None:
        environment = family.open(index % len(family.tasks))
        try:
            await environment.reset(TIMEOUT_S)
            for number in range(commands):
                result = await environment.step(f"echo {number} >> file; cat file | wc -l", TIMEOUT_S)
                if result.text != str(number + 1):
                    raise RuntimeError(f"sandbox {index} said {result.text!r}")
        finally:
            await environment.close()

    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(count)))
    seconds = time.perf_counter() - start
    return {"sandboxes": count, "commands": count * commands, "seconds": seconds, "per_s": count * commands / seconds}


async def measure(tasks: Path, rounds: int, sandboxes: int) -> dict[str, Any]:
    config = EnvironmentConfig(
        family="swebench", tasks=1, sandbox=LIMITS, swebench=SwebenchConfig(tasks_file=str(tasks), attempts=1)
    )
    backend = BubblewrapBackend(LIMITS, name="env-cost")
    family = SwebenchFamily(config, backend)
    try:
        await family.prepare()
        environment = family.open(0)
        starts = await timed(rounds, lambda: environment.reset(TIMEOUT_S))
        steps = await timed(rounds, lambda: step(environment))
        start_cpu_ms = await cpu_ms(rounds, lambda: environment.reset(TIMEOUT_S))
        step_cpu_ms = await cpu_ms(rounds, lambda: step(environment))
        built = await family.builder.abuild(family.records[0])
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name) / "testbed"
            copies = await timed(3, lambda: asyncio.to_thread(renew, built, copy))
            true = ["/usr/bin/bash", "-c", "true"]
            shell = await timed(rounds, lambda: bare(true, copy, {}))
            shell_cpu_ms = await cpu_ms(rounds, lambda: bare(true, copy, {}))
            variables = {**built.image.variables, "PYTHONPATH": str(copy / built.recipe.pythonpath)}
            variables["PATH"] = f"{built.environment}/bin:/usr/bin:/bin"
            command = [str(built.environment / "bin/python"), *built.recipe.test_cmd[1:]]
            plain = await timed(3, lambda: bare(command, copy, variables))
        trials = await timed(3, lambda: run_tests(built, backend, {}, TIMEOUT_S))
        await environment.close()
        at_once = await many(family, sandboxes, 5)
    finally:
        await backend.close()
        family.close()
    median = statistics.median
    return {
        "start_ms": median(starts),
        "copy_ms": median(copies),
        "shell_ms": median(shell),
        "step_ms": median(steps),
        "step_adds_ms": median(steps) - median(shell),
        "start_cpu_ms": start_cpu_ms,
        "step_cpu_ms": step_cpu_ms,
        "shell_cpu_ms": shell_cpu_ms,
        "step_limit_ms": STEP_LIMIT_MS,
        "tests_ms": median(trials),
        "bare_tests_ms": median(plain),
        "at_once": at_once,
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }


def renew(built: BuiltTask, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(built.image.tree, copy, symlinks=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, default=Path("examples/swebench.jsonl"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sandboxes", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.tasks, arguments.rounds, arguments.sandboxes))
    for name, value in result.items():
        print(f"{name:>16}  {value if isinstance(value, dict) else round(value, 1)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
