"""One-line faults in Python source, found in its syntax tree: wrong comparisons, operators, constants, conditions."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.Lt: (b"<", b"<="),
    ast.Gt: (b">", b">="),
    ast.LtE: (b"<=", b"<"),
    ast.GtE: (b">=", b">"),
    ast.Is: (b"is", b"is not"),
    ast.IsNot: (b"is not", b"is"),
    ast.In: (b"in", b"not in"),
    ast.NotIn: (b"not in", b"in"),
}
OPERATORS: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (b"+", b"-"),
    ast.Sub: (b"-", b"+"),
    ast.Mult: (b"*", b"+"),
    ast.FloorDiv: (b"//", b"*"),
    ast.Mod: (b"%", b"//"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`wrong` instead of `right` in line `line` (from 1) of `path`."""

    path: str
    line: int
    right: str
    wrong: str


def find_faults(path: str, source: str) -> list[Fault]:
    """All faults that could be put into a file, in the order of its lines. Empty for what does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.encode().split(b"\n")
    found: dict[Fault, None] = {}
    for node in ast.walk(tree):
        for line, start, end, old, new in _edits(node):
            text = lines[line - 1]
            if text[start:end].count(old) == 1:
                wrong = text[:start] + text[start:end].replace(old, new) + text[end:]
                fault = Fault(path, line, text.decode(), wrong.decode())
                if _parses(lines, fault):
                    found[fault] = None
    return sorted(found, key=lambda fault: (fault.line, fault.wrong))


def apply_fault(source: str, fault: Fault) -> str:
    lines = source.split("\n")
    assert lines[fault.line - 1] == fault.right, fault
    return "\n".join([*lines[: fault.line - 1], fault.wrong, *lines[fault.line :]])


def diff(path: str, before: str, after: str) -> str:
    """A patch as git writes it, for two versions of a file that end in a newline."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


Edit = tuple[int, int, int, bytes, bytes]
"""Line, from which byte to which, what is replaced there, by what."""


def _edits(node: ast.AST) -> Iterator[Edit]:
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and (swap := COMPARISONS.get(type(node.ops[0]))):
        yield node.lineno, node.left.end_col_offset or 0, node.comparators[0].col_offset, *swap
    elif isinstance(node, ast.BinOp) and (swap := OPERATORS.get(type(node.op))):
        yield node.lineno, node.left.end_col_offset or 0, node.right.col_offset, *swap
    elif isinstance(node, ast.BoolOp):
        old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        yield node.lineno, node.values[0].end_col_offset or 0, node.values[1].col_offset, old, new
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        expression = ast.unparse(node.value).encode()
        yield node.lineno, node.value.col_offset, node.value.end_col_offset or 0, expression, b"None"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno, node.col_offset, node.operand.col_offset, b"not ", b""
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        old = str(node.value).encode()
        yield node.lineno, node.col_offset, node.end_col_offset or 0, old, str(not node.value).encode()
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        old = str(node.value).encode()
        yield node.lineno, node.col_offset, node.end_col_offset or 0, old, str(node.value + 1).encode()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _parses(lines: list[bytes], fault: Fault) -> bool:
    changed = [*lines[: fault.line - 1], fault.wrong.encode(), *lines[fault.line :]]
    try:
        ast.parse(b"\n".join(changed))
    except (SyntaxError, ValueError):
        return False
    return True
