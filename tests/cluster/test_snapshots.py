"""Snapshots between hosts: real connections; most hosts are servers of this process, each with a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.comm import Comm
from distributed.core import Server, Status, connect, rpc
from distributed.protocol import to_serialize
from distributed.security import Security

from pearl.cluster import snapshots
from pearl.cluster.actor_ref import LostWorkers
from pearl.cluster.errors import ActorCallFailed, ActorLost, ActorTimeout
from pearl.cluster.snapshots import SnapshotExchange, Source, fetch_at, retire_at
from pearl.weights.copies import HostCopies, Origin
from pearl.weights.fanout import FanOut
from pearl.weights.snapshot import DATA, MANIFEST, read_tensors, snapshot_directory, write_snapshot
from tests.cluster.support import ENVIRONMENT, START_S, Watched

VERSION = 3
FETCH_S = 60.0


def publish(root: Path, version: int = VERSION, floats: int = 300_000) -> Origin:
    """Several pieces of PIECE, and tensors that end anywhere in them."""
    tensors = ((f"t{i}", torch.randn(floats // (i + 1))) for i in range(5))
    write_snapshot(root, version, "shape", tensors)
    return Origin("trainer", str(root))


def data_of(directory: Path | str) -> bytes:
    return (Path(directory) / DATA).read_bytes()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 100_000)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return publish(tmp_path / "pearl-1-2-run")


class Host:
    """Some slots of one host, with the worker's own handlers."""

    def __init__(self, name: str, base: Path, slots: int = 1, security: Security | None = None) -> None:
        base.mkdir(exist_ok=True)
        self.name, self.security = name, security or Security()
        self.slots = [Slot(name, base, self.security) for _ in range(slots)]

    async def __aenter__(self) -> Host:
        scheme = "tls" if self.security.tls_ca_file else "tcp"
        for slot in self.slots:
            await slot.listen(f"{scheme}://127.0.0.1:0", **self.security.get_listen_args("worker"))
        return self

    async def __aexit__(self, *error: object) -> None:
        for slot in self.slots:
            await slot.close()
            slot.copies.close()

    def source(self, slot: int = 0) -> list[str]:
        return [f"{self.name}-{slot}", self.slots[slot].address]


class Slot(Server):
    def __init__(self, host: str, base: Path, security: Security) -> None:
        super().__init__({}, connection_args=security.get_connection_args("worker"))
        self.connection_args = security.get_connection_args("worker")
        self.copies = HostCopies(host, base)
        self.exchange = SnapshotExchange(self, self.copies)

    async def bring(self, origin: Origin, *sources: list[str], timeout_s: float = FETCH_S) -> dict[str, Any]:
        return await self.exchange.fetch(origin.to_wire(), VERSION, list(sources), timeout_s)


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[tuple[Host, Host, Host]]:
    async with (
        Host("trainer", tmp_path / "T") as trainer,
        Host("a", tmp_path / "A", 2) as a,
        Host("b", tmp_path / "B") as b,
    ):
        yield trainer, a, b


class Odd(Server):
    """A source that misbehaves in the way that `stream` does."""

    def __init__(self, stream: Callable[..., Any]) -> None:
        super().__init__({"pearl_snapshot_stream": stream})

    async def __aenter__(self) -> list[str]:
        await self.listen("tcp://127.0.0.1:0")
        return ["odd", self.address]

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def send(comm: Comm, origin: dict[str, str], upto: int, spoil: int | None = None) -> None:
    """The manifest and the first `upto` bytes, one of them wrong."""
    directory = snapshot_directory(Path(origin["root"]), VERSION)
    await comm.write({"manifest": (directory / MANIFEST).read_bytes()})
    data = bytearray(data_of(directory)[:upto])
    if spoil is not None:
        data[spoil] ^= 1
    await comm.read()
    await comm.write({"data": to_serialize(memoryview(data))})


async def test_a_host_takes_what_the_trainer_wrote_and_its_slots_share_it(
    three: tuple[Host, Host, Host], origin: Origin
) -> None:
    trainer, a, _ = three
    both = await asyncio.gather(*(slot.bring(origin, trainer.source()) for slot in a.slots))
    original = snapshot_directory(Path(origin.root), VERSION)
    assert {reply["directory"] for reply in both} == {str(a.slots[0].copies.directory(origin, VERSION))}
    assert data_of(both[0]["directory"]) == data_of(original)
    assert [sum(reply["fetched"].values()) for reply in both] == [len(data_of(original)), 0]
    assert not (await a.slots[1].bring(origin, ["nobody", "tcp://127.0.0.1:1"]))["fetched"]


