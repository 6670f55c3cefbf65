"""One Slurm job per slot, from dask-jobqueue's job header and our own worker's command line.

The worker is a step of its job (`srun --overlap`), because Slurm signals steps before it takes a job away or its time
is over, and never the batch shell: so both arrive as SIGTERM, which is a notice. Jobs are found by their name.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pearl.cluster.certificates import Certificates
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.launcher import MODULE, LaunchFailed, WorkerOrder
from pearl.cluster.processes import last_words, said_by
from pearl.cluster.reap import TAG
from pearl.config.cluster import SlurmConfig
from pearl.core.requests import FIRST_S, Cause
from pearl.errors import UserError

COMMAND_S = 60.0
POLL_S = 1.0
GONE_S = 60.0
"""A job that was killed leaves the queue within this time."""
ECHO_S = 2.0
"""A preempted step gets its SIGTERM twice: from Slurm, and from its `srun`, which got one as well."""
CAUSES = (
    (Cause.CREDENTIALS, "access denied|permission denied|invalid account|not authorized|user unknown"),
    (Cause.QUOTA, "limit|qos|assoc"),
    (Cause.UNREACHABLE, "unable to contact|timed out|connection refused"),
    (Cause.CONFIGURATION, "invalid|requested node|unrecognized|no such|unable to open"),
    (Cause.CAPACITY, "not available|inactive|drain|busy"),
)
"""By what `sbatch` says."""
EXPORTED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LD_LIBRARY_PATH", "SLURM_CONF")
"""Of this environment; all else a job finds in its script."""
WAITING, GONE = ("PENDING", "CONFIGURING", "REQUEUED"), ("", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED")


def cause_of(said: str) -> Cause:
    return next((cause for cause, words in CAUSES if re.search(words, said, re.IGNORECASE)), Cause.OTHER)


class SlurmJob:
    """One job."""

    def __init__(self, launcher: SlurmLauncher, slot: str, number: str, log: Path) -> None:
        self.launcher, self.slot, self.number, self.log = launcher, slot, number, log
        self.state, self.reason = "PENDING", ""
        self._failed: LaunchFailed | None = None
        self._killed: asyncio.Task[object] | None = None

    def terminate(self) -> None:
        """Slurm warns its jobs."""

    def end(self) -> None:
        if self._killed is None:
            self._killed = asyncio.ensure_future(self.launcher.cancel([self.number]))

    async def ended(self) -> None:
        if self._killed is not None:
            await self._killed
        try:
            await asyncio.wait_for(self.wait(), GONE_S)
        except TimeoutError:
            said = f"{self.slot}: job {self.number} is still {self.state} {GONE_S:g} s after scancel"
            raise ActorTimeout(said) from None

    async def wait(self) -> None:
        """Until the job has left the queue; one that waits there for too long is withdrawn."""
        queued_s = 0.0
        while self.state not in GONE:
            await self._look()
            if self.state in WAITING and self._killed is None:
                queued_s += POLL_S
                if queued_s > self.launcher.config.queue_s:
                    said = f"job {self.number} of {self.slot} waited {queued_s:.0f} s in the queue ({self.reason})"
                    self._failed = LaunchFailed(said, Cause.CAPACITY)
                    self.end()
            await asyncio.sleep(POLL_S if self.state not in GONE else 0)

    async def _look(self) -> None:
        code, said = await run("squeue", "-h", "-j", self.number, "-o", "%T|%r")
        if code == 0 and said:
            self.state, _, self.reason = said.splitlines()[0].partition("|")
        elif code == 0 or "invalid job id" in said.lower():
            _, last = await run("scontrol", "show", "job", "-o", self.number)
            found = dict(word.split("=", 1) for word in last.split() if "=" in word)
            self.state, self.reason = "", f"{found.get('JobState', 'gone')}, {found.get('Reason', 'None')}"

    def failed(self) -> LaunchFailed | None:
        return self._failed

    def how(self, otherwise: str) -> str:
        state = self.reason if self.state == "" else self.state or otherwise
        return f"Slurm job {self.number}: {state}{last_words(self.log)}"


class SlurmLauncher:
    """Jobs of this user on the Slurm cluster that `sbatch` reaches."""

    def __init__(self, config: SlurmConfig, logs: Path, *, free: bool = False) -> None:
        """`logs`: where job scripts, logs and the workers' certificates lie unless the configuration names a folder."""
        self.config, self.free, self.rest_s = config, free, FIRST_S
        self.logs = (Path(config.directory) if config.directory else logs).resolve()
        self.options: Sequence[str] = config.partitions or ("",)
        self._python = config.python or sys.executable

    def room(self, option: str) -> bool:
        return True

    async def check(self) -> None:
        for program in ("sbatch", "squeue", "scancel", "scontrol", "srun"):
            if shutil.which(program) is None:
                raise UserError(f"cluster.kind = slurm needs {program}", "Run where Slurm's commands are installed.")
        job_header(self.config, "check", "", 0, 1, self.logs)
        code, said = await run("sinfo", "-h", "-o", "%R")
        if code:
            raise UserError(f"Slurm does not answer ({said})", "Look with sinfo; set SLURM_CONF if it is elsewhere.")
        there = said.split()
        for partition in self.config.partitions:
            if partition not in there:
                raise UserError(f"there is no partition {partition}", f"cluster.slurm.partitions: {', '.join(there)}.")

    async def start(self, order: WorkerOrder) -> SlurmJob:
        self.logs.mkdir(parents=True, exist_ok=True)
        script = self.logs / f"{order.slot}.{order.life}.sh"
        script.write_text(self.script(order))
        code, said = await run("sbatch", "--parsable", f"--export={','.join(EXPORTED)}", str(script), tag=order.tag)
        if code:
            raise LaunchFailed(f"sbatch refused {order.slot}: {said}", cause_of(said))
        number = said.splitlines()[-1].partition(";")[0]
        name = job_name(order.cluster, order.slot)
        return SlurmJob(self, order.slot, number, self.logs / f"{name}-{number}.out")

    def script(self, order: WorkerOrder) -> str:
        name = job_name(order.cluster, order.slot)
        header = job_header(self.config, name, order.option, order.gpus, order.threads, self.logs)
        tls = str(self._certificates(order.tls, order.cluster)) if order.tls else None
        echo_s = max(ECHO_S, order.notices.sigterm_echo_s)
        order = replace(order, notices=order.notices.model_copy(update={"sigterm_echo_s": echo_s}))
        line = order.arguments("nobody" if self.free else "scheduler", tls=tls)
        variables = {**order.environment, TAG: order.tag}
        if not order.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        start = f"exec srun --overlap --export=ALL {shlex.join([self._python, '-u', '-m', MODULE, *line])}"
        where = f"cd {shlex.quote(str(Path.cwd()))}"
        return "\n".join(["#!/usr/bin/env bash", header, *exports, *self.config.prologue, where, start, ""])

    async def left(self, cluster: str, slot: str | None = None) -> list[str]:
        jobs = [f"job {number} {name} {state}" for number, name, state in await self._jobs(cluster, slot)]
        return jobs + ([f"a copy of the key in {copy}"] if not slot and (copy := self._copy(cluster)).exists() else [])

    async def sweep(self, cluster: str, slot: str | None = None) -> None:
        until = asyncio.get_running_loop().time() + GONE_S
        while (jobs := await self._jobs(cluster, slot)) and asyncio.get_running_loop().time() < until:
            await self.cancel([number for number, _, _ in jobs])
            await asyncio.sleep(POLL_S)
        if not slot:
            shutil.rmtree(self._copy(cluster), ignore_errors=True)  # `left` says if it could not be

    async def cancel(self, numbers: Sequence[str]) -> None:
        """At once: a signal that is no notice."""
        await run("scancel", "--signal=KILL", "--full", *numbers)
        await run("scancel", *numbers)

    async def _jobs(self, cluster: str, slot: str | None) -> list[tuple[str, str, str]]:
        code, said = await run("squeue", "-h", "-u", getpass.getuser(), "-o", "%i|%j|%T")
        if code:
            raise LaunchFailed(f"squeue does not answer: {said}", cause_of(said))
        wanted = job_name(cluster, slot or "")
        jobs = [tuple(line.split("|")) for line in said.splitlines()]
        return [(i, name, state) for i, name, state in jobs if (name == wanted if slot else name.startswith(wanted))]

    def _certificates(self, tls: Certificates, cluster: str) -> Path:
        """Where the nodes find a worker's: beside the scripts, which they see in any case."""
        if not self.config.directory:
            return tls.directory.resolve()
        tls.copy("worker", self._copy(cluster))
        return self._copy(cluster)

    def _copy(self, cluster: str) -> Path:
        """Of that cluster alone: others may have their scripts in the same folder."""
        return self.logs / f"tls-{cluster}"


