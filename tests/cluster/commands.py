"""`pearl cluster`, as a user calls it, and killed at many moments."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pearl.cluster.launcher import tag_prefix
from pearl.cluster.reap import reap, tagged
from pearl.cluster.standing import SCHEDULER
from tests.cluster.support import ENVIRONMENT, ROOT

COMMAND_S = 240.0
State = dict[str, Any]


class Commands:
    """`pearl cluster …` on one directory. At the end of the context what is left on this machine is killed."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.directory, self.overrides = folder / "cluster", overrides
        self.state_file = self.directory / "cluster.json"

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        if self.state_file.exists():
            reap(f"{self.state()['id']}/")

    def line(self, command: str, *words: str) -> list[str]:
        up = (
            [str(ROOT / "examples" / "tiny.yaml"), "elastic.policy=elastic", *self.overrides] if command == "up" else []
        )
        where = ["--directory", str(self.directory), "--json"]
        return [sys.executable, "-m", "pearl.cli", "cluster", command, *up, *words, *where]

    def start(self, command: str, *words: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.line(command, *words), cwd=ROOT, env={**os.environ, **ENVIRONMENT}, **pipes)

    def __call__(self, command: str, *words: str, code: int = 0) -> Any:
        process = self.start(command, *words)
        out, err = process.communicate(timeout=COMMAND_S)
        assert process.returncode == code, err
        return json.loads(out.splitlines()[-1]) if out.strip() else err

    def killed_when(self, command: str, *words: str, seen: Callable[[State], object]) -> bool:
        """SIGKILLed as soon as `seen(state)` is true of the state file. False if it had done its work before."""
        process = self.start(command, *words)
        until = time.monotonic() + COMMAND_S
        try:
            while process.poll() is None:
                with contextlib.suppress(FileNotFoundError):
                    if seen(self.state()):
                        return True
                assert time.monotonic() < until, f"{command} is not as far as that"
            assert process.returncode == 0, process.communicate()
            return False
        finally:
            process.kill()
            process.communicate()

    def state(self) -> State:
        state: State = json.loads(self.state_file.read_text())
        return state

    def leaves_nothing(self) -> None:
        tag = f"{self.state()['id']}/"
        assert self("down") == {"left": []}
        assert tagged(tag) == [] and not self.state_file.exists()
        assert "there is no cluster" in self("down", code=2)


def runs(state: State, name: str) -> bool:
    """Whether this machine has a process of the cluster's slot, or of its scheduler."""
    return bool(tagged(tag_prefix(state["id"], name)))


def slots_here(state: State) -> list[str]:
    return [name for name in state["slots"] if runs(state, name)]


def here(status: dict[str, Any]) -> list[str]:
    return [slot["slot"] for slot in status["slots"] if slot["state"] == "here"]


def killed_at_every_moment(commands: Commands, there: Callable[[State], Sequence[str]]) -> None:
    """`up`, `scale` and `down`, each at several moments, told by its state file and by what is `there` at the provider.

    What comes after a killed command finds all that it had started; in the end nothing is left.
    """
    assert commands.killed_when("up", "--slots", "2", seen=lambda state: True)
    commands.leaves_nothing()
    assert commands.killed_when("up", "--slots", "2", seen=lambda state: state["slots"])
    commands.leaves_nothing()
    assert commands.killed_when("up", "--slots", "2", seen=there)
    assert commands.killed_when("scale", "2", seen=lambda state: len(there(state)) == 2)
    assert commands.killed_when("scale", "1", seen=lambda state: len(there(state)) < 2)
    assert here(commands("scale", "2")) == sorted((state := commands.state())["slots"])
    for moment in (lambda state: not runs(state, SCHEDULER), lambda state: len(there(state)) < 2):
        if not commands.killed_when("down", seen=moment):
            break  # it was done before it could be killed
    else:
        commands.leaves_nothing()
    assert not there(state) and not commands.state_file.exists()
