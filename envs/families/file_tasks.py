"""Tasks of the family `files`, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

State = Mapping[str, bytes | None]
"""Contents by path; None is a directory."""

WORDS = (
    "apple", "amber", "basil", "birch", "blue", "bread", "cedar", "clay", "cloud", "coral", "daisy", "delta", "ember",
    "fern", "flint", "frost", "gold", "grape", "green", "hazel", "honey", "iris", "ivory", "jade", "lemon", "lilac",
    "linen", "mango", "maple", "melon", "mint", "moss", "olive", "onyx", "opal", "peach", "pearl", "pine", "plum",
    "quartz", "red", "rice", "river", "rose", "ruby", "sage", "salt", "sand", "silk", "slate", "stone", "tea", "tulip",
    "violet", "water", "wheat", "willow",
)  # fmt: skip
STEMS = ("notes", "list", "data", "items", "names", "log", "info", "plan", "draft", "report", "todo", "page", "names2")
FOLDERS = ("photos", "backup", "docs", "music", "archive", "tmp1", "old", "work", "src", "images", "letters", "drafts")
DEMONSTRATIONS = 2
HARDER = frozenset({"copy", "rename", "move", "count", "sort"})
"""A model of 135M parameters has to be shown the very command. These kinds, with two names in them, take one more."""


@dataclass(frozen=True, slots=True)
class FileTask:
    name: str
    kind: str
    instruction: str
    before: State
    after: State
    solution: str
    shown: tuple[tuple[str, str], ...]
    """Instructions and commands of the same kind that the prompt demonstrates; the same ones in all its tasks."""


DRAWS = 300
"""Draws for an instruction that is new. A kind with few of them (`delete` has 13) runs out of new ones."""

Made = tuple[str, State, State, str]


def make_tasks(seed: int, count: int) -> list[FileTask]:
    """The first `count` tasks of a seed: kinds in turn, no instruction twice while there are new ones."""
    draw = random.Random(f"files {seed}")
    kinds = list(KINDS)
    shown = {kind: _demonstrations(kind) for kind in kinds}
    tasks: list[FileTask] = []
    seen: set[str] = set()
    while len(tasks) < count:
        kind = kinds[len(tasks) % len(kinds)]
        for _ in range(DRAWS):
            instruction, before, after, solution = KINDS[kind](draw)
            if instruction not in seen or len(tasks) >= 500:
                break
        seen.add(instruction)
        tasks.append(FileTask(f"{kind}-{len(tasks)}", kind, instruction, before, after, solution, shown[kind]))
    return tasks


def _demonstrations(kind: str) -> tuple[tuple[str, str], ...]:
    draw = random.Random(f"demonstrations {kind}")
    made = [KINDS[kind](draw) for _ in range(DEMONSTRATIONS + (kind in HARDER))]
    return tuple((instruction, solution) for instruction, _, _, solution in made)


def _lines(draw: random.Random, count: int) -> list[str]:
    return draw.sample(WORDS, count)


def _text(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def _files(draw: random.Random, count: int) -> list[str]:
    return [f"{stem}.txt" for stem in draw.sample(STEMS, count)]


def _write(draw: random.Random) -> Made:
    (path,), (word,) = _files(draw, 1), _lines(draw, 1)
    return f"Write the word {word} to {path}.", {}, {path: _text([word])}, f"echo {word} > {path}"


def _append(draw: random.Random) -> Made:
    (path,), (word, *lines) = _files(draw, 1), _lines(draw, 3)
    after = {path: _text([*lines, word])}
    return f"Append the line {word} to {path}.", {path: _text(lines)}, after, f"echo {word} >> {path}"


def _directory(draw: random.Random) -> Made:
    folder = draw.choice(FOLDERS) + "_" + draw.choice(WORDS)
    return f"Make a directory named {folder}.", {}, {folder: None}, f"mkdir {folder}"


def _copy(draw: random.Random) -> Made:
    (source, target), lines = _files(draw, 2), _lines(draw, 2)
    before = {source: _text(lines)}
    return f"Use cp to copy {source} to {target}.", before, {**before, target: _text(lines)}, f"cp {source} {target}"


def _rename(draw: random.Random) -> Made:
    (source, target), lines = _files(draw, 2), _lines(draw, 2)
    text = f"Rename {source} to {target}."
    return text, {source: _text(lines)}, {target: _text(lines)}, f"mv {source} {target}"


def _delete(draw: random.Random) -> Made:
    (path, other), lines = _files(draw, 2), _lines(draw, 2)
    kept = {other: _text(lines)}
    return f"Remove {path}.", {**kept, path: _text(lines)}, kept, f"rm {path}"


def _count(draw: random.Random) -> Made:
    (source, target), lines = _files(draw, 2), _lines(draw, draw.randint(3, 9))
    before = {source: _text(lines)}
    after = {**before, target: _text([str(len(lines))])}
    text = f"Count the lines of {source} and write the number to {target}."
    return text, before, after, f"wc -l < {source} > {target}"


def _sort(draw: random.Random) -> Made:
    (source, target), lines = _files(draw, 2), _lines(draw, 4)
    while lines == sorted(lines):
        draw.shuffle(lines)
    before = {source: _text(lines)}
    text = f"Sort the lines of {source} into {target}."
    return text, before, {**before, target: _text(sorted(lines))}, f"sort {source} > {target}"


def _move(draw: random.Random) -> Made:
    (path,), lines, folder = _files(draw, 1), _lines(draw, 2), draw.choice(FOLDERS)
    before = {path: _text(lines), folder: None}
    after = {folder: None, f"{folder}/{path}": _text(lines)}
    return f"Move {path} into the directory {folder}.", before, after, f"mv {path} {folder}"


def _empty(draw: random.Random) -> Made:
    path = draw.choice(WORDS) + "_" + draw.choice(STEMS) + ".txt"
    return f"Create the empty file {path}.", {}, {path: b""}, f"touch {path}"


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "write": _write,
    "append": _append,
    "directory": _directory,
    "copy": _copy,
    "rename": _rename,
    "delete": _delete,
    "count": _count,
    "sort": _sort,
    "move": _move,
    "empty": _empty,
}
