"""Whether the fault search sees faults: it must break on mutants of the machines that it says nothing about otherwise.

    python -m bench.mutants [--seed 0] [--count 20] [--schedules 500] [--json] [--out bench/results/mutants.json]

A mutant is one change in one statement of one machine in `pearl/core`: a guard removed, negated or made always true, a
comparison swapped, a statement dropped, a constant off by one. All possible ones are listed and drawn from in an order
that the seed fixes. Each is played in a temporary copy of the package, never in the working tree.

Left out, by rule:
* policies (which layout, which worker, whether it pays): a worse choice is slower, not wrong. Machines are mutated.
* what is only said or measured: strings, reasons, log records, averages, `__repr__`s, properties for lookers-on.
* assertions: they check, they do not act.
* what could not run at all: a name that is left without a value.
* what changes no instruction of any of the first schedules: it is not reached, or the machine's output is the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MACHINES = (
    "pipeline", "scheduler", "training", "rollout", "samples", "fleet", "state", "elastic", "rebuilder", "toggle",
    "gpus", "environments", "lineage", "staleness", "restore",
)  # fmt: skip
COMPARED = 60
"""Schedules in which a mutant that is counted must change an instruction or break something."""
LIMIT_BYTES = 2 << 30
"""Of address space: a mutant may loop for ever over instructions that it keeps."""
LIMIT_S = 600.0
"""A mutant that takes longer loops for ever inside of one event."""
SAID = frozenset({
    "record", "_record", "RecordOperation", "RecordDecision", "RecordGate", "add", "append_story", "QuarantineTask",
})  # fmt: skip
"""Calls that only tell or measure."""
LOOKING_ON = frozenset({"validate", "_cost", "blames", "remaining", "drawn", "_declined", "profile", "layout"})
"""Functions that check, weigh or show."""
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    module: str
    line: int
    kind: str
    before: str
    after: str
    source: str
    """Of the whole mutated module."""

    def __str__(self) -> str:
        return f"pearl/core/{self.module}.py:{self.line} {self.kind}: {self.before}  =>  {self.after}"


# --- what can be changed ----------------------------------------------------------------------------


def places_of(module: str) -> list[tuple[str, int]]:
    """One entry per possible change."""
    tree = ast.parse(source_of(module))
    return [(module, number) for number, _ in enumerate(_places(tree))]


def mutant_of(module: str, number: int) -> Mutant:
    text = source_of(module)
    tree = ast.parse(text)
    node, kind, change = next(islice(_places(tree), number, None))
    change()
    ast.fix_missing_locations(tree)
    after = "pass" if kind == "dropped statement" else ast.unparse(node).splitlines()[0]
    return Mutant(module, node.lineno, kind, _line(text, node.lineno), after, ast.unparse(tree))


def source_of(module: str) -> str:
    return (ROOT / "pearl/core" / f"{module}.py").read_text()


def _line(text: str, number: int) -> str:
    return text.splitlines()[number - 1].strip()


def _places(tree: ast.Module) -> Iterator[tuple[Any, str, Any]]:
    """(statement, kind of change, how to change it)."""
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        if function.name in LOOKING_ON or function.name.startswith("__"):
            continue
        for block, i, statement in _statements(function):
            if isinstance(statement, ast.Assert) or _says(statement):
                continue
            if isinstance(statement, ast.If | ast.While):
                yield from _of_test(statement)
            if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete) and not _needed(statement):
                yield statement, "dropped statement", lambda b=block, i=i: b.__setitem__(i, ast.Pass())
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.Return):
                yield from _of_value(statement)


def _statements(function: ast.FunctionDef) -> Iterator[tuple[list[ast.stmt], int, ast.stmt]]:
    def walk(block: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, ast.stmt]]:
        for i, statement in enumerate(block):
            yield block, i, statement
            for name in ("body", "orelse"):
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    yield from walk(getattr(statement, name, []))

    yield from walk(function.body)


def _of_test(statement: ast.If | ast.While) -> Iterator[tuple[Any, str, Any]]:
    def put(test: ast.expr) -> Any:
        return lambda: setattr(statement, "test", test)

    test = statement.test
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(test)):
        return
    if isinstance(statement, ast.If):
        yield statement, "removed guard", put(ast.Constant(True))
        yield statement, "never taken", put(ast.Constant(False))
    if isinstance(test, ast.BoolOp):
        for i in range(len(test.values)):
            rest = test.values[:i] + test.values[i + 1 :]
            yield statement, "removed condition", put(rest[0] if len(rest) == 1 else ast.BoolOp(test.op, rest))
    yield from _of_comparisons(statement, test)


def _of_value(statement: ast.Assign | ast.AugAssign | ast.Return) -> Iterator[tuple[Any, str, Any]]:
    value = statement.value
    if value is None or _text(statement):
        return
    yield from _of_comparisons(statement, value)
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            wrong = not node.value if isinstance(node.value, bool) else node.value + 1
            yield statement, "wrong constant", lambda n=node, w=wrong: setattr(n, "value", w)


def _of_comparisons(statement: ast.stmt, value: ast.expr) -> Iterator[tuple[Any, str, Any]]:
    for node in ast.walk(value):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            swapped = SWAPS[type(node.ops[0])]()
            yield statement, "swapped comparison", lambda n=node, s=swapped: n.ops.__setitem__(0, s)


def _says(statement: ast.stmt) -> bool:
    """It only tells or measures."""
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)] if isinstance(statement, ast.Expr) else []
    return any(_called(call) in SAID or "story" in ast.unparse(call.func) for call in calls)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _needed(statement: ast.stmt) -> bool:
    """Without it a name has no value, or it is a text."""
    names = isinstance(statement, ast.Assign) and not any(isinstance(t, ast.Attribute) for t in statement.targets)
    subscripts = isinstance(statement, ast.Assign) and any(isinstance(t, ast.Subscript) for t in statement.targets)
    return _text(statement) or (names and not subscripts)


def _text(statement: ast.stmt) -> bool:
    """A docstring, or the making of a text."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


