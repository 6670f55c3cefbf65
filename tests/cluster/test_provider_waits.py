"""Providers that say nothing: every question to one has an end. Their programs are scripts that a test writes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster import existing, machines, slurm, ssh, standing
from pearl.cluster.certificates import Certificates
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.existing import ExistingCluster, FreeProcess, probe
from pearl.cluster.launcher import LaunchFailed, WorkerOrder, WorkerProcess
from pearl.cluster.machines import Machine, MachineLauncher
from pearl.cluster.slurm import SlurmJob, SlurmLauncher
from pearl.cluster.ssh import SshLauncher
from pearl.cluster.standing import StandingCluster, State
from pearl.config.cluster import ClusterConfig, SlurmConfig, SshConfig
from pearl.core.requests import Cause
from pearl.errors import RunFailed, UserError

LIMIT_S = 0.3
LATE_S = 20.0
"""A test that hangs ends here."""
FOR_EVER = "exec sleep 600"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script of that name before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


async def within(awaited: Any) -> Any:
    return await asyncio.wait_for(awaited, LATE_S)


async def test_a_scheduler_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(existing, "CONNECT_S", LIMIT_S)
    monkeypatch.setattr(standing, "ASK_S", LIMIT_S)
    monkeypatch.setattr(Certificates, "security", lambda self: Plain())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no Dask scheduler answers at cluster\.address"):
            await within(probe(address, None))
        Certificates.make(tmp_path / "tls")
        state = State("c", ClusterConfig().model_dump(mode="json"), 0, 1, address)
        state.save(tmp_path / standing.STATE)
        status = await within(StandingCluster(tmp_path, print).status())
        assert status["scheduler"] != "here" and status["slots"] == []


class Plain:
    """In the place of a Security: no TLS."""

    def get_connection_args(self, role: str) -> dict[str, Any]:
        return {}


async def test_a_free_worker_that_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(existing, "KILL_S", LIMIT_S)
    cluster = ExistingCluster("tcp://127.0.0.1:1", tmp_path, lambda *_: None, host="127.0.0.1", tls=None)
    with pytest.raises(ActorTimeout, match="a-0 was to begin anew and is still there"):
        await within(FreeProcess(cluster, "a-0", "tcp://127.0.0.1:2").ended())


async def test_ssh_that_never_ends(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ssh, "COMMAND_S", LIMIT_S)
    program("ssh", FOR_EVER)
    launcher = SshLauncher(SshConfig(hosts=("a", "b")), tmp_path, width=1)
    with pytest.raises(UserError, match=r"a .*: timed out after 0\.3 s; b .*: timed out after 0\.3 s"):
        await within(launcher.check())
    with pytest.raises(LaunchFailed) as failed:
        await within(launcher.left("c"))
    assert failed.value.cause is Cause.UNREACHABLE


async def test_slurm_commands_that_never_end(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm, "COMMAND_S", LIMIT_S)
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo"):
        program(name, FOR_EVER)
    with pytest.raises(UserError, match=r"Slurm does not answer \(sinfo timed out after 0\.3 s\)"):
        await within(SlurmLauncher(SlurmConfig(), tmp_path).check())


async def test_a_job_that_does_not_leave_the_queue(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm, "GONE_S", LIMIT_S)
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    program("squeue", 'case "$*" in *-j*) echo "RUNNING|None" ;; *) echo "7|pearl-c-w-0|RUNNING" ;; esac')
    program("scancel", "exit 0")
    launcher = SlurmLauncher(SlurmConfig(), tmp_path)
    job = SlurmJob(launcher, "w-0", "7", tmp_path / "log")
    job.end()
    with pytest.raises(ActorTimeout, match="w-0: job 7 is still RUNNING"):
        await within(job.ended())
    await within(launcher.sweep("c"))  # gives up
    assert await within(launcher.left("c")) == ["job 7 pearl-c-w-0 RUNNING"]
    assert await within(launcher.left("c", "w")) == [], "of another slot"


async def test_a_job_that_waits_for_too_long_is_withdrawn(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    program("squeue", f'[ -e {tmp_path}/cancelled ] || echo "PENDING|Resources"')
    program("scontrol", 'echo "JobId=7 JobState=CANCELLED Reason=None"')
    program("scancel", f"touch {tmp_path}/cancelled")
    job = SlurmJob(SlurmLauncher(SlurmConfig(queue_s=0.2), tmp_path), "w-0", "7", tmp_path / "log")
    await within(job.wait())
    failed = job.failed()
    assert failed is not None and failed.cause is Cause.CAPACITY and "(Resources)" in str(failed)
    assert job.how("gone") == "Slurm job 7: CANCELLED, None"


async def test_a_scheduler_of_a_standing_cluster_that_never_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(standing, "SCHEDULER_S", LIMIT_S)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 30\n")
    silent.chmod(0o755)
    cluster = StandingCluster(tmp_path / "cluster", print)
    cluster.directory.mkdir()
    state = State("c" * 16, ClusterConfig().model_dump(mode="json"), 0, 1)
    state.save(cluster.path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(silent))
        with pytest.raises(RunFailed, match="the scheduler does not start"):
            await within(cluster._start_scheduler(state, ClusterConfig()))
    assert await within(cluster.down()) == [], "its process is ended"


async def test_workers_of_a_standing_cluster_that_never_join_or_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(standing, "POLL_S", 0.05)
    cluster = StandingCluster(tmp_path, print)
    who = {"slot": "slot-0", "incarnation": 1}
    here: dict[str, Any] = {"claimed": True, "events": [{"kind": "joined", "identity": who}]}
    asked = []

    async def ask(state: State, operation: str, **what: Any) -> Any:
        asked.append(operation)
        return here

    monkeypatch.setattr(cluster, "_ask", ask)
    state = State("c", {}, 0, 1, "tcp://127.0.0.1:1")
    jobs: dict[str, WorkerProcess] = {
        name: SlurmJob(SlurmLauncher(SlurmConfig(), tmp_path), name, "7", tmp_path) for name in ("slot-0", "slot-1")
    }
    missing = await within(cluster._joined(state, jobs, LIMIT_S))
    assert missing == {"slot-1": "it did not join within 0.3 s; Slurm job 7: PENDING"}
    await within(cluster._warn(state, ["slot-0"], LIMIT_S))
    assert "pearl_notice" in asked
    asked.clear()
    here["claimed"] = False
    await within(cluster._warn(state, ["slot-0"], 600.0))
    assert asked == ["pearl_members"], "there is no driver to drain it"


async def test_two_commands_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(standing, "LOCK_S", 0.1)
    cluster = StandingCluster(tmp_path, print)
    (tmp_path / standing.STATE).write_text(json.dumps({"id": "c", "config": {}, "width": 0, "threads": 1}))
    with cluster._alone(), pytest.raises(UserError, match="another process holds the lock"):
        await within(cluster.down())


class Stubborn(MachineLauncher):
    """Its one machine runs for ever."""

    name, causes = "cloud", ()

    async def check(self) -> None: ...

    async def create(self, order: WorkerOrder) -> Machine:
        return Machine("m-1", order.slot, "running", alive=True, there=True)

    async def find(self, cluster: str) -> list[Machine]:
        return [Machine("m-1", "a-0", "running", alive=True, there=True)]

    async def delete(self, machines: Sequence[Machine]) -> None: ...


async def test_a_machine_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "GONE_S", LIMIT_S)
    launcher = Stubborn(["small"], 1, free=False)
    launcher.look_s = 0.01
    process = await launcher.start(WorkerOrder("c", "a-0", 1, "preemptible", "tls://10.0.0.1:1"))
    process.end()
    with pytest.raises(ActorTimeout, match="m-1 of a-0 is still running"):
        await within(process.ended())
    await within(launcher.sweep("c"))
    assert await launcher.left("c") == ["machine m-1 (a-0): running"]


async def test_a_cloud_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "ANSWER_S", LIMIT_S)
    with pytest.raises(LaunchFailed, match="GCP did not answer") as caught:
        await within(machines.answered("GCP", asyncio.Event().wait()))
    assert caught.value.cause is Cause.UNREACHABLE
