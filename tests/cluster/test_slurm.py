"""Slots as jobs of a real Slurm: slurmctld and two slurmd on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.adapter import SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.certificates import Certificates
from pearl.cluster.launcher import WorkerOrder
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.local import LocalCluster
from pearl.cluster.slurm import SlurmLauncher, cause_of, job_name
from pearl.config.cluster import NoticesConfig, SlurmConfig
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.servers import slurm
from tests.cluster.support import ENVIRONMENT, EVENT_S, ROOT, START_S

ONE_GPU = SlotShape(gpus=1)
GRACE_S = 8.0
SMALL = {"memory": "100MB", "notice_s": 10}


class Setup:
    """An adapter of two slots; it asks the partition first that takes no jobs."""

    def __init__(self, folder: Path) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        notices = NoticesConfig(sigterm_grace_s=GRACE_S)
        self.cluster = LocalCluster(folder / "workers", lambda *_: None, notices=notices)
        self.launcher = SlurmLauncher(SlurmConfig(partitions=("shut", "spot"), **SMALL), folder / "workers")
        self.cluster.launchers[Zone.PREEMPTIBLE] = self.launcher
        bindings = [Binding(f"preemptible-{i}", Zone.PREEMPTIBLE, (), 1, elsewhere=True) for i in range(2)]
        self.adapter = LaunchingAdapter(self.cluster, bindings, self.events.put_nowait, START_S)

    async def event(self, kind: type[Event]) -> Any:
        event = await asyncio.wait_for(self.events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event

    async def joined(self, count: int) -> list[SlotJoined]:
        found: list[SlotJoined] = []
        while len(found) < count:
            event = await self.event(Event)
            found += [event] if isinstance(event, SlotJoined) else []
        return found


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    with slurm(tmp_path / "slurm") as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        setup = Setup(tmp_path)
        async with setup.cluster:
            await setup.adapter.connect()
            yield setup
            await setup.adapter.close()
        assert await setup.launcher.left(setup.cluster.id) == []


def sbatch(*line: str) -> None:
    subprocess.run(["sbatch", "-o", "/dev/null", *line], check=True, capture_output=True)


@pytest.mark.slow
async def test_jobs_become_slots_get_notice_before_a_preemption_and_leave_nothing(setup: Setup) -> None:
    await setup.adapter.request(Zone.PREEMPTIBLE, 2, ONE_GPU)
    joined = await setup.joined(2)
    devices = [event.slot.gpus for event in joined]
    assert all(len(gpus) == 1 for gpus in devices), "the GPU that Slurm gave"
    jobs = await setup.launcher.left(setup.cluster.id)
    assert len(jobs) == 2 and all("RUNNING" in job for job in jobs)

    sbatch("-p", "reserved", "-N", "2", "--gres=gpu:2", "--mem=100", "--wrap", "sleep 300")
    notices = [await setup.event(SlotNotice), await setup.event(SlotNotice)]
    assert {notice.worker for notice in notices} == {event.slot.name for event in joined}
    assert all(0 < notice.seconds_left <= GRACE_S for notice in notices)
    name = notices[0].worker
    await setup.adapter.release([name])  # it was drained in time
    lost = [await setup.event(SlotLost), await setup.event(SlotLost)]
    lives = {event.slot.name: event.life for event in joined}
    assert SlotLost(name, lives[name], "given back") in lost
    await setup.adapter.request(Zone.PREEMPTIBLE, 0, ONE_GPU)


@pytest.mark.slow
async def test_the_end_of_the_time_limit_is_a_notice(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = setup.launcher.config.model_copy(update={"time_limit": "00:01:00", "notice_s": 55})
    monkeypatch.setattr(setup.launcher, "config", limited)
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, ONE_GPU)
    await setup.joined(1)
    assert (await setup.event(SlotNotice)).seconds_left <= GRACE_S
    assert (await setup.event(SlotLost)).reason.startswith("closed")


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.cluster.test_slurm import ONE_GPU, Setup, Zone
async def main():
    setup = Setup(Path(sys.argv[1]))
    async with setup.cluster:
        await setup.adapter.connect()
        await setup.adapter.request(Zone.PREEMPTIBLE, 1, ONE_GPU)
        await setup.joined(1)
        print(setup.cluster.id, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_jobs_of_a_killed_driver_end_by_themselves(setup: Setup, tmp_path: Path) -> None:
    pipe, variables = asyncio.subprocess.PIPE, {**os.environ, **ENVIRONMENT}
    line = [sys.executable, "-c", DRIVER, str(tmp_path)]
    driver = await asyncio.create_subprocess_exec(*line, stdout=pipe, cwd=ROOT, env=variables)
    assert driver.stdout is not None
    cluster = (await asyncio.wait_for(driver.stdout.readline(), START_S + EVENT_S)).decode().strip()
    assert await setup.launcher.left(cluster)
    driver.kill()
    await driver.wait()
    async with asyncio.timeout(EVENT_S):
        while await setup.launcher.left(cluster):
            pass


async def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"cluster\.kind = slurm needs sbatch"):
        await SlurmLauncher(SlurmConfig(), tmp_path).check()


def test_a_script_starts_a_step_and_holds_no_secret(tmp_path: Path) -> None:
    tls = Certificates.make(tmp_path / "tls")
    config = SlurmConfig(account="a", directives=("--constraint=h100",), prologue=("module load cuda",))
    order = WorkerOrder(
        "c0", "slot-1", 7, "preemptible", "tls://10.0.0.1:1", 2, 3, {"A": "b c"}, tls=tls, option="spot"
    )
    script = SlurmLauncher(config, tmp_path / "logs").script(order)
    lines = script.splitlines()
    assert lines[0].startswith("#!") and f"#SBATCH -J {job_name('c0', 'slot-1')}" in lines
    for line in ("-p spot", "-A a", "--gres=gpu:2", "--constraint=h100", "--cpus-per-task=3", "--signal=TERM@120"):
        assert f"#SBATCH {line}" in lines
    assert "module load cuda" in lines and "export A='b c'" in lines
    assert lines[-1].startswith("exec srun --overlap --export=ALL") and "--incarnation 7" in lines[-1]
    assert "--join-s 300" in lines[-1], "a job that starts after its driver has ended does not wait for it"
    keys = [path.read_text().splitlines()[1] for path in tls.directory.glob("*.key")]
    assert not any(key in script for key in keys)
    free = SlurmLauncher(config, tmp_path / "logs", free=True).script(replace(order, gpus=0))
    assert "--no-requeue" in free and "--incarnation" not in free and "export CUDA_VISIBLE_DEVICES=''" in free


def test_what_sbatch_says_is_a_cause() -> None:
    said = "sbatch: error: Batch job submission failed: "
    assert cause_of(f"{said}Invalid account or account/partition combination specified") is Cause.CREDENTIALS
    assert cause_of(f"{said}Job violates accounting/QOS policy (job submit limit)") is Cause.QUOTA
    assert cause_of(f"{said}Invalid partition name specified") is Cause.CONFIGURATION
    assert cause_of(f"{said}Required partition not available (inactive or drain)") is Cause.CAPACITY
    assert cause_of("slurm_load_partitions: Unable to contact slurm controller") is Cause.UNREACHABLE