# --- what the search says of it ---------------------------------------------------------------------

PLAY = """
import hashlib, json, resource, sys
from pearl.core import events as ev
from pearl.sim.faults import play_seed

resource.setrlimit(resource.RLIMIT_AS, 2 * (int(sys.argv[4]),))
schedules, compared, original = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
seen = []
for seed in range(schedules):
    world, broken = play_seed(seed)
    if broken is not None:
        print(json.dumps({"seed": seed, "what": broken.what}))
        break
    if seed < compared:
        out = [e for _, e in world.log if isinstance(e, ev.Instruction) and not type(e).__name__.startswith("Record")]
        seen.append(hashlib.sha256(repr(out).encode()).hexdigest())
    if seed + 1 == compared and seen == original:
        print(json.dumps({"same": True}))
        break
else:
    print(json.dumps({"seen": seen}))
"""


class Copy:
    """The package in a temporary folder, with one module replaced at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "pearl", folder / "pearl", ignore=shutil.ignore_patterns("__pycache__"))

    def play(self, schedules: int, original: list[str]) -> dict[str, Any]:
        """Up to the first broken schedule; `original` has what the first ones give without a change."""
        command = [
            sys.executable,
            "-B",
            "-c",
            PLAY,
            str(schedules),
            str(COMPARED),
            json.dumps(original),
            str(LIMIT_BYTES),
        ]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S)
        if not done.stdout:
            return {"seed": None, "what": done.stderr.strip().splitlines()[-1]}
        return json.loads(done.stdout)

    def judge(self, mutant: Mutant, schedules: int, original: list[str]) -> dict[str, Any] | None:
        """What the search says of the mutant; None if nothing changes in the first schedules."""
        module = self.folder / "pearl/core" / f"{mutant.module}.py"
        text = module.read_text()
        module.write_text(mutant.source)
        try:
            found = self.play(schedules, original)
        except subprocess.TimeoutExpired:
            found = {"seed": None, "what": "the machine does not return from an event"}
        finally:
            module.write_text(text)
        if "same" in found:
            return None
        caught = "what" in found
        return {"mutant": str(mutant), "caught": caught, "seed": found.get("seed"), "what": found.get("what", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the mutant in play ends with it
    began = time.monotonic()
    possible = [place for module in MACHINES for place in places_of(module)]
    order = random.Random(f"mutants {args.seed}").sample(possible, len(possible))
    rows: list[dict[str, Any]] = []
    equivalent = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        original = copy.play(COMPARED + 1, [])["seen"]
        for place in order:
            if len(rows) == args.count:
                break
            row = copy.judge(mutant_of(*place), args.schedules, original)
            if row is None:
                equivalent += 1
                continue
            rows.append(row)
            if not args.json:
                print(f"{'caught' if row['caught'] else 'MISSED':<7} {row['mutant']}", flush=True)
                print(f"        seed {row['seed']}: {row['what']}", flush=True)
    result = {
        "command": f"python -m bench.mutants --seed {args.seed} --count {args.count} --schedules {args.schedules}",
        "possible": len(possible), "mutants": len(rows), "caught": sum(row["caught"] for row in rows),
        "nothing_changes": equivalent,
        "seconds": round(time.monotonic() - began, 1), "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['caught']} of {len(rows)} caught; {equivalent} changed nothing and were left out")


if __name__ == "__main__":
    main()
