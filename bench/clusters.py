"""The elastic example with its preemptible slots from each kind of cluster, to its end, with one slot taken away.

    python -m bench.clusters [local existing ssh slurm ec2] [--steps 10] [--slots 1] [--out bench/results/clusters.json]

Real servers on this machine: a scheduler and workers started by hand with TLS; sshd; slurmctld with two slurmd, where a
job of a better partition preempts ours; moto in EC2's place, whose machines really run their user-data, with a metadata
service that gives notice; and this machine's own processes, SIGKILLed for `local` and `ssh`, SIGTERMed for `existing`.
The slot is taken when it serves. Times run from the start of the run, when slots are asked for, to the slot's joining
and to its admission, which is when it serves weights that it has verified (SYNCED); and from its loss or notice to the
admission of the next life. Looked at afterwards: nothing of the run is left at the provider. Results of the kinds that
are not named stay in `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.provenance import REPOSITORY, provenance
from pearl.cluster.reap import TAG
from tests.cluster.aws import IMAGE, BootAgent, aws
from tests.cluster.clouds import serving
from tests.cluster.hand_started import HandStarted
from tests.cluster.servers import slurm, sshd

LIMIT_S = 560.0
LOOK_S = 0.5
NOTICE_S = 20.0
"""That the cloud gives, and the next machine comes behind."""


@dataclass
class Site:
    """Where a run's slots come from."""

    config: str
    overrides: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)
    take: Callable[[str], object] = lambda slot: None
    """Take that slot away."""
    taken: str = ""
    """How, in words."""
    left: Callable[[], list[str]] = lambda: []
    """What the provider still has when the run has ended."""


