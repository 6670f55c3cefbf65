"""What `pearl cluster down` leaves on disks: no key; and what there is when `up` got no slot."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pearl.cluster.certificates import Certificates
from pearl.cluster.launcher import WorkerOrder
from pearl.cluster.slurm import SlurmLauncher
from pearl.config.cluster import SlurmConfig
from tests.cluster.commands import Commands, here, runs
from tests.cluster.servers import slurm, sshd
from tests.cluster.support import ROOT

ON_SLURM = ["cluster.kind=slurm", "cluster.slurm.memory=100MB", "engine.device=cpu", "elastic.preemptible_slots=1"]


def keys(folder: Path) -> list[str]:
    """Names of the files with a private key."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes())


@pytest.fixture
def partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with slurm(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield


@pytest.mark.slow
def test_jobs_leave_no_key_in_the_folder_that_nodes_share(partitions: None, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with Commands(tmp_path, *ON_SLURM, f"cluster.slurm.directory={shared}") as commands:
        assert here(commands("up")) == ["slot-0"]
        assert keys(shared) == ["worker.key"]
        commands.leaves_nothing()
        assert keys(shared) == [] and keys(commands.directory) == []


@pytest.mark.slow
def test_workers_of_other_hosts_leave_no_key_there(tmp_path: Path) -> None:
    with sshd(tmp_path / "ssh") as server:
        told = ["cluster.kind=ssh", "cluster.ssh.hosts=[here]", f"cluster.ssh.directory={ROOT}"]
        told += [f"cluster.ssh.options={json.dumps(list(server.options))}", "elastic.preemptible_slots=1"]
        with Commands(tmp_path, *told) as commands:
            assert here(commands("up")) == ["slot-0"]
            there = Path.home() / ".cache" / "pearl" / commands.state()["id"]
            try:
                assert list(there.iterdir()) and keys(there) == []
                commands.leaves_nothing()
                assert keys(there) == [] and keys(commands.directory) == []
            finally:
                shutil.rmtree(there, ignore_errors=True)


async def test_each_cluster_has_a_copy_of_its_own_that_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")  # no job is left
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    launcher = SlurmLauncher(SlurmConfig(directory=str(tmp_path / "shared")), tmp_path)
    for cluster in ("one", "other"):
        tls = Certificates.make(tmp_path / cluster)
        launcher.script(WorkerOrder(cluster, "slot-0", 1, "preemptible", "tls://10.0.0.1:1", tls=tls))
    assert [line for line in await launcher.left("one") if "a copy of the key" in line]
    await launcher.sweep("one", "slot-0")  # its other slots still need it
    assert keys(tmp_path / "shared") == ["worker.key", "worker.key"]
    await launcher.sweep("one")
    assert await launcher.left("one") == [] and keys(tmp_path / "shared") == ["worker.key"]


@pytest.mark.slow
def test_without_a_slot_up_keeps_its_scheduler_says_how_to_go_on_and_down_leaves_nothing(
    partitions: None, tmp_path: Path
) -> None:
    with Commands(tmp_path, *ON_SLURM, "cluster.slurm.partitions=[shut]") as commands:
        said = commands("up", code=1)
        on = f"--directory {commands.directory}"
        assert "slot-0: sbatch refused slot-0" in said and "0 of 1 slots are there" in said
        assert f"`pearl cluster scale 1 {on}` asks for them again, `pearl cluster down {on}` ends all" in said
        assert runs(commands.state(), "scheduler") and here(commands("status")) == []
        subprocess.run(["scontrol", "update", "PartitionName=shut", "State=UP"], check=True)
        assert here(commands("scale", "1")) == ["slot-0"]
        commands.leaves_nothing()
        assert keys(commands.directory) == []
