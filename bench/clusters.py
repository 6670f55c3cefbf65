"""The elastic example with its preemptible slots from each kind of cluster, to its end, and taken away once on the way.

    python -m bench.clusters [local existing ssh slurm ec2] [--steps 24] [--folder DIR] [--out FILE] [KEY=VALUE ...]

Each kind plays examples/elastic.yaml with the section `cluster:` of its own example, and without the trace: here the
slots are taken by force. Real servers on this machine: a scheduler and workers started with the lines of
docs/clusters.md; sshd; slurmctld with two slurmd, where a job of a better partition preempts ours; moto in EC2's place,
whose machines really run their user data, with a metadata service that gives notice; and this machine's own processes,
SIGKILLed for `local` and `ssh`, SIGTERMed for `existing`. A slot is taken when it serves.

Times run from the start of the run, when slots are asked for, to the first slot's joining and to its admission, which
is when it serves weights that it has verified (SYNCED); and from its loss or notice to the next admission. Afterwards
nothing of the run may be left at the provider, and workers of an existing cluster must have begun anew. `--folder`
keeps console and run directory of each kind. Results of the kinds that are not named stay in `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.provenance import REPOSITORY, provenance
from pearl.cluster.reap import TAG
from tests.cluster.aws import IMAGE, BootAgent, aws
from tests.cluster.clouds import serving
from tests.cluster.hand_started import HandStarted
from tests.cluster.servers import slurm, sshd

EXAMPLES = REPOSITORY / "examples"
LIMIT_S = 580.0
LOOK_S = 0.5
NOTICE_S = 120.0
"""As EC2 gives."""
ANEW_S = 30.0
"""A worker of an existing cluster has begun anew within this time after the run."""


@dataclass
class Site:
    """Where a run's slots come from."""

    overrides: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)
    take: Callable[[str], object] = lambda slot: None
    """Take that slot away."""
    taken: str = ""
    """How, in words."""
    went: Callable[[], object] = lambda: None
    """The driver has heard of it."""
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
    yield Site(take=lambda slot: worker_of(slot).kill(), taken="SIGKILL of its process")


@contextlib.contextmanager
def existing(folder: Path) -> Iterator[Site]:
    tls = folder / "tls"
    line = [sys.executable, "-m", "pearl.cluster.certificates", str(tls)]
    subprocess.run(line, check=True, cwd=REPOSITORY, capture_output=True)
    with HandStarted(folder, tls) as cluster:
        workers: dict[str, psutil.Process] = {}

        def start(slot: str) -> None:
            workers[slot] = psutil.Process(cluster.worker(slot))

        def left() -> list[str]:
            until = time.monotonic() + ANEW_S
            while (engines := _engines(workers.values())) and time.monotonic() < until:
                time.sleep(LOOK_S)
            return engines

        start("gpu-a-0")
        start("gpu-a-1")
        told = [f"cluster.address={cluster.address}", f"cluster.tls_directory={tls}"]
        said = "SIGTERM, a notice of 30 s"
        yield Site(told, {}, lambda slot: workers[slot].terminate(), said, lambda: start("gpu-a-2"), left)


def _engines(workers: Iterable[psutil.Process]) -> list[str]:
    """What the workers that are still there have started."""
    found = []
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [f"process {child.pid}" for child in worker.children(recursive=True)]
    return found


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Site]:
    with sshd(folder / "sshd") as server:
        told = ["cluster.host=127.0.0.1", "cluster.ssh.hosts=[here]", "cluster.ssh.slots_per_host=2"]
        told.append(f"cluster.ssh.options={json.dumps(list(server.options))}")
        yield Site(told, take=lambda slot: worker_of(slot).kill(), taken="SIGKILL of its process")


@contextlib.contextmanager
def slurm_site(folder: Path) -> Iterator[Site]:
    with slurm(folder / "slurm") as conf:
        variables = {"SLURM_CONF": str(conf)}
        told = ["cluster.host=127.0.0.1", "cluster.slurm.memory=4GB", "cluster.notices.sigterm_grace_s=12"]
        better = ["sbatch", "-o", "/dev/null", "-p", "reserved", "-N", "2", "--gres=gpu:2", "--cpus-per-task=4"]
        better += ["--mem=100", "--wrap", "sleep 30"]

        def run(line: list[str]) -> str:
            own = {**os.environ, **variables}
            return subprocess.run(line, check=True, capture_output=True, text=True, env=own).stdout

        def left() -> list[str]:
            return [name for name in run(["squeue", "-h", "-o", "%j"]).split() if name.startswith("pearl-")]

        taken = "preempted, a job of a better partition takes all nodes for 30 s"
        yield Site(told, variables, lambda slot: run(better), taken, left=left)


