"""The family `shell`: `files` and `bugfix` in turn."""

from __future__ import annotations

from collections.abc import Sequence

from envs.families.bugfix import BugfixFamily
from envs.families.files import FilesFamily
from envs.protocol import Environment, Task
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig

BUGFIX_EVERY = 4


class ShellFamily:
    """Every fourth task is a bug to fix."""

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        files, bugs = FilesFamily(config, backend), BugfixFamily(config, backend)
        self._parts: list[tuple[FilesFamily | BugfixFamily, int]] = []
        for index in range(config.tasks):
            part: FilesFamily | BugfixFamily = bugs if index % BUGFIX_EVERY == BUGFIX_EVERY - 1 else files
            self._parts.append((part, sum(made is part for made, _ in self._parts)))
        self.tasks: Sequence[Task] = [part.tasks[index] for part, index in self._parts]

    def open(self, index: int) -> Environment:
        part, own = self._parts[index]
        return part.open(own)

    def solution(self, index: int) -> str:
        part, own = self._parts[index]
        return part.solution(own)
