"""`pearl cluster`: what it starts outlives it, and `down` leaves nothing, whatever was killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pearl.cluster.launcher import tag_prefix
from pearl.cluster.reap import tagged
from tests.cluster.commands import Commands, State, here, killed_at_every_moment, slots_here
from tests.cluster.servers import slurm, sshd
from tests.cluster.support import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with Commands(tmp_path) as commands:
        yield commands


def test_up_status_scale_and_down(commands: Commands) -> None:
    status = commands("up", "--slots", "1")
    assert here(status) == ["slot-0"] and status["address"].startswith("tls://127.0.0.1") and not status["driver"]
    assert "says that there is a cluster" in commands("up", "--slots", "1", code=2)
    assert here(commands("scale", "2")) == ["slot-0", "slot-1"]
    assert here(commands("scale", "1")) == ["slot-0"]
    assert len(tagged(tag_prefix(commands.state()["id"]))) == 2, "that one and the scheduler"
    commands.leaves_nothing()


def test_a_second_down_ends_what_a_killed_command_had_started(commands: Commands) -> None:
    killed_at_every_moment(commands, slots_here)


@pytest.fixture
def over_ssh(tmp_path: Path) -> Iterator[Commands]:
    with sshd(tmp_path / "ssh") as server:
        options = json.dumps(list(server.options))
        told = ["cluster.kind=ssh", "cluster.ssh.hosts=[here]", f"cluster.ssh.options={options}"]
        told += ["cluster.ssh.slots_per_host=2", f"cluster.ssh.directory={ROOT}", "elastic.preemptible_slots=1"]
        with Commands(tmp_path, *told) as commands:
            yield commands


def test_slots_of_other_hosts_outlive_the_command_and_are_found_again(over_ssh: Commands) -> None:
    assert here(over_ssh("up")) == ["slot-0"]
    over_ssh.leaves_nothing()


def test_a_second_down_ends_what_a_killed_command_had_started_on_other_hosts(over_ssh: Commands) -> None:
    killed_at_every_moment(over_ssh, slots_here)


def test_a_second_down_ends_the_jobs_of_a_killed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))

        def jobs(state: State) -> list[str]:
            return subprocess.run(["squeue", "-h"], check=True, capture_output=True, text=True).stdout.splitlines()

        told = ["cluster.kind=slurm", "cluster.slurm.memory=100MB", "engine.device=cpu", "elastic.preemptible_slots=1"]
        with Commands(tmp_path, *told) as commands:
            killed_at_every_moment(commands, jobs)