@contextlib.contextmanager
def ec2(folder: Path) -> Iterator[Site]:
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nobody", "AWS_EC2_METADATA_DISABLED": "true"}
    keys |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "/dev/null")
    os.environ.update(keys)
    with aws(folder / "aws") as cloud, serving() as metadata, BootAgent(cloud, folder / "machines"):
        told = ["cluster.host=127.0.0.1", f"cluster.notices.url={metadata.url}"]
        told += [f"cluster.ec2.endpoint_url={cloud.url}", f"cluster.ec2.image={IMAGE}"]
        told += [f"cluster.ec2.security_groups=[{cloud.security_group()}]"]
        told += [f"cluster.ec2.directory={REPOSITORY}", f"cluster.ec2.python={sys.executable}"]

        def withdraw() -> None:
            metadata.at = None  # the next machines are to hear nothing

        said = f"a notice of {NOTICE_S:g} s by its metadata service"
        yield Site(told, keys, lambda slot: metadata.preempt(NOTICE_S), said, withdraw, cloud.alive)


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


def elastic_example(kind: str, folder: Path) -> Path:
    """The example with that kind's section `cluster:`, without its trace."""
    run = yaml.safe_load((EXAMPLES / "elastic.yaml").read_text())
    del run["elastic"]["availability"]
    if kind != "local":
        run["cluster"] = yaml.safe_load((EXAMPLES / f"{kind}.yaml").read_text())["cluster"]
    path = folder / "elastic.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def play(kind: str, site: Site, folder: Path, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    run, log = folder / "run", folder / "console.log"
    told = [*site.overrides, f"run_dir={run}", f"pipeline.steps={steps}", f"environment.tasks={3 * steps}", *overrides]
    line = [sys.executable, "-m", "pearl.cli", "train", str(elastic_example(kind, folder)), *told, "--json"]
    variables = {**os.environ, **site.variables, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, env=variables, cwd=REPOSITORY)
    taken, heard, tags = "", False, set[str]()
    until = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < until:
            events = seen(run)
            if not taken and (serving_now := admitted(events)):
                taken = serving_now[0][1]
                tags = {_tag(child).partition("/")[0] for child in psutil.Process(process.pid).children(recursive=True)}
                site.take(taken)
            if not heard and any(e["kind"] in ("SlotNotice", "SlotLost") and e["worker"] == taken for e in events):
                heard = True
                site.went()
            time.sleep(LOOK_S)
    finally:
        process.terminate()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{kind}: exit code {process.returncode}\n{log.read_text()[-3000:]}")
    summary = json.loads(output.splitlines()[-1])
    tagged = [f"process {p.pid}" for p in psutil.process_iter() if _tag(p).partition("/")[0] in tags - {""}]
    told_of = {name: summary[name] for name in ("steps", "seconds", "trajectories_lost")}
    return {**told_of, "taken": site.taken, **judge(seen(run), taken), "left": [*site.left(), *tagged]}


def _tag(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(TAG, "")
    return ""


def judge(events: list[dict[str, Any]], taken: str) -> dict[str, Any]:
    """Times in seconds. A slot that was taken may come back under another name, and others may have gone with it."""
    began = next(e["time"] for e in events if e["kind"] == "RunStarted")
    joined = [e["time"] for e in events if e["kind"] == "SlotJoined"]
    serves = [when for when, _ in admitted(events)]
    warned = [e["time"] for e in events if e["kind"] == "SlotNotice" and e["worker"] == taken]
    lost = [e for e in events if e["kind"] == "SlotLost" and e["worker"] == taken]
    told = min([*warned[:1], *(e["time"] for e in lost[:1])], default=None)
    again = {e["slot"]["name"] for e in events if e["kind"] == "SlotJoined" and told is not None and e["time"] > told}
    back = [when for when, worker in admitted(events) if told is not None and when > told and worker in again]
    left = {e["worker"] for e in events if e["kind"] == "SlotLost" and e["time"] < min(back, default=math.inf)}
    return {
        "request_to_joined_s": round(joined[0] - began, 1) if joined else None,
        "request_to_synced_s": round(serves[0] - began, 1) if serves else None,
        "notice_to_gone_s": round(lost[0]["time"] - warned[0], 1) if warned and lost else None,
        "slots_gone": len(left),
        "gone": lost[0]["reason"].partition(";")[0] if lost else None,
        "taken_to_synced_s": round(back[0] - told, 1) if back and told is not None else None,
        "slots_joined": len(joined),
        "requests_failed": sorted({e["reason"] for e in events if e["kind"] == "RequestFailed"}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help=f"{', '.join(SITES)} (all if none is named); KEY=VALUE"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="keeps what the runs leave; else they are removed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    overrides = [word for word in arguments.words if "=" in word]
    kinds = [word for word in arguments.words if "=" not in word] or list(SITES)
    if unknown := set(kinds) - set(SITES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SITES)}")
    known = json.loads(arguments.out.read_text())["kinds"] if arguments.out and arguments.out.exists() else {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.folder.resolve() / kind if arguments.folder else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            with SITES[kind](folder) as site:
                result = play(kind, site, folder, arguments.steps, overrides)
        known[kind] = {**result, **provenance("bench.clusters")}
        print(json.dumps({kind: known[kind]}), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps({"kinds": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
