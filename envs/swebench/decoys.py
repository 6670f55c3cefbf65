"""The tests once more with some of them turned round, so that they cannot pass if the real ones did.

Code under test runs in the process that judges it and can print any log. What it cannot do is to tell a test from its
twin that expects something else: that takes the right answer. So whoever prints verdicts instead of earning them
prints them for the twins, too, or has to guess which tests are twins, anew for each grading.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from envs.swebench.frameworks import false_assertion

SHARE = 0.5
"""Of the tests that can be turned round, this share is by default; at least one that the task is about."""
FLIPPED = {
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
}
EXACT = 1e9
"""Below it a float changes when 1 is added."""
TIGHT = (ast.Compare, ast.Call, ast.Attribute, ast.Name, ast.Subscript)
"""Expressions that `not` before them denies as a whole."""
EQUALITIES = frozenset({f"assert{kind}Equal" for kind in ("", "List", "Tuple", "Dict", "Set", "Sequence", "MultiLine")})


@dataclass(frozen=True, slots=True)
class Decoy:
    sources: Mapping[str, str]
    """Test files, by path, as they are to be instead."""
    fail: frozenset[str]
    """Tests that cannot pass in them, provided that they passed in the real ones."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replace bytes `start` to `end` of a line-numbered place; lines from 1, columns in UTF-8 bytes as `ast` counts."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def make_decoy(
    sources: Mapping[str, str],
    to_fix: Iterable[str],
    to_keep: Iterable[str],
    draw: random.Random | None = None,
    share: float = SHARE,
) -> Decoy | None:
    """`to_fix`, `to_keep`: tests that passed, by the names of their framework; None if none of `to_fix` is found.

    A test is turned round in a statement that it surely reaches: a literal that it compares with becomes another one,
    an assertion its contrary, else a false assertion comes first.
    """
    draw = draw or random.SystemRandom()
    index = {path: dict(_functions(text)) for path, text in sources.items()}
    chosen: dict[tuple[str, str], list[str]] = {}
    for names, needed in ((to_fix, True), (to_keep, False)):
        found: dict[tuple[str, str], list[str]] = {}
        for name in names:
            for path, key in places(name, index):
                found.setdefault((path, key), []).append(name)
        drawn = [place for place in found if draw.random() < share]
        if needed and not found:
            return None
        if needed and not drawn:
            drawn = [draw.choice(list(found))]
        for place in drawn:
            chosen.setdefault(place, []).extend(found[place])
    made = {}
    for path in {path for path, _ in chosen}:
        nodes = {id(node): node for at, key in chosen if at == path for node in index[path][key]}
        made[path] = _apply(sources[path], [_turn_round(node, draw) for node in nodes.values()])
    return Decoy(made, frozenset(name for names in chosen.values() for name in names))


def places(name: str, index: Mapping[str, Mapping[str, object]]) -> list[tuple[str, str]]:
    """Where a test is defined, as (path, "Class.function", "function" or docstring): one place, or none is sure."""
    if match := re.match(r"(\w+) \(((?:\w+\.)+)(\w+)\)", name):  # unittest: test_a (module.Class)
        suffix, key = match[2].rstrip(".").replace(".", "/") + ".py", f"{match[3]}.{match[1]}"
    elif "::" in name:
        suffix, *parts = name.partition("[")[0].split("::")
        key = ".".join(parts[-2:])
    elif match := re.match(r"(\S+\.py):(\w+)$", name):  # sympy
        suffix, key = match[1], match[2]
    else:  # sympy's test_a, or the docstring that unittest prints
        suffix, key = "", name
    found = [path for path in index if f"/{path}".endswith(f"/{suffix}" if suffix else "") and key in index[path]]
    return [(found[0], key)] if len(found) == 1 else []


