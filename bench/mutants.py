"""Whether the fault search sees faults: it must break on mutants of the machines that it says nothing about otherwise.

    python -m bench.mutants [--seed 0] [--count 20] [--schedules 500] [--json] [--out bench/results/mutants.json]

A mutant is one change in one statement of one machine in `pearl/core`: a guard removed, negated or made always true, a
comparison swapped, a statement dropped, a constant off by one. All possible ones are listed and drawn from in an order
that the seed fixes. Each is played in a temporary copy of the package, never in the working tree.

Left out, by rule:
* policies (which layout, which worker, whether it pays): a worse choice is slower, not wrong. Machines are mutated.
* what is only said or measured: strings, reasons, log records, averages, `__repr__`s, properties for lookers-on.
* assertions: they check, they do not act.
* what the schedules never execute, as seen by a line trace of the first ones (unreachable).
* what changes no instruction of any of the first schedules: the machine's whole output is the same (equivalent there).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MACHINES = (
    "pipeline", "scheduler", "training", "rollout", "samples", "fleet", "state", "elastic", "rebuilder", "toggle",
    "gpus", "environments", "lineage", "staleness", "restore",
)  # fmt: skip
TRACED = 60
"""Schedules whose lines and instructions say what is reachable and what is equivalent."""
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


def mutants_of(module: str) -> Iterator[Mutant]:
    text = (ROOT / "pearl/core" / f"{module}.py").read_text()
    count = sum(1 for _ in _places(ast.parse(text)))
    for number in range(count):
        tree = ast.parse(text)
        node, kind, change = list(_places(tree))[number]
        before = _line(text, node.lineno)
        change()
        ast.fix_missing_locations(tree)
        after = "pass" if kind == "dropped statement" else ast.unparse(node).splitlines()[0]
        yield Mutant(module, node.lineno, kind, before, after, ast.unparse(tree))


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
            if isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete) and not _text(statement):
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


def _text(statement: ast.stmt) -> bool:
    """A docstring, or the making of a text."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


# --- what the search says of it ---------------------------------------------------------------------

TRACE = """
import sys, json, hashlib
from pearl.core import events as ev
from pearl.sim.faults import play_seed
lines = set()
def inside(frame, event, arg):
    lines.add((frame.f_code.co_filename.rpartition('/')[2], frame.f_lineno))
    return inside
def outer(frame, event, arg):
    return inside(frame, event, arg) if '/pearl/core/' in frame.f_code.co_filename else None
if sys.argv[2] == 'lines':
    sys.settrace(outer)
seen = []
for seed in range(int(sys.argv[1])):
    world, broken = play_seed(seed)
    out = [e for _, e in world.log if isinstance(e, ev.Instruction) and not type(e).__name__.startswith('Record')]
    seen.append(hashlib.sha256(repr((out, broken and broken.what)).encode()).hexdigest())
    if len(sys.argv) > 3 and json.loads(sys.argv[3])[seed] != seen[-1]:
        break
sys.settrace(None)
print(json.dumps({'lines': sorted(lines), 'seen': seen}))
"""


class Copy:
    """The package in a temporary folder, with one module replaced at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__", "results")
        for package in ("pearl", "bench"):
            shutil.copytree(ROOT / package, folder / package, ignore=ignore)

    def trace(self, what: str, against: list[str] | None = None, timeout_s: float = 300.0) -> Any:
        extra = [json.dumps(against)] if against else []
        return json.loads(self._python(["-c", TRACE, str(TRACED), what, *extra], timeout_s))

    def put(self, module: str, source: str) -> None:
        (self.folder / "pearl/core" / f"{module}.py").write_text(source)

    def search(self, schedules: int, timeout_s: float) -> Any:
        return json.loads(
            self._python(["-m", "bench.faults", "--seeds", f"0:{schedules}", "--stop", "--json"], timeout_s)
        )

    def _python(self, arguments: list[str], timeout_s: float) -> str:
        command = [sys.executable, "-B", *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=timeout_s)
        if not done.stdout:
            raise RuntimeError(done.stderr)
        return done.stdout.splitlines()[-1]


def judge(mutant: Mutant, copy: Copy, original: str, seen: list[str], schedules: int) -> dict[str, Any] | None:
    """What the search says; None if the mutant is equivalent on the first schedules."""
    row: dict[str, Any] = {"mutant": str(mutant), "caught": True, "seed": None, "what": ""}
    copy.put(mutant.module, mutant.source)
    try:
        if copy.trace("instructions", seen, 60.0)["seen"] == seen:
            return None
        result = copy.search(schedules, timeout_s=240.0)
        row |= {"caught": result["broken"] > 0, "seed": result["first_broken_seed"]}
        row["what"] = result["broken_seeds"][0]["what"] if result["broken"] else "not caught"
    except subprocess.TimeoutExpired:
        row["what"] = "the machine does not return from an event"
    except RuntimeError as error:
        row["what"] = str(error).strip().splitlines()[-1]
    finally:
        copy.put(mutant.module, original)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    possible = [mutant for module in MACHINES for mutant in mutants_of(module)]
    rows: list[dict[str, Any]] = []
    unreachable = equivalent = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        seen = copy.trace("instructions")["seen"]
        lines = {tuple(line) for line in copy.trace("lines")["lines"]}
        order = sorted(possible, key=lambda m: hashlib.sha256(f"{args.seed} {m}".encode()).digest())
        for mutant in order:
            if len(rows) == args.count:
                break
            if (f"{mutant.module}.py", mutant.line) not in lines:
                unreachable += 1
                continue
            original = (ROOT / "pearl/core" / f"{mutant.module}.py").read_text()
            row = judge(mutant, copy, original, seen, args.schedules)
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
        "left_out": {"unreachable": unreachable, "equivalent": equivalent},
        "seconds": round(time.monotonic() - began, 1), "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['caught']} of {result['mutants']} caught; of {len(possible)}, {result['left_out']} were left out"
        )


if __name__ == "__main__":
    main()