def worker_of(slot: str) -> psutil.Process:
    """The process that is that slot."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "pearl.cluster.worker" in line and slot in line and Path(line[0]).name.startswith("python"):
                return process
    raise LookupError(f"no process is {slot}")


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Site]:
    quiet = ["elastic.availability.file=null", "elastic.policy=elastic-borrow"]
    yield Site("elastic.yaml", quiet, take=lambda slot: worker_of(slot).kill(), taken="SIGKILL of its process")


@contextlib.contextmanager
def existing(folder: Path) -> Iterator[Site]:
    line = [sys.executable, "-m", "pearl.cluster.certificates", str(folder / "tls")]
    subprocess.run(line, check=True, cwd=REPOSITORY, capture_output=True)
    with HandStarted(folder, folder / "tls") as cluster:
        for slot in ("gpu-a-0", "gpu-a-1"):
            cluster.worker(slot, "--notices", '{"sigterm_grace_s": 20}')
        told = [f"cluster.address={cluster.address}", f"cluster.tls_directory={folder / 'tls'}"]
        yield Site(
            "existing.yaml", told, take=lambda slot: worker_of(slot).terminate(), taken="SIGTERM, a notice of 20 s"
        )


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Site]:
    with sshd(folder / "sshd") as server:
        told = ["cluster.host=127.0.0.1", "cluster.ssh.hosts=[here]"]
        told.append(f"cluster.ssh.options={json.dumps(list(server.options))}")
        yield Site("ssh.yaml", told, take=lambda slot: worker_of(slot).kill(), taken="SIGKILL of its process")


@contextlib.contextmanager
def slurm_site(folder: Path) -> Iterator[Site]:
    with slurm(folder / "slurm") as conf:
        variables = {"SLURM_CONF": str(conf)}
        told = ["cluster.host=127.0.0.1", "cluster.slurm.partitions=[spot]", "cluster.slurm.memory=4GB"]
        told += ["cluster.notices.sigterm_grace_s=12", "cluster.slurm.notice_s=10", "engine.device=cpu"]
        better = ["sbatch", "-o", "/dev/null", "-p", "reserved", "-N", "2", "--gres=gpu:2", "--cpus-per-task=4"]
        better += ["--mem=100", "--wrap", "sleep 30"]

        def run(line: list[str]) -> str:
            return subprocess.run(
                line, check=True, capture_output=True, text=True, env={**os.environ, **variables}
            ).stdout

        def left() -> list[str]:
            return [name for name in run(["squeue", "-h", "-o", "%j"]).split() if name.startswith("pearl-")]

        yield Site("slurm.yaml", told, variables, lambda slot: run(better), "a job of a better partition", left)


@contextlib.contextmanager
def ec2(folder: Path) -> Iterator[Site]:
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nobody", "AWS_EC2_METADATA_DISABLED": "true"}
    keys |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "/dev/null")
    os.environ.update(keys)
    with aws(folder / "aws") as cloud, serving() as metadata, BootAgent(cloud, folder / "machines"):
        told = ["cluster.host=127.0.0.1", f"cluster.notices.url={metadata.url}", "cluster.notices.poll_s=0.5"]
        told += [f"cluster.ec2.endpoint_url={cloud.url}", f"cluster.ec2.image={IMAGE}"]
        told += [f"cluster.ec2.security_groups=[{cloud.security_group()}]", "cluster.ec2.instance_types=[g6.xlarge]"]
        told += ["cluster.ec2.region=us-east-1", "cluster.ec2.launch_template=null"]
        told += [f"cluster.ec2.directory={REPOSITORY}", f"cluster.ec2.python={sys.executable}"]

        def take(slot: str) -> None:
            metadata.preempt(NOTICE_S)
            time.sleep(2.0)  # the machine has asked; the next one is to hear nothing
            metadata.at = None

        yield Site("ec2.yaml", told, keys, take, f"a notice of {NOTICE_S:g} s by its metadata service", cloud.alive)


SITES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Site]]] = {
    "local": local,
    "existing": existing,
    "ssh": ssh,
    "slurm": slurm_site,
    "ec2": ec2,
}


def seen(run: Path) -> list[dict[str, Any]]:
    """The events so far."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def admitted(events: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """When which preemptible slots began to serve."""
    groups = [e for e in events if e["kind"] == "expand" and e["phase"] == "admitted"]
    return [(e["time"], name) for e in groups for name in e["workers"]]


def play(site: Site, folder: Path, steps: int, slots: int) -> dict[str, Any]:
    run = folder / "run"
    overrides = [*site.overrides, f"run_dir={run}", f"pipeline.steps={steps}", f"environment.tasks={3 * steps}"]
    overrides += [f"elastic.preemptible_slots={slots}"]
    variables = {**os.environ, **site.variables, "OMP_NUM_THREADS": "1"}
    line = [
        sys.executable,
        "-m",
        "pearl.cli",
        "train",
        str(REPOSITORY / "examples" / site.config),
        *overrides,
        "--json",
    ]
    with (folder / "console.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, env=variables, cwd=REPOSITORY)
    taken, tag = None, ""
    until = time.monotonic() + LIMIT_S
    while process.poll() is None:
        if time.monotonic() > until:
            process.terminate()
            break
        if taken is None and (serving_now := admitted(seen(run))):
            taken = serving_now[0][1]
            tag = _tag(worker_of(taken)).partition("/")[0]
            site.take(taken)
        time.sleep(LOOK_S)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(
            f"{site.config}: exit code {process.returncode}\n{(folder / 'console.log').read_text()[-3000:]}"
        )
    summary = json.loads(output.splitlines()[-1])
    outcome = judge(seen(run), taken)
    tagged = [f"process {p.pid}" for p in psutil.process_iter() if tag and _tag(p).startswith(f"{tag}/")]
    told = {name: summary[name] for name in ("steps", "seconds", "trajectories_unfinished")}
    return {
        **told, "taken": site.taken, **outcome, "left": [*site.left(), *tagged],
    }  # fmt: skip


def _tag(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(TAG, "")
    return ""


def judge(events: list[dict[str, Any]], taken: str | None) -> dict[str, Any]:
    """Times in seconds. A slot that was taken may come back under another name."""
    began = next(e["time"] for e in events if e["kind"] == "RunStarted")
    joined = [e["time"] for e in events if e["kind"] == "SlotJoined"]
    serves = [when for when, _ in admitted(events)]
    warned = [e["time"] for e in events if e["kind"] == "SlotNotice" and e["worker"] == taken]
    lost = [e["time"] for e in events if e["kind"] == "SlotLost" and e["worker"] == taken]
    told = min([*warned[:1], *lost[:1]], default=None)
    back = [when for when in serves if told is not None and when > told]
    return {
        "request_to_joined_s": round(joined[0] - began, 1) if joined else None,
        "request_to_synced_s": round(serves[0] - began, 1) if serves else None,
        "notices": len(warned),
        "losses": len(lost),
        "loss_to_synced_s": round(back[0] - told, 1) if back and told is not None else None,
        "requests_failed": [e.get("reason", "") for e in events if e["kind"] == "RequestFailed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[*SITES, []])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["kinds"] if arguments.out and arguments.out.exists() else {}
    for kind in arguments.kinds or SITES:
        with tempfile.TemporaryDirectory() as folder, SITES[kind](Path(folder)) as site:
            known[kind] = {**play(site, Path(folder), arguments.steps, arguments.slots), **provenance("bench.clusters")}
        print(json.dumps({kind: known[kind]}), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"kinds": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
