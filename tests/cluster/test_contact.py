"""A worker that cannot reach its scheduler ends, and says what is wrong and how to mend it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pearl.cluster import contact
from pearl.cluster.certificates import Certificates
from pearl.cluster.contact import fault_of, reach
from pearl.cluster.launcher import JOIN_S
from pearl.cluster.local import open_scheduler
from pearl.cluster.settings import configure_dask
from pearl.errors import UserError
from tests.cluster.servers import free_port
from tests.cluster.support import ENVIRONMENT, ROOT

LIMIT_S = 0.5
LATE_S = 60.0
"""A test that hangs ends here."""


@contextlib.asynccontextmanager
async def scheduler(tls: Certificates | None) -> AsyncIterator[str]:
    configure_dask()
    async with open_scheduler("127.0.0.1", 0, tls) as scheduler:
        yield str(scheduler.address)


async def refused(address: str, tls: Certificates | None) -> str:
    """What is said at the end; nobody waits longer than a moment."""
    with pytest.raises(UserError) as caught:
        await asyncio.wait_for(reach(address, tls.security() if tls else None, LIMIT_S, lambda line: None), LATE_S)
    return str(caught.value)


async def worker(*words: str) -> tuple[int | None, str]:
    """Exit code of `python -m pearl.cluster.worker`, and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pearl.cluster.worker", "--slot", "a-0", *words, stderr=asyncio.subprocess.PIPE,
        cwd=ROOT, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    try:
        _, said = await asyncio.wait_for(process.communicate(), LATE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return process.returncode, said.decode()


@pytest.mark.slow
async def test_a_worker_with_certificates_of_another_authority_ends_at_once_and_says_so(tmp_path: Path) -> None:
    foreign = Certificates.make(tmp_path / "foreign").directory
    async with scheduler(Certificates.make(tmp_path / "tls")) as address:
        code, said = await worker("--scheduler", address, "--tls", str(foreign))
    assert code == 1 and "Traceback" not in said
    assert said.splitlines()[-1] == (
        f"the worker did not join: the scheduler at {address} cannot be used (it has other certificates than we have: "
        "self-signed certificate in certificate chain). "
        "Give --tls a copy of the folder of its own cluster, or mend --scheduler."
    )


@pytest.mark.slow
async def test_a_worker_whose_scheduler_is_not_there_ends_after_its_deadline_and_says_so() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    code, said = await worker("--scheduler", address, "--join-s", "3")
    assert code == 1 and "Traceback" not in said
    assert said.splitlines()[-1] == (
        f"the worker did not join: no scheduler was reached at {address} within 3 s (nobody listens there). "
        "Start it, or mend --scheduler; --join-s waits longer."
    )


def test_a_worker_that_is_started_by_hand_has_a_deadline() -> None:
    line = [sys.executable, "-m", "pearl.cluster.worker", "--help"]
    said = subprocess.run(line, check=True, cwd=ROOT, capture_output=True, text=True, timeout=LATE_S).stdout
    assert f"{JOIN_S} s unless given" in " ".join(said.split())


async def test_what_is_wrong_with_a_scheduler_is_said_in_words(tmp_path: Path) -> None:
    own, foreign = Certificates.make(tmp_path / "own"), Certificates.make(tmp_path / "foreign")
    mixed = tmp_path / "mixed"
    foreign.copy("worker", mixed)
    (mixed / "ca.pem").write_bytes((own.directory / "ca.pem").read_bytes())
    async with scheduler(own) as address:
        await reach(address, own.security(), LIMIT_S, pytest.fail)
        assert "cannot be used (it has other certificates than we have: it refuses ours)" in await refused(
            address, Certificates(mixed)
        )
        plain = address.replace("tls://", "tcp://")
        assert "(it ends the connection: it has other certificates, or" in await refused(plain, None)
    async with scheduler(None) as address:
        secure = address.replace("tcp://", "tls://")
        assert "cannot be used (what listens there speaks no TLS)" in await refused(secure, own)


async def test_silence_is_asked_once_more_whether_anybody_listens() -> None:
    """Dask's last attempt may be too short to be refused."""
    address = f"tcp://127.0.0.1:{free_port()}"
    assert (await fault_of(address, TimeoutError(), LIMIT_S)).said == "nobody listens there"


async def test_an_address_that_drops_what_comes_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "PLAIN_S", LIMIT_S)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"  # its queue is full
        assert (await fault_of(address, TimeoutError(), 5.0)).said == "nothing within 5 s"


async def test_a_scheduler_that_accepts_a_worker_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = await refused(f"tcp://127.0.0.1:{server.getsockname()[1]}", None)
    assert f"within {LIMIT_S:g} s (nothing within {LIMIT_S:g} s)" in said


async def test_a_scheduler_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "TRY_S", LIMIT_S)
    configure_dask()
    port, said = free_port(), asyncio.Queue[str]()
    waiting = asyncio.create_task(reach(f"tcp://127.0.0.1:{port}", None, LATE_S, said.put_nowait))
    assert await asyncio.wait_for(said.get(), LATE_S) == (
        f"not reached yet, asking again for up to {LATE_S:g} s: nobody listens there"
    )
    async with open_scheduler("127.0.0.1", port, None):
        await asyncio.wait_for(waiting, LATE_S)
