"""`pearl env`: build, validate, play and make tasks of the family `swebench`."""

from __future__ import annotations

import asyncio
import json as json_module
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pearl.errors import UserError

if TYPE_CHECKING:
    from envs.sandbox.protocol import SandboxBackend
    from envs.swebench.builder import Builder
    from envs.swebench.load import BadRow
    from envs.swebench.mutate import Outcome
    from envs.swebench.record import TaskRecord

app = typer.Typer(help="SWE-bench tasks: build, validate, play, make.", no_args_is_help=True)

Tasks = Annotated[str, typer.Argument(help="A .jsonl, .json or .parquet file, a directory of tasks, or hf:NAME:SPLIT.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="This instance_id only; can be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Progress to stderr; one object on stdout.")]
Cache = Annotated[Path | None, typer.Option(help="As environment.swebench.cache.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Tasks at once; by default half the processors.")]
TestSeconds = Annotated[float, typer.Option(min=1.0, help="Limit of one run of the tests, seconds.")]
RUN_FACTOR = 5.0
"""A task that is known to take longer than a fifth of --test-s gets this many times what it took,"""
MOST_TEST_S = 3600.0
"""but not more than this: what a row says need not be true."""

_SANDBOX: ContextVar[dict[str, str | None]] = ContextVar("sandbox")
"""What the options before the command say of `environment.sandbox`."""


@app.callback()
def options(
    backend: Annotated[str, typer.Option(help="As environment.sandbox.backend: bubblewrap, podman or docker.")] = "",
    image: Annotated[str | None, typer.Option(help="As environment.sandbox.image.")] = None,
) -> None:
    """SWE-bench tasks: build, validate, play, make."""
    if backend not in ("", "bubblewrap", "podman", "docker"):
        raise UserError(f"--backend {backend} is not known", "Give bubblewrap, podman or docker.")
    _SANDBOX.set({"backend": backend, "image": image} if backend else {})


@dataclass(slots=True)
class _Workshop:
    builder: Builder
    backend: SandboxBackend


@asynccontextmanager
async def _workshop(cache: Path | None, build_s: float, builds: int = 1) -> AsyncIterator[_Workshop]:
    """A builder, and sandboxes that are large enough for test suites."""
    from envs.sandbox.factory import make_backend
    from envs.swebench.builder import Builder
    from envs.swebench.limits import LIMITS
    from pearl.config.swebench import SwebenchConfig

    limits = LIMITS.model_copy(update=_SANDBOX.get())
    backend = make_backend(limits, name="env")
    engine = getattr(backend, "engine", None)
    builder = Builder(SwebenchConfig(cache=str(cache) if cache else None, build_s=build_s, builds=builds), engine)
    try:
        await backend.sweep()
        await backend.probe()
        yield _Workshop(builder, backend)
    finally:
        await backend.close()
        builder.close()


def _chosen(tasks: str, only: list[str] | None) -> tuple[list[TaskRecord], list[BadRow]]:
    """Tasks, and rows that are none: those are told, and do not stop the others."""
    from envs.swebench.load import BadRow, read_tasks

    rows = read_tasks(tasks)
    if only:
        unknown = set(only) - {row.instance_id for row in rows}
        if unknown:
            raise UserError(f"{tasks} has no task {sorted(unknown)[0]!r}", "`pearl env list` names its tasks.")
        rows = [row for row in rows if row.instance_id in only]
    bad = [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if not isinstance(row, BadRow)], bad


async def _each(records: list[TaskRecord], jobs: int | None, work: Callable[[TaskRecord], Awaitable[Any]]) -> list[Any]:
    some = asyncio.Semaphore(_jobs(jobs))

    async def one(record: TaskRecord) -> Any:
        async with some:
            return await work(record)

    return await asyncio.gather(*(one(record) for record in records))


def _jobs(jobs: int | None) -> int:
    return jobs or max(1, (os.cpu_count() or 2) // 2)


def _print(console: Console, text: str) -> None:
    console.print(_writable(console, text), highlight=False, soft_wrap=True, markup=False)


def _writable(console: Console, text: str) -> str:
    """Names of tests may hold what no terminal takes."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _tell(console: Console, bad: list[BadRow]) -> None:
    for row in bad:
        _print(console, f"{row.reason}: {row}")


@app.command("list")
def list_tasks(tasks: Tasks, only: Only = None, json: Json = False) -> None:
    """Show tasks: repository, Python, tests, how to build."""
    records, bad = _chosen(tasks, only)
    rows = [_row(record) for record in records]
    if json:
        faults = [{"instance_id": row.instance_id, "reason": f"{row.reason}: {row}"} for row in bad]
        print(json_module.dumps({"tasks": len(rows) + len(bad), "results": rows, "bad_rows": faults}))
        return
    console = Console()
    table = Table()
    for name in ("instance_id", "repo", "python", "source", "F2P", "P2P", "status"):
        # A name that is cut could not be given to --only.
        table.add_column(name, overflow="fold", no_wrap=name == "instance_id")
    for row in rows:
        table.add_row(*(escape(_writable(console, str(value))) for value in row.values()))
    console.print(table)
    _tell(console, bad)


def _row(record: TaskRecord) -> dict[str, Any]:
    build = record.build
    return {
        "instance_id": record.instance_id,
        "repo": record.repo,
        "python": build.python if build else "",
        "source": (build.sdist or build.source or build.image or "") if build else "",
        "fail_to_pass": len(record.fail_to_pass),
        "pass_to_pass": len(record.pass_to_pass),
        "status": record.status,
    }


@app.command()
def build(
    tasks: Tasks,
    only: Only = None,
    cache: Cache = None,
    jobs: Jobs = None,
    build_s: Annotated[float, typer.Option(min=1.0, help="Limit for one task, seconds.")] = 900.0,
    json: Json = False,
) -> None:
    """Make repositories and virtual environments beforehand; what is there already is used."""
    records, bad = _chosen(tasks, only)
    console = Console(stderr=json)
    _tell(console, bad)

    async def main() -> list[dict[str, Any]]:
        from envs.swebench.errors import TaskError

        async with _workshop(cache, build_s, _jobs(jobs)) as shop:

            async def one(record: TaskRecord) -> dict[str, Any]:
                loop = asyncio.get_running_loop()
                start, reason = loop.time(), ""
                try:
                    await shop.builder.abuild(record)
                except TaskError as error:
                    reason = f"{error.reason}: {error}"
                seconds = loop.time() - start
                _print(console, f"{record.instance_id}: {reason or 'built'} ({seconds:.1f} s)")
                return {"instance_id": record.instance_id, "seconds": round(seconds, 1), "reason": reason}

            return await _each(records, jobs, one)

    results = asyncio.run(main()) if records else []
    results += [{"instance_id": row.instance_id, "seconds": 0.0, "reason": f"{row.reason}: {row}"} for row in bad]
    built = sum(not result["reason"] for result in results)
    if json:
        print(json_module.dumps({"tasks": len(results), "built": built, "results": results}))
    else:
        _print(console, f"{built} of {len(results)} tasks are built")
    raise typer.Exit(0 if built else 1)


@app.command()
def validate(
    tasks: Tasks,
    only: Only = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs before and after the gold patch; flaky tests go.")] = 2,
    output: Annotated[
        Path | None, typer.Option(help="Write the valid tasks here as they are found, with their lists.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the last logs of each task in this directory.")] = None,
    cache: Cache = None,
    jobs: Jobs = None,
    test_s: TestSeconds = 300.0,
    build_s: Annotated[float, typer.Option(min=1.0, help="Limit for building one task, seconds.")] = 900.0,
    json: Json = False,
) -> None:
    """Run each task's tests before and after its gold patch; keep the stable lists; look for leaks of the fix."""
    records, bad = _chosen(tasks, only)
    console = Console(stderr=json)
    _tell(console, bad)
    if output is not None:
        from envs.swebench.load import save_tasks

        save_tasks(output, [])
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{logs} cannot be made ({error.strerror})", "Give a directory for --logs.") from error

    async def main() -> list[Any]:
        from envs.swebench.load import add_task
        from envs.swebench.validate import validate as validate_task

        async with _workshop(cache, build_s, _jobs(jobs)) as shop:

            async def one(record: TaskRecord) -> Any:
                limit = max(test_s, min(MOST_TEST_S, RUN_FACTOR * (record.run_s or 0.0)))
                found = await validate_task(record, shop.builder, shop.backend, runs=runs, test_s=limit)
                said = found.record.status if found.valid else "not valid"
                flaky = f"; {len(found.flaky)} flaky" if found.flaky else ""
                reason = f"; {found.reason}" if found.reason else ""
                _print(console, f"{record.instance_id}: {said} ({found.seconds:.1f} s){flaky}{reason}")
                if logs is not None:
                    for phase, text in zip(("before", "after"), found.logs, strict=False):
                        (logs / f"{record.instance_id}.{phase}.log").write_text(text)
                if output is not None and found.valid:
                    add_task(output, found.record)
                return replace(found, logs=())  # thousands of them would not fit in memory

            return await _each(records, jobs, one)

    results = asyncio.run(main()) if records else []
    valid = [result for result in results if result.valid]
    if output is not None:
        save_tasks(output, [result.record for result in valid])  # in the order that was given
    if json:
        from envs.swebench.validate import not_tried

        rows = [result.as_dict() for result in results]
        rows += [not_tried(row.instance_id, f"{row.reason}: {row}") for row in bad]
        print(json_module.dumps({"tasks": len(rows), "valid": len(valid), "results": rows}))
    else:
        _print(console, f"{len(valid)} of {len(results) + len(bad)} tasks are valid")
    raise typer.Exit(0 if valid else 1)


@app.command()
def mutate(
    package: Annotated[str, typer.Argument(help="name==version of a package on PyPI whose sdist has its tests.")],
    output: Annotated[Path, typer.Option(help="JSON lines; written anew.")],
    count: Annotated[int, typer.Option(min=1, help="Valid tasks to make.")] = 10,
    tries: Annotated[int | None, typer.Option(min=1, help="Faults to try at most; five for each task.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the faults.")] = 0,
    dep: Annotated[list[str] | None, typer.Option("--dep", help="What the tests need besides; default pytest.")] = None,
    tests: Annotated[str, typer.Option(help="File or directory of tests.")] = "tests",
    python: Annotated[str, typer.Option(help="Version of Python.")] = "3.11",
    cache: Cache = None,
    test_s: TestSeconds = 120.0,
    build_s: Annotated[float, typer.Option(min=1.0, help="Limit for building, seconds.")] = 900.0,
    json: Json = False,
) -> None:
    """Make tasks of a package: one-line faults that some of its own tests notice."""
    from envs.swebench.record import PYTHON, SDIST

    for given, pattern, form in ((package, SDIST, "itsdangerous==2.1.2"), (python, PYTHON, "3.11")):
        if not re.fullmatch(pattern, given):
            raise UserError(f"{given!r} is not of the form {form}", "Name a version of the package, and of Python.")
    console = Console(stderr=json)

    async def main() -> list[Outcome]:
        from envs.swebench.errors import TaskError
        from envs.swebench.mutate import find_recipe
        from envs.swebench.mutate import mutate as make_tasks

        outcomes = []
        try:
            deps = dep or ["pytest"]
            recipe = await asyncio.to_thread(find_recipe, package, python, deps, tests, build_s)
            async with _workshop(cache, build_s) as shop:
                limit = tries or 5 * count
                made = make_tasks(
                    recipe, shop.builder, shop.backend, seed=seed, count=count, tries=limit, test_s=test_s
                )
                async for outcome in made:
                    fault = outcome.fault
                    said = f"{len(outcome.record.fail_to_pass)} tests fail" if outcome.record else outcome.reason
                    _print(console, f"{fault.path}:{fault.line} `{fault.wrong.strip()}`: {said}")
                    outcomes.append(outcome)
        except TaskError as error:
            raise UserError(f"{package} makes no tasks: {error}", "Name its tests' needs with --dep.") from error
        return outcomes

    outcomes = asyncio.run(main())
    records = [outcome.record for outcome in outcomes if outcome.record is not None]
    from envs.swebench.load import save_tasks

    save_tasks(output, records)
    if json:
        rows = [_row(record) for record in records]
        print(json_module.dumps({"tried": len(outcomes), "tasks": len(rows), "results": rows}))
    else:
        _print(console, f"{len(records)} tasks of {len(outcomes)} faults: {output}")
    raise typer.Exit(0 if records else 1)


@app.command()
def run(
    tasks: Tasks,
    task: Annotated[str, typer.Option("--id", help="instance_id; the first task if not given.")] = "",
    gold: Annotated[bool, typer.Option("--gold", help="Apply the gold patch and grade.")] = False,
    patch: Annotated[Path | None, typer.Option(help="Apply this patch and grade.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible URL (http://host:port/v1) that plays.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there; the first if not given.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a model.")] = 40,
    cache: Cache = None,
    test_s: TestSeconds = 300.0,
    json: Json = False,
) -> None:
    """Play one task: by hand (commands from standard input), with the gold or another patch, or with a model."""
    records, bad = _chosen(tasks, [task] if task else None)
    if not records:
        raise UserError(str(bad[0]), "docs/environments.md lists the fields.")
    record = records[0]
    if not record.fail_to_pass:
        raise UserError(f"{record.instance_id} has no FAIL_TO_PASS tests", "Run `pearl env validate` on it first.")
    text = record.patch if gold else _read(patch) if patch else None
    console = Console(stderr=json)

    async def main() -> dict[str, Any]:
        from envs.errors import InfrastructureError
        from envs.swebench.errors import TaskError
        from envs.swebench.play import grade_patch, play, play_by_hand, play_with_model

        say = lambda line: _print(console, line)  # noqa: E731
        try:
            async with _workshop(cache, 900.0) as shop:
                built = await shop.builder.abuild(record)
                if text is not None:
                    score = await grade_patch(built, shop.builder, shop.backend, text, test_s)
                else:
                    answer = play_by_hand() if endpoint is None else play_with_model(endpoint, model)
                    score = await play(built, shop.backend, answer, say, turns=turns, test_s=test_s)
        except (TaskError, InfrastructureError) as error:
            raise UserError(f"{record.instance_id} cannot be played: {error}", "See `pearl env validate`.") from error
        return {"instance_id": record.instance_id, "reward": score.reward, **score.detail}

    result = asyncio.run(main())
    if json:
        print(json_module.dumps(result))
    else:
        _print(
            console,
            ", ".join(f"{name} {value:g}" if name != "instance_id" else value for name, value in result.items()),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Give a unified diff.") from error