def job_name(cluster: str, slot: str) -> str:
    return f"pearl-{cluster}-{slot}"


def job_header(config: SlurmConfig, name: str, partition: str, gpus: int, threads: int, logs: Path) -> str:
    """The `#SBATCH` lines. Raises UserError if dask-jobqueue is not installed."""
    try:
        from dask_jobqueue.slurm import SLURMJob
    except ImportError:
        raise UserError("cluster.kind = slurm needs dask-jobqueue", "pip install 'pearl-rl[slurm]'") from None
    more = [f"--signal=TERM@{config.notice_s}", "--no-requeue", "--open-mode=append"]
    more += [f"--output={logs}/%x-%j.out"]  # of both outputs
    more += [f"--gres={config.gres}:{gpus}"] if gpus else []
    job = SLURMJob(
        "", name, partition or None, account=config.account, cores=threads, memory=config.memory, processes=1,
        walltime=config.time_limit, job_extra_directives=[*more, *config.directives], job_name=name,
        python=sys.executable,
    )  # fmt: skip
    return str(job.job_header)


async def run(*line: str, tag: str = "") -> tuple[int, str]:
    """Exit code and all that it said."""
    code, said = await said_by(*line, timeout_s=COMMAND_S, env={**os.environ, TAG: tag} if tag else None)
    return (-1, f"{line[0]} {said}") if code is None else (code, said)
