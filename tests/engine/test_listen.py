"""Where an engine that hands KV on listens, as the kernel says."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.rollout import RolloutWorker
from actors.sglang import transfer
from actors.sglang.listen import Listener, listeners, strays
from actors.sglang.transfer import KvEndpoint, require_private
from pearl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE = """
import os, sys
from actors.sglang.listen import KeepOn, listeners
if sys.argv[2] == "kept":
    sys.meta_path.insert(0, KeepOn(sys.argv[1]))
from mooncake.engine import TransferEngine
os.environ["MC_FORCE_TCP"] = "1"
one, two = TransferEngine(), TransferEngine()
assert not one.initialize(sys.argv[1], "P2PHANDSHAKE", "tcp", "")
assert not two.initialize(sys.argv[1], "P2PHANDSHAKE", "tcp", "")
source, target = one.allocate_managed_buffer(4096), two.allocate_managed_buffer(4096)
one.write_bytes_to_buffer(source, b"kv" * 2048, 4096)
assert not one.transfer_sync_write(f"{sys.argv[1]}:{two.get_rpc_port()}", source, target, 4096)
assert two.read_bytes_from_buffer(target, 4096) == b"kv" * 2048
print("LISTENS", *sorted({listener.host for listener in listeners()}), len(listeners()))
os._exit(0)
"""
"""Two transfer engines of one process, the KV of one written into the other."""


def mooncake(host: str, way: str) -> list[str]:
    if (lacking := transfer.missing()) is not None:
        pytest.skip(str(lacking))
    command = [sys.executable, "-c", MOONCAKE, host, way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    assert lines, done.stderr
    return lines[0].split()[1:]


def addresses() -> list[str]:
    """Loopback, and the first address of another interface if there is one."""
    families = [a for interface in psutil.net_if_addrs().values() for a in interface if a.family is socket.AF_INET]
    others = [a.address for a in families if not a.address.startswith("127.")]
    return ["127.0.0.1", *others[:1]]


@pytest.mark.parametrize("host", addresses())
def test_transfer_engines_listen_on_the_named_address_only_and_reach_each_other(host: str) -> None:
    assert mooncake(host, "kept") == [host, "4"]


def test_mooncake_by_itself_listens_everywhere() -> None:
    """Else all this is not needed any more."""
    assert set(mooncake("127.0.0.1", "alone")) & {"0.0.0.0", "::"}


def test_what_listens_is_read_from_the_kernel() -> None:
    with socket.socket() as own, socket.socket() as every, socket.socket(socket.AF_INET6) as mapped:
        own.bind(("127.0.0.1", 0))
        every.bind(("0.0.0.0", 0))
        mapped.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        mapped.bind(("::ffff:127.0.0.1", 0))
        for each in (own, every, mapped):
            each.listen()
        here = set(listeners())
        assert Listener("127.0.0.1", own.getsockname()[1]) in here
        assert Listener("127.0.0.1", mapped.getsockname()[1]) in here
        port = every.getsockname()[1]
        assert Listener("0.0.0.0", port) in strays("127.0.0.1")
        pid = psutil.Process().pid
        with pytest.raises(UserError, match=rf"the engine listens on .*0\.0\.0\.0:{port}, beyond its KV interface"):
            require_private(KvEndpoint("127.0.0.1", 1, 1), [pid])
    assert Listener("0.0.0.0", port) not in strays("127.0.0.1")
    with subprocess.Popen(["true"]) as gone:
        pass
    assert listeners(gone.pid) == []


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
async def test_an_engine_listens_on_its_kv_interface_and_loopback_only(
    engine: RolloutWorker, partner: RolloutWorker, role: str
) -> None:
    """`partner` says by its presence that KV transfer is to be had here."""
    await engine.switch_role(role)
    assert engine._process is not None and engine._kv is not None
    pids = [process.pid for process in engine._process.processes()]
    assert not [stray for pid in pids for stray in strays(engine._kv.host, pid)]
    assert {listener.host for pid in pids for listener in listeners(pid)} == {engine._kv.host}
