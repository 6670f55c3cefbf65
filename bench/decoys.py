"""Whether tests that are turned round fail, all of them, on repositories that hold the gold patch.

    python -m bench.decoys TASKS [--only ID]... [--out bench/results/decoys.json]

A test that passed and passes again although it was turned round would make an honest solution doubted. For each task:
how many of its tests can be turned round, and which of those still pass. Tasks that are not built are built first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.sandbox.backend import BubblewrapBackend
from envs.swebench import grade
from envs.swebench.builder import Builder
from envs.swebench.errors import TaskError
from envs.swebench.limits import LIMITS
from envs.swebench.load import load_tasks
from envs.swebench.parsers import Status, normalise
from envs.swebench.record import TaskRecord
from envs.swebench.trial import run_tests
from pearl.config.swebench import SwebenchConfig

TEST_S = 300.0


async def study(records: Sequence[TaskRecord], builder: Builder, backend: BubblewrapBackend) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        try:
            built = await builder.abuild(record)
        except TaskError as error:
            rows.append({"instance_id": record.instance_id, "reason": f"{error.reason}: {error}"})
            continue
        names = [normalise(name) for name in (*record.fail_to_pass, *record.pass_to_pass)]
        decoy = grade.draw_decoy(built, record, dict.fromkeys(names, Status.PASSED), share=1.0)
        row: dict[str, Any] = {"instance_id": record.instance_id, "tests": len(names), "turned": 0, "still_pass": []}
        if decoy is not None:
            trial = await run_tests(built, backend, builder.changes(built, record.patch), TEST_S, decoy.sources)
            row |= {"turned": len(decoy.fail), "still_pass": grade.still_passing(decoy, trial), "doubt": trial.doubt}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


async def main(options: argparse.Namespace) -> None:
    records = [r for r in load_tasks(options.tasks) if not options.only or r.instance_id in options.only]
    builder, backend = Builder(SwebenchConfig()), BubblewrapBackend(LIMITS, name="decoys")
    try:
        rows = await study(records, builder, backend)
    finally:
        await backend.close()
        builder.close()
    tried = [row for row in rows if "turned" in row]
    total = {
        "tasks": len(tried),
        "without_a_decoy": sum(row["turned"] == 0 for row in tried),
        "tests": sum(row["tests"] for row in tried),
        "turned": sum(row["turned"] for row in tried),
        "still_pass": sum(len(row["still_pass"]) for row in tried),
    }
    print(json.dumps(total))
    if options.out:
        options.out.write_text(json.dumps({**total, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--out", type=Path)
    asyncio.run(main(parser.parse_args()))
