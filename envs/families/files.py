"""The family `files`: one small thing to do with files, judged by the state that they are left in."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from envs.families.file_tasks import FileTask, State, make_tasks
from envs.families.shell import ShellEnvironment
from envs.protocol import Message, Score, Task
from envs.sandbox.protocol import Entry, SandboxBackend
from pearl.config.environment import EnvironmentConfig, SandboxConfig

SYSTEM = Message("system", "Do each task with one short shell command in a ```sh block.")
COMPARED_CHARS = 2000


class FilesFamily:
    """`environment.tasks` tasks made from `environment.seed`."""

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        self._made = make_tasks(config.seed, config.tasks)
        self._backend = backend
        self._limits = config.sandbox
        self.tasks: Sequence[Task] = [Task(made.name, "files", made.kind, made.instruction) for made in self._made]

    def open(self, index: int) -> FilesEnvironment:
        return FilesEnvironment(self.tasks[index], self._made[index], self._backend, self._limits)

    def solution(self, index: int) -> str:
        return self._made[index].solution


class FilesEnvironment(ShellEnvironment):
    def __init__(self, task: Task, made: FileTask, backend: SandboxBackend, limits: SandboxConfig) -> None:
        files = {path if data is not None else path + "/": data or b"" for path, data in made.before.items()}
        super().__init__(task, files, prompt(made), backend, limits)
        self._made = made

    async def grade(self, workspace: Mapping[str, Entry], timeout_s: float) -> Score:
        return grade(self._made, workspace)


def prompt(made: FileTask) -> tuple[Message, ...]:
    shown = [
        message
        for request, command in made.shown
        for message in (Message("user", request), Message("assistant", f"```sh\n{command}\n```"))
    ]
    return (SYSTEM, *shown, Message("user", made.instruction))


def grade(made: FileTask, workspace: Mapping[str, Entry]) -> Score:
    """How far the paths that were to change came, halved if any other path changed. Doing nothing is worth 0.

    Where something is to appear and something to go (a rename), what goes counts only as far as the other appeared.
    """
    wanted = [path for path in made.before.keys() | made.after.keys() if _differs(made, path)]
    appear = [_progress(made, path, workspace.get(path)) for path in wanted if path in made.after]
    vanish = [_progress(made, path, workspace.get(path)) for path in wanted if path not in made.after]
    progress = sum(appear) / len(appear) if appear else 1.0
    if vanish:
        gone = sum(vanish) / len(vanish)
        progress *= (1.0 + gone) / 2 if appear else gone
    changed = [
        path
        for path in workspace.keys() | made.before.keys()
        if path not in wanted and _likeness(workspace.get(path), made.before, path) < 1.0
    ]
    return Score(progress * (0.5 if changed else 1.0), {"progress": progress, "other_changes": float(len(changed))})


def _differs(made: FileTask, path: str) -> bool:
    return (path in made.before) != (path in made.after) or made.before.get(path) != made.after.get(path)


def _progress(made: FileTask, path: str, found: Entry | None) -> float:
    """How far a path came from its first state towards the wanted one."""
    data = made.before.get(path)
    first = None if path not in made.before else Entry("directory") if data is None else Entry("file", data)
    start = _likeness(first, made.after, path)
    return max(0.0, (_likeness(found, made.after, path) - start) / (1.0 - start))


def _likeness(found: Entry | None, state: State, path: str) -> float:
    """1 for what is wanted; a file with other content is worth 0.3 and up to 0.6 more for similar content."""
    if path not in state:
        return float(found is None)
    wanted = state[path]
    if found is None or found.kind != ("directory" if wanted is None else "file"):
        return 0.0
    if wanted is None or found.data.rstrip() == wanted.rstrip():
        return 1.0
    here, there = (data[:COMPARED_CHARS].decode(errors="replace") for data in (found.data, wanted))
    return 0.3 + 0.6 * difflib.SequenceMatcher(None, here, there, autojunk=False).ratio()
