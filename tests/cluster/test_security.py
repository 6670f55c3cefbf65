"""Who may connect to a cluster: whoever holds a certificate of it, and nobody else."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from distributed import Client
from distributed.core import rpc
from distributed.protocol.pickle import dumps

from pearl.cluster.certificates import ROLES, Certificates, require_encryption, worker_security
from pearl.cluster.launcher import WorkerOrder
from pearl.cluster.local import LocalCluster
from pearl.errors import UserError
from tests.cluster.actors import Odd
from tests.cluster.hand_started import HandStarted
from tests.cluster.spaces import other_host
from tests.cluster.support import ENVIRONMENT, ROOT, START_S

REFUSED_S = 20.0


def test_keys_are_their_owners_alone_and_made_once(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700
    files = list(made.directory.iterdir())
    assert {path.name for path in files} == {"ca.pem", "ca.key"} | {
        f"{role}.{end}" for role in ROLES for end in ("pem", "key")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    before = (made.directory / "worker.key").read_bytes()
    assert (Certificates.make(made.directory).directory / "worker.key").read_bytes() == before


def test_files_that_are_missing_or_readable_by_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no TLS file .*ca\.pem"):
        Certificates.open(tmp_path, "worker")
    made = Certificates.make(tmp_path / "tls")
    (made.directory / "worker.key").chmod(0o644)
    with pytest.raises(UserError, match="others can read the key"):
        Certificates.open(made.directory, "worker")


def test_certificates_that_are_none_or_no_pair_or_past_are_refused_and_past_ones_made_anew(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    (made.directory / "worker.key").write_bytes((made.directory / "client.key").read_bytes())
    (made.directory / "client.pem").write_text("no certificate")
    for role in ("worker", "client"):
        with pytest.raises(UserError, match=f"TLS files of the {role} in .* cannot be used"):
            Certificates.open(made.directory, role)
    past = Certificates.make(tmp_path / "past", valid_s=-1).directory
    with pytest.raises(UserError, match=r"certificates in .*past ended at \d{4}"):
        Certificates.open(past, "worker")
    Certificates.make(past)
    Certificates.open(past, "worker")


@pytest.mark.parametrize("words", [[], ["--help"], ["/dev/null/tls"]])
def test_the_command_that_makes_certificates_says_what_it_wants(words: list[str], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pearl.cluster.certificates", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert "Traceback" not in ran.stderr and "directory" in ran.stdout + ran.stderr and not list(tmp_path.iterdir())


def test_a_scheduler_beyond_loopback_is_encrypted_or_meant_not_to_be() -> None:
    for host in ("0.0.0.0", "10.0.0.1", "gpu-a.invalid"):
        with pytest.raises(UserError, match="without TLS"):
            require_encryption(host, encrypted=False, insecure=False)
        require_encryption(host, encrypted=True, insecure=False)
        require_encryption(host, encrypted=False, insecure=True)
    for host in ("127.0.0.1", "localhost", "::1"):
        require_encryption(host, encrypted=False, insecure=False)


@pytest.mark.parametrize("where", [("192.0.2.1", "0"), ("127.0.0.1", "70000"), ("no host.invalid", "0")])
def test_a_scheduler_that_cannot_listen_says_where_and_why(where: tuple[str, str], tmp_path: Path) -> None:
    host, port = where
    tls = str(Certificates.make(tmp_path / "tls").directory)
    line = [sys.executable, "-m", "pearl.cluster.scheduler", "--host", host, "--port", port, "--tls", tls]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=REFUSED_S)
    assert ran.returncode == 1 and ran.stdout == "" and ran.stderr.count("\n") == 1
    assert f"error: cluster.host = {host} with cluster.scheduler_port = {port} cannot be used (" in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scheduler", "10.0.0.1"], "'10.0.0.1' is not tls://host:port"),
        (["--scheduler", "tls://10.0.0.1:8786"], "tls:// needs --tls"),
        (["--scheduler", "tcp://10.0.0.1:8786", "--tls", "tls"], "one at tcp:// takes none"),
        (["--scheduler", "tcp://10.0.0.1:8786", "--notices", '{"source": "moon"}'], "source Input should be 'none'"),
        (["--scheduler", "tcp://10.0.0.1:8786", "--notices", "ec2"], "Invalid JSON"),
    ],
)
def test_a_worker_with_arguments_that_cannot_work_says_so(words: list[str], said: str) -> None:
    line = [sys.executable, "-m", "pearl.cluster.worker", "--slot", "a", *words]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=REFUSED_S)
    assert ran.returncode == 2 and said in ran.stderr and "Traceback" not in ran.stderr


def test_the_command_line_of_a_worker_holds_no_secret(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    order = WorkerOrder("c", "w-0", 1, "preemptible", "tls://10.0.0.1:1", tls=made)
    keys = [path.read_text().splitlines()[1] for path in made.directory.glob("*.key")]
    line = " ".join([*order.arguments(tls=str(made.directory)), repr(order)])
    assert not any(key in line for key in keys)
    assert any(key in made.bundle().decode() for key in keys), "the way by standard input has it"


@pytest.mark.slow
async def test_nobody_without_a_certificate_connects_or_runs_code(tmp_path: Path) -> None:
    """Driver and worker on this machine, a stranger on another host: over plain TCP, with no certificate, with one of
    another authority."""
    with other_host() as space:
        cluster = LocalCluster(tmp_path / "workers", lambda *_: None, host=space.here)
        async with cluster:
            life = await cluster.start_worker("w-0", 1, "preemptible", ENVIRONMENT, START_S)
            actor = await cluster.create_actor(life, Odd, 30)
            assert cluster.contact.startswith("tls://") and str(life.address).startswith("tls://")
            assert await actor.call("echo", 1, timeout_s=30) == 1
            marks = tmp_path / "marks"
            marks.mkdir()
            foreign = Certificates.make(tmp_path / "foreign")
            targets = [cluster.contact, str(life.address)]
            line = space.command(
                sys.executable, "-m", "tests.cluster.test_security", str(marks), str(foreign.directory)
            )
            stranger = await asyncio.to_thread(
                subprocess.run, [*line, *targets], cwd=ROOT, capture_output=True, text=True, timeout=300
            )
            assert stranger.returncode == 0, stranger.stderr
            tried = stranger.stdout.split()
            assert tried.count("reached") == len(targets)
            assert tried.count("refused") == 6 * len(targets) and "connected" not in tried
            assert list(marks.iterdir()) == [], "somebody's code ran"
            for process in (psutil.Process(), psutil.Process(life.process.pid)):
                bound = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                assert bound <= {space.here, "127.0.0.1"}
            keys = [path.read_text().splitlines()[1] for path in cluster.tls.directory.glob("*.key")]  # type: ignore[union-attr]
            seen = " ".join(psutil.Process(life.process.pid).cmdline()) + life.process.log.read_text()
            assert not any(key in seen for key in keys)
            assert await actor.call("echo", 2, timeout_s=30) == 2


@pytest.mark.slow
def test_a_worker_takes_its_certificate_from_standard_input(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    with HandStarted(tmp_path, made.directory) as started:
        line = [sys.executable, "-m", "pearl.cluster.worker", "--scheduler", started.address, "--slot", "w-0"]
        worker = subprocess.Popen(
            [*line, "--tls", "-", "--owner", "stdin"], stdin=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
        )
        assert worker.stdin is not None
        worker.stdin.write(made.bundle())
        worker.stdin.flush()

        async def joined() -> None:
            async with Client(started.address, asynchronous=True, security=made.security()) as client:
                await client.wait_for_workers(1, timeout=START_S)

        asyncio.run(joined())
        worker.stdin.close()
        worker.wait(timeout=30)  # the rest of standard input is the lifeline


def test_a_bundle_is_what_the_files_say(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    assert worker_security(made.bundle()).get_connection_args("worker")["require_encryption"]
    context = made.security().get_listen_args("scheduler")["ssl_context"]
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_certificate_for_a_machine_that_comes_and_goes_is_of_the_same_authority(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "tls")
    issued = made.issue("worker", tmp_path / "vm", valid_s=60)
    assert sorted(path.name for path in issued.directory.iterdir()) == ["ca.pem", "worker.key", "worker.pem"]
    server, client = socket.socketpair()
    listening = made.security().get_listen_args("scheduler")["ssl_context"]
    connecting = issued.security().get_connection_args("worker")["ssl_context"]
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    a = listening.wrap_bio(here, there, server_side=True)
    b = connecting.wrap_bio(there, here, server_side=False)
    for _ in range(4):
        for side in (b, a):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
    assert a.getpeercert() and b.getpeercert()
    server.close()
    client.close()


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mknod, (self.mark,)


async def _stranger(marks: Path, foreign: Path, targets: list[str]) -> None:
    """Says for every attempt whether it was refused, on the other host."""
    number = 0

    def evil() -> Evil:
        nonlocal number
        number += 1
        return Evil(str(marks / f"mark-{number}"))

    for target in targets:
        host, port = target.partition("://")[2].split(":")
        socket.create_connection((host, int(port)), 10).close()
        print("reached")
        nothing, other = (ssl._create_unverified_context() for _ in range(2))  # it trusts whom it attacks
        other.load_cert_chain(foreign / "client.pem", foreign / "client.key")
        ways = [(f"tcp://{host}:{port}", {}), (target, {"ssl_context": nothing}), (target, {"ssl_context": other})]
        for address, arguments in ways:
            for operation in ("identity", "run_function"):
                try:
                    async with asyncio.timeout(REFUSED_S):
                        async with rpc(address, timeout=3, connection_args=arguments) as peer:
                            packed = dumps(evil())
                            await getattr(peer, operation)(**({"function": packed} if operation != "identity" else {}))
                    print("connected")
                except (OSError, TimeoutError, TypeError, RuntimeError):
                    print("refused")
        raw = socket.create_connection((host, int(port)), 10)  # bytes that no handshake precedes
        raw.sendall(pickle.dumps(evil()))
        raw.close()


if __name__ == "__main__":
    asyncio.run(_stranger(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
