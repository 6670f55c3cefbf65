"""`pearl cluster`, as a user calls it: what it starts outlives it, and `down` leaves nothing, whatever was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.reap import reap, tagged
from tests.cluster.servers import sshd
from tests.cluster.support import ENVIRONMENT, ROOT

COMMAND_S = 240.0
pytestmark = pytest.mark.slow


class Commands:
    """`pearl cluster …` on one directory."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.directory, self.overrides = folder / "cluster", overrides
        self.state_file = self.directory / "cluster.json"

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

    def killed_when(self, command: str, *words: str, seen: Any) -> None:
        """The command is killed as soon as `seen(state)` is true of the state file."""
        process = self.start(command, *words)
        until = time.monotonic() + COMMAND_S
        while not (self.state_file.exists() and seen(self.state())):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def state(self) -> dict[str, Any]:
        return json.loads(self.state_file.read_text())  # type: ignore[no-any-return]

    @property
    def running(self) -> int:
        return len(tagged(f"{self.state()['id']}/"))

    def leaves_nothing(self) -> None:
        tag = f"{self.state()['id']}/"
        assert self("down") == {"left": []}
        assert tagged(tag) == [] and not self.state_file.exists()
        assert "there is no cluster" in self("down", code=2)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    if commands.state_file.exists():
        reap(f"{commands.state()['id']}/")


def here(status: dict[str, Any]) -> list[str]:
    return [slot["slot"] for slot in status["slots"] if slot["state"] == "here"]


def test_up_status_scale_and_down(commands: Commands) -> None:
    status = commands("up", "--slots", "1")
    assert here(status) == ["slot-0"] and status["address"].startswith("tls://127.0.0.1") and not status["driver"]
    assert "says that there is a cluster" in commands("up", "--slots", "1", code=2)
    assert here(commands("scale", "2")) == ["slot-0", "slot-1"]
    assert here(commands("scale", "1")) == ["slot-0"] and commands.running == 2
    commands.leaves_nothing()


def test_a_second_down_ends_what_a_killed_command_had_started(commands: Commands) -> None:
    commands.killed_when("up", "--slots", "2", seen=lambda state: True)
    commands.leaves_nothing()
    commands.killed_when("up", "--slots", "2", seen=lambda state: state["slots"])
    assert commands.running > 0
    commands.killed_when("scale", "3", seen=lambda state: len(state["slots"]) == 3)
    before = len(commands.state()["slots"])
    commands.killed_when("scale", "1", seen=lambda state: len(state["slots"]) < before)
    tag, down = f"{commands.state()['id']}/", commands.start("down")
    while len(tagged(tag)) > 1 and down.poll() is None:
        pass
    down.kill()
    down.communicate()
    if commands.state_file.exists():  # else it was done before it was killed
        commands.leaves_nothing()


def test_slots_of_other_hosts_outlive_the_command_and_are_found_again(tmp_path: Path) -> None:
    with sshd(tmp_path / "ssh") as server:
        options = json.dumps(list(server.options))
        commands = Commands(
            tmp_path, "cluster.kind=ssh", "cluster.ssh.hosts=[here]", f"cluster.ssh.options={options}",
            f"cluster.ssh.directory={ROOT}", "elastic.policy=elastic", "elastic.preemptible_slots=1",
        )  # fmt: skip
        status = commands("up")
        assert here(status) == ["slot-0"]
        commands.leaves_nothing()