def _functions(text: str) -> Iterator[tuple[str, list[_Function]]]:
    """Test functions and methods by name, and by the first line of their docstring; all definitions of one name
    together. Nothing of a file that does not parse here."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    found: dict[str, list[_Function]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, _Function):
                    found.setdefault(f"{node.name}.{inner.name}", []).append(inner)
                    if text_of := ast.get_docstring(inner):
                        found.setdefault(text_of.splitlines()[0].strip(), []).append(inner)
        elif isinstance(node, _Function):
            found.setdefault(node.name, []).append(node)
    for key, nodes in found.items():
        if all(_is_plain(node) for node in nodes):
            yield key, nodes


def _is_plain(node: _Function) -> bool:
    """No generator, and its body begins on a line of its own."""
    own = list(_own(node))
    return node.body[0].lineno > node.lineno and not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in own)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """All below `node` that runs with it: not what functions inside hold."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own(child)


def _turn_round(node: _Function, draw: random.Random) -> _Edit:
    reached = []
    for statement in node.body:
        if any(isinstance(part, ast.Return) for part in (statement, *_own(statement))):
            break
        reached.append(statement)
    literals = [edit for statement in reached for edit in _other_literals(statement, draw)]
    contraries = [edit for statement in reached for edit in _contraries(statement)]
    if literals or contraries:
        return draw.choice(literals or contraries)
    first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
    indent = " " * first.col_offset
    body = "".join(f"{indent}{line}\n" for line in false_assertion(draw).splitlines())
    decorators = getattr(first, "decorator_list", [])
    place = (decorators[0].lineno if decorators else first.lineno, 0)
    return _Edit(place, place, body)


def _other_literals(statement: ast.stmt, draw: random.Random) -> Iterator[_Edit]:
    """Of an equation with a literal on one side, which held: another literal cannot be equal, too."""
    for literal in _compared(statement):
        leaves = list(_leaves(literal))
        if leaves:
            leaf = draw.choice(leaves)
            yield _replace(leaf, repr(_other(leaf.value, draw)))


def _compared(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            yield from (test.left, test.comparators[0])
    elif (call := _assertion(statement)) is not None and call.func.attr in EQUALITIES and len(call.args) >= 2:  # type: ignore[attr-defined]
        yield from call.args[:2]


def _leaves(literal: ast.expr) -> Iterator[ast.Constant]:
    """Constants that the value of `literal` cannot do without; none if it is no literal."""
    if isinstance(literal, ast.Constant):
        if isinstance(literal.value, bool | int | float | str | bytes) and literal.lineno == literal.end_lineno:
            yield literal
    elif isinstance(literal, ast.List | ast.Tuple):
        for element in literal.elts:
            yield from _leaves(element)
    elif isinstance(literal, ast.Dict):
        keys = {key.value for key in literal.keys if isinstance(key, ast.Constant)}
        for value in literal.values if len(keys) == len(literal.keys) else ():
            yield from _leaves(value)


def _other(value: object, draw: random.Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + draw.choice((-2, -1, 1, 2, 3)) if abs(value) < EXACT else value // 2
    if isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        return value[:at] + draw.choice("aeinorst") + value[at:]
    assert isinstance(value, bytes)
    return value + draw.choice((b"a", b"e", b"n"))


def _contraries(statement: ast.stmt) -> Iterator[_Edit]:
    """An assertion that held, denied."""
    if isinstance(statement, ast.Assert):
        if isinstance(statement.test, TIGHT):
            yield _Edit(_start(statement.test), _start(statement.test), "not ")
    elif (call := _assertion(statement)) is not None:
        name = call.func.attr  # type: ignore[attr-defined]
        if name in FLIPPED:
            end = (call.func.end_lineno or 0, call.func.end_col_offset or 0)
            yield _Edit((end[0], end[1] - len(name)), end, FLIPPED[name])


def _assertion(statement: ast.stmt) -> ast.Call | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None


def _start(node: ast.expr) -> tuple[int, int]:
    return (node.lineno, node.col_offset)


def _replace(node: ast.expr, text: str) -> _Edit:
    return _Edit(_start(node), (node.end_lineno or 0, node.end_col_offset or 0), text)


def _apply(source: str, edits: Iterable[_Edit]) -> str:
    lines = source.encode().split(b"\n")
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, begin), (last, end) = edit.start, edit.end
        changed = lines[first - 1][:begin] + edit.text.encode() + lines[last - 1][end:]
        lines[first - 1 : last] = changed.split(b"\n")
    return b"\n".join(lines).decode()
