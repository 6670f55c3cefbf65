"""Real servers of the kinds that PEARL connects to, each started by the test with files of its own and ended by it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

READY_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, host: str = "127.0.0.1") -> None:
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), 1).close()
            return
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@dataclass(frozen=True)
class Sshd:
    options: tuple[str, ...]
    """For `ssh`: a configuration in which any name is this server's, but `nobody` is one for whom nothing listens."""
    strange: tuple[str, ...]
    """The same with a key that the server does not know."""


@contextlib.contextmanager
def sshd(folder: Path, host: str = "127.0.0.1", within: Sequence[str] = ()) -> Iterator[Sshd]:
    """A real sshd at `host` with keys of its own, which knows one client key; `within`: what runs its command line."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not (Path(program).exists() and shutil.which("ssh") and shutil.which("ssh-keygen")):
        pytest.skip("sshd or ssh is not installed (apt-get install openssh-server openssh-client)")
    folder.mkdir(mode=0o700)
    for name in ("host", "client", "strange"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(line, check=True, capture_output=True)
    shutil.copy(folder / "client.pub", folder / "authorized")
    port, log = free_port(), folder / "sshd.log"
    (folder / "known").write_text(f"pearl {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress {host}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, even where it is not the system's
    with log.open("wb") as output:
        line = [*within, program, "-D", "-e", "-f", str(folder / "config")]
        server = subprocess.Popen(line, stdout=output, stderr=output)
    try:
        wait_for_port(port, server, log, host)
        options = []
        for key in ("client", "strange"):
            config = folder / f"ssh_config.{key}"
            config.write_text(
                f"Host nobody\n Port {free_port()}\nHost *\n Port {port}\n HostName {host}\n HostKeyAlias pearl\n"
                f" IdentityFile {folder}/{key}\n IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n"
            )
            options.append(("-F", str(config)))
        yield Sshd(*options)
    finally:
        server.terminate()
        server.wait(READY_S)


SLURM_CONF = """\
ClusterName=pearl
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
MinJobAge=30
GresTypes=gpu
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} {node}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} {node}
PartitionName=spot Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=reserved Nodes=n0,n1 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=shut Nodes=n0,n1 MaxTime=INFINITE State=INACTIVE PriorityTier=1
"""
NODE = "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:2 State=UNKNOWN"


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """A real slurmctld and two slurmd with two devices each that are called GPUs: the path of slurm.conf.

    Partition `reserved` preempts `spot`, whose jobs get 15 s. Skips the test where Slurm is not installed.
    """
    programs = {name: shutil.which(name) or f"/usr/sbin/{name}" for name in ("munged", "slurmctld", "slurmd", "srun")}
    lacking = [name for name, path in programs.items() if not Path(path).exists()]
    if lacking or os.geteuid():
        pytest.skip(f"{', '.join(lacking) or 'root'} is missing (apt-get install slurm-wlm munge)")
    for name in ("state", "spool.n0", "spool.n1"):
        (folder / name).mkdir(parents=True)
    ports = [free_port() for _ in range(3)]
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, folder=folder, ports=ports, node=NODE))
    for node in (0, 1):
        for device in (0, 1):
            os.mknod(folder / f"gpu{node}{device}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
    (folder / "gres.conf").write_text("".join(f"NodeName=n{n} Name=gpu File={folder}/gpu{n}[0-1]\n" for n in (0, 1)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in names.items()]
    lines = [[programs["munged"], "--foreground", "--force", *munge], [programs["slurmctld"], "-D", "-f", str(conf)]]
    lines += [[programs["slurmd"], "-D", "-f", str(conf), "-N", node] for node in ("n0", "n1")]
    variables = {**os.environ, "SLURM_CONF": str(conf)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for line in lines:
            with (folder / f"{Path(line[0]).name}.out").open("ab") as output:
                started.append(subprocess.Popen(line, stdout=output, stderr=output, env=variables))
            until = time.monotonic() + READY_S
            while line[0] == programs["munged"] and not (folder / "munge.socket").exists():
                assert time.monotonic() < until, "munged does not start"
                time.sleep(0.05)
        until = time.monotonic() + READY_S
        while True:
            line = ["sinfo", "-h", "-N", "-p", "spot", "-o", "%T"]
            sinfo = subprocess.run(line, env=variables, capture_output=True, text=True)
            if sinfo.stdout.split() == ["idle", "idle"]:
                break
            assert time.monotonic() < until, f"{sinfo}; {(folder / 'slurmctld.log').read_text()[-2000:]}"
            time.sleep(0.2)
        yield conf
    finally:
        until = time.monotonic() + READY_S
        for line in (["scancel", "-u", "root", "--signal=KILL", "--full"], ["scancel", "-u", "root"]):
            subprocess.run(line, env=variables, capture_output=True)
        while time.monotonic() < until:  # steps are no children of a slurmd
            queue = subprocess.run(["squeue", "-h"], env=variables, capture_output=True, text=True)
            if queue.returncode or not queue.stdout.strip():
                break
            time.sleep(0.2)
        children = [child for process in started for child in psutil.Process(process.pid).children(recursive=True)]
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
