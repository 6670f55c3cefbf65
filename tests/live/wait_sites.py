"""Finds the places in the source where something is waited for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pearl/live", "pearl/cluster", "actors", "trainer", "envs/sandbox", "envs/swebench", "envs/families")
FILES = ("envs/agent.py", "pearl/locks.py", "pearl/lifeline.py", "pearl/models.py")

AWAITING_CALLS = {
    "waits.open", "waits.until", "_awaiting",  # registered
    "asyncio.timeout", "asyncio.wait_for", "asyncio.wait",  # asyncio
    "wait", "acquire", "communicate", "waitid", "poll",  # processes, events, locks
    "subprocess.run", "os.read", "asyncio.sleep", "time.sleep",
    "asyncio.to_thread", "in_own_thread", "locked",  # files
    "barrier", "all_reduce", "init_distributed",  # other ranks
}  # fmt: skip
"""Last part of a called name, or its last two where that is needed to tell it from others."""
ACTOR_CALLS = {"call": 1, "_all": 0, "_ask": 2}
"""Ways to call an actor, and which argument names the method."""


def wait_sites() -> dict[str, set[str]]:
    """What is waited with, by place: "folder/file.py:Class.method"."""
    sites: dict[str, set[str]] = {}
    for path, tree in _modules():
        for place, node in _walk(tree, ()):
            if what := _wait(node):
                sites.setdefault(f"{path}:{place}", set()).add(what)
    return sites


def actor_calls() -> set[str]:
    """Every call of the driver to an actor, as "rollout.py generate"."""
    found = set()
    for path, tree in _modules():
        if path.startswith("pearl/live/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (at := ACTOR_CALLS.get(_name(node.func)[-1])) is not None:
                    method = node.args[at] if at < len(node.args) else None
                    if isinstance(method, ast.Constant) and isinstance(method.value, str):
                        found.add(f"{Path(path).name} {method.value}")
    return found


def _modules() -> Iterator[tuple[str, ast.Module]]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*paths, *(ROOT / file for file in FILES)]:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def _walk(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        here = (*inside, child.name) if named else inside  # type: ignore[attr-defined]
        yield ".".join(here), child
        yield from _walk(child, here)


def _wait(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return next((n for n in (".".join(name[-2:]), name[-1]) if n in AWAITING_CALLS), None)
    if isinstance(node, ast.AsyncWith):
        for item in node.items:
            if isinstance(item.context_expr, ast.Attribute):  # a lock; all else is called
                return f"lock {item.context_expr.attr}"
    return None


def _name(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_name(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


if __name__ == "__main__":
    for site, kinds in wait_sites().items():
        print(site, sorted(kinds))
    print(sorted(actor_calls()))