async def test_the_last_piece_arrives_whole_though_it_is_larger_than_any_buffer(
    three: tuple[Host, Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 8 << 20)
    trainer, a, b = three
    origin = publish(tmp_path / "pearl-1-2-large", floats=6_000_000)
    reply = await a.slots[0].bring(origin, trainer.source(), b.source())
    assert reply["left"] == {} and list(reply["fetched"]) == ["trainer-0"]


async def test_hosts_that_fetch_at_once_take_one_copy_from_the_trainer(tmp_path: Path, origin: Origin) -> None:
    """A chain of four: each takes it from the one before while that one still fetches."""
    names, fan = ["a", "b", "c", "d"], FanOut("trainer")
    async with contextlib.AsyncExitStack() as stack:
        hosts = {name: await stack.enter_async_context(Host(name, tmp_path / name, 2)) for name in ["trainer", *names]}
        asks = [
            slot.bring(origin, *(hosts[source].source() for source in fan.sources(VERSION, name)))
            for name in names
            for slot in hosts[name].slots
        ]
        replies = await asyncio.gather(*asks)
        came: Counter[str] = Counter()
        for reply in replies:
            came.update(reply["fetched"])
        whole = data_of(snapshot_directory(Path(origin.root), VERSION))
        assert came == {f"{source}-0": len(whole) for source in ["trainer", "a", "b", "c"]}
        assert all(data_of(reply["directory"]) == whole for reply in replies)


async def test_a_source_that_dies_midway_is_replaced_and_nothing_comes_twice(
    three: tuple[Host, Host, Host], origin: Origin
) -> None:
    trainer, a, _ = three

    async def dies(comm: Comm, origin: dict[str, str], version: int) -> Status:
        await send(comm, origin, 1_300_000)  # the first tensor has 1,200,000 bytes
        comm.abort()
        return Status.dont_reply

    async with Odd(dies) as odd:
        reply = await a.slots[0].bring(origin, odd, trainer.source())
    whole = data_of(snapshot_directory(Path(origin.root), VERSION))
    assert data_of(reply["directory"]) == whole
    assert reply["fetched"] == {"odd": 1_300_000, "trainer-0": len(whole) - 1_200_000}


async def test_a_source_that_falls_silent_is_left(
    three: tuple[Host, Host, Host], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, a, _ = three
    monkeypatch.setattr(snapshots, "SILENCE_S", 0.2)

    async def silent(comm: Comm, origin: dict[str, str], version: int) -> Status:
        await send(comm, origin, 100)
        await asyncio.Event().wait()
        return Status.dont_reply

    async with Odd(silent) as odd:
        reply = await a.slots[0].bring(origin, odd, trainer.source())
    assert set(reply["fetched"]) == {"odd", "trainer-0"}


async def test_a_source_that_never_gets_on_is_left(
    three: tuple[Host, Host, Host], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host b has nothing and fetches nothing; it says that it lives."""
    trainer, a, b = three
    monkeypatch.setattr(snapshots, "PATIENCE_S", 0.2)
    monkeypatch.setattr(snapshots, "WAITING_S", 0.05)
    reply = await a.slots[0].bring(origin, b.source(), trainer.source())
    assert set(reply["fetched"]) == {"trainer-0"}


async def test_damaged_bytes_are_fetched_from_another_source(three: tuple[Host, Host, Host], origin: Origin) -> None:
    trainer, a, _ = three

    async def spoils(comm: Comm, origin: dict[str, str], version: int) -> Status:
        size = len(data_of(snapshot_directory(Path(origin["root"]), VERSION)))
        await send(comm, origin, size, spoil=1_250_000)  # in the second tensor
        return Status.dont_reply

    whole = data_of(snapshot_directory(Path(origin.root), VERSION))
    async with Odd(spoils) as odd:
        reply = await a.slots[0].bring(origin, odd, trainer.source())
    assert data_of(reply["directory"]) == whole and reply["fetched"]["trainer-0"] == len(whole) - 1_200_000


async def test_another_snapshot_under_the_same_version_is_not_mixed_in(
    three: tuple[Host, Host, Host], origin: Origin, tmp_path: Path
) -> None:
    trainer, a, _ = three
    other = publish(tmp_path / "other")

    async def other_one(comm: Comm, origin: dict[str, str], version: int) -> Status:
        await send(comm, other.to_wire(), 100)
        return Status.dont_reply

    async def dies(comm: Comm, origin: dict[str, str], version: int) -> Status:
        await send(comm, origin, 100)
        comm.abort()
        return Status.dont_reply

    async with Odd(dies) as first, Odd(other_one) as second:
        reply = await a.slots[0].bring(origin, first, ["other", second[1]], trainer.source())
    assert data_of(reply["directory"]) == data_of(snapshot_directory(Path(origin.root), VERSION))
    assert "other" not in reply["fetched"]


async def test_a_fetch_without_a_source_that_has_it_says_what_each_said(
    three: tuple[Host, Host, Host], origin: Origin
) -> None:
    trainer, a, _ = three
    absent = Origin("trainer", origin.root + "-retired")
    reply = await a.slots[0].bring(absent, trainer.source(), ["nobody", "tcp://127.0.0.1:1"], timeout_s=0.5)
    assert "version 3 did not come to a" in reply["error"]
    assert "nobody: " in reply["error"] and "v3 is not there" in reply["error"]


def locked(copies: HostCopies, origin: Origin) -> bool:
    with copies.fetching(origin, VERSION) as mine:
        return not mine


@pytest.mark.parametrize("asks", [True, False])
async def test_a_receiver_that_is_there_and_does_nothing_is_left(
    three: tuple[Host, Host, Host], origin: Origin, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """It asks for nothing; or it does not mind that nothing comes."""
    trainer, _, b = three
    monkeypatch.setattr(snapshots, "RECEIVER_S", 0.2)
    comm = await connect((b if asks else trainer).source()[1])
    await comm.write({"op": "pearl_snapshot_stream", "reply": False, "origin": origin.to_wire(), "version": VERSION})
    with pytest.raises(OSError):
        while True:
            await comm.read()


async def test_a_worker_that_does_not_answer(
    three: tuple[Host, Host, Host], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, a, _ = three
    monkeypatch.setattr(snapshots, "ANSWER_MARGIN_S", 0.1)
    monkeypatch.setattr(snapshots, "RETIRE_S", 0.2)

    async def never(**_: Any) -> None:
        await asyncio.Event().wait()

    a.slots[0].handlers |= {"pearl_snapshot_fetch": never, "pearl_snapshot_retire": never}
    calls = Calls()
    with pytest.raises(ActorTimeout, match=r"a-0: weights of version 3: no answer within 0.3 s"):
        await fetch_at(calls, LostWorkers(), Source(*a.source()), origin, VERSION, [], 0.2)
    with pytest.raises(TimeoutError):
        await retire_at(calls, a.source()[1], origin, VERSION)


class Calls:
    """As much of a Dask client as calls a worker."""

    rpc = staticmethod(rpc)


async def test_a_slot_takes_over_when_the_one_that_fetches_gives_up(
    three: tuple[Host, Host, Host], origin: Origin
) -> None:
    trainer, a, b = three
    first = asyncio.create_task(a.slots[0].bring(origin, b.source()))
    while not locked(a.slots[1].copies, origin):  # noqa: ASYNC110 (it is another process that would hold it)
        await asyncio.sleep(0)
    second = asyncio.create_task(a.slots[1].bring(origin, trainer.source()))
    await asyncio.sleep(0)
    first.cancel()
    assert sum((await second)["fetched"].values())


async def test_a_host_that_retires_a_version_removes_its_copy(three: tuple[Host, Host, Host], origin: Origin) -> None:
    trainer, a, _ = three
    directory = Path((await a.slots[0].bring(origin, trainer.source()))["directory"])
    await trainer.slots[0].exchange.retire(origin.to_wire(), VERSION)
    await a.slots[1].exchange.retire(origin.to_wire(), VERSION)
    assert not directory.exists() and snapshot_directory(Path(origin.root), VERSION).exists()


def certificates(folder: Path) -> Security:
    """A certificate that signs itself, which both sides trust."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pearl",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    files = {f"tls_{role}_{what}": str(path) for role in ("worker", "client", "scheduler")
             for what, path in (("cert", certificate), ("key", key))}  # fmt: skip
    return Security(tls_ca_file=str(certificate), require_encryption=True, **files)


async def test_weights_travel_encrypted_and_no_stranger_gets_them(tmp_path: Path, origin: Origin) -> None:
    try:
        security = certificates(tmp_path)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    async with (
        Host("trainer", tmp_path / "T", security=security) as trainer,
        Host("a", tmp_path / "A", security=security) as a,
    ):
        address = trainer.slots[0].address
        assert address.startswith("tls://")
        reply = await a.slots[0].bring(origin, trainer.source())
        assert data_of(reply["directory"]) == data_of(snapshot_directory(Path(origin.root), VERSION))
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        for scheme, arguments in (("tls", {"ssl_context": stranger}), ("tcp", {})):
            with pytest.raises(OSError):
                comm = await connect(f"{scheme}://{address.split('://')[1]}", timeout=2, **arguments)
                await comm.write({"op": "pearl_snapshot_stream", "origin": origin.to_wire(), "version": VERSION})
                await comm.read()


# --- worker processes ---------------------------------------------------------------------------------------------


async def start(cluster: Watched, slot: str, host: str) -> Source:
    environment = {**ENVIRONMENT, "PEARL_HOST": host}
    worker = await cluster.local.start_worker(slot, 1, "reserved", environment, START_S)
    assert worker.address is not None and (await cluster.event("joined")).identity.host == host
    return Source(slot, worker.address)


async def test_worker_processes_of_two_hosts_share_one_copy_of_each(tmp_path: Path) -> None:
    """Each host's processes have a folder of their own in this machine's shared memory."""
    origin = publish(tmp_path / f"pearl-{os.getpid()}-0-{random.getrandbits(32):x}", floats=6_000_000)
    cluster = Watched(tmp_path / "workers")
    async with cluster.local as local:
        trainer, a0, a1, b0 = [
            await start(cluster, slot, host)
            for slot, host in (("t-0", "trainer"), ("a-0", "a"), ("a-1", "a"), ("b-0", "b"))
        ]

        async def bring(target: Source, *sources: Source, timeout_s: float = FETCH_S) -> dict[str, Any]:
            return await fetch_at(local.client, local.lost, target, origin, VERSION, list(sources), timeout_s)

        replies = await asyncio.gather(bring(a0, trainer), bring(a1, trainer), bring(b0, a1, trainer))
        whole = snapshot_directory(Path(origin.root), VERSION)
        came = [reply["fetched"] for reply in replies]
        assert sum(sum(fetched.values()) for fetched in came[:2]) == len(data_of(whole))
        assert came[2] == {"a-1": len(data_of(whole))}, replies[2]["left"]
        folders = {reply["directory"] for reply in replies}
        assert len(folders) == 2 and all("pearl-copy-" in folder for folder in folders)
        for folder in folders:
            assert dict(read_tensors(Path(folder))).keys() == dict(read_tensors(whole)).keys()
        await retire_at(local.client, a0.address, origin, VERSION)
        assert [Path(folder).exists() for folder in sorted(folders)] == [False, True]

        local.workers["b-0"].process.send_signal(signal.SIGTERM)
        await cluster.event("notice")
        local.workers["b-0"].process.send_signal(signal.SIGTERM)
        await cluster.event("left")
        with pytest.raises(ActorLost, match="b-0: weights of version 3: its worker is gone"):
            await bring(b0, trainer)
        assert not Path(max(folders)).parent.exists(), "the last slot of a host has left its copies"
        with pytest.raises(ActorCallFailed, match="did not come to a"):
            await bring(a0, timeout_s=0.1)


async def test_a_fetch_whose_worker_dies_is_over_at_once(tmp_path: Path) -> None:
    cluster, origin = Watched(tmp_path / "workers"), Origin("trainer", "/nowhere/pearl-x")
    async with cluster.local as local:
        a = await start(cluster, "a-0", "a")
        call = asyncio.create_task(fetch_at(local.client, local.lost, a, origin, VERSION, [], FETCH_S))
        await local.kill("a-0")
        with pytest.raises(ActorLost, match="a-0"):
            await call


def test_a_call_to_a_lost_worker_is_refused_without_being_sent() -> None:
    lost = LostWorkers()
    lost.mark("tcp://127.0.0.1:1", "lost: its connection broke")
    target = Source("a-0", "tcp://127.0.0.1:1")
    with pytest.raises(ActorLost, match="its connection broke"):
        asyncio.run(fetch_at(None, lost, target, Origin("t", "/x"), VERSION, [], 1.0))
