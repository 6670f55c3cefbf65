"""Roles of a live server: switched while another one serves, refused when it must not, restarted where it cannot."""

from __future__ import annotations

import asyncio
import copy
import ctypes
from pathlib import Path
from typing import Any

import pytest

from actors.rollout import RolloutWorker
from actors.sglang import plugin, roles, transfer
from actors.sglang.errors import EngineError, EngineTimeout, RestartNeeded
from pearl.core.layout import Role
from pearl.errors import UserError
from pearl.live import doctor
from tests.engine.support import progress, request, start, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]
ALL_WAYS = ("prefill", "decode", "colocated", "decode", "prefill", "colocated")
"""Every transition between two roles, once; colocated before and after."""


async def test_every_switch_is_live_while_another_engine_serves(engine: RolloutWorker, partner: RolloutWorker) -> None:
    process, before = engine._process, await engine.generate(request("before"))
    serving, answers = True, []

    async def serve_on() -> None:
        while serving:
            answers.append(await partner.generate(request("serving")))

    server = asyncio.create_task(serve_on())
    for role in ALL_WAYS:
        done = len(answers)
        switched = await engine.switch_role(role)
        assert (switched["role"], switched["way"]) == (role, "live")
        assert (await engine.metrics())["role"] == role
        await until(lambda: len(answers) > done)  # noqa: B023
    serving = False
    await server
    assert engine._process is process
    assert {tuple(answer["token_ids"]) for answer in answers} == {tuple(before["token_ids"])}
    after = await engine.generate(request("after"))
    assert (after["token_ids"], after["versions"]) == (before["token_ids"], before["versions"])
    assert after["cached_tokens"] == 0


async def test_switch_needs_an_idle_engine(engine: RolloutWorker, partner: RolloutWorker) -> None:
    call = asyncio.create_task(engine.generate(request("busy", tokens=300)))
    await until(lambda: progress(engine).get("busy", 0) > 0)
    with pytest.raises(EngineError, match=r"is not idle \(1 requests pending\), so it keeps its role colocated"):
        await engine.switch_role("prefill")
    assert (await call)["finish"] == "length"
    await engine.pause("in_place")
    with pytest.raises(EngineError, match="is paused"):
        await engine.switch_role("prefill")
    await engine.resume()
    assert (await engine.metrics())["role"] == "colocated"


class Refusing:
    """An engine without our plugin."""

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        if path == "/pd_role_switch":
            raise EngineError(f"{path}: status 400, invalid new_role={body['new_role']!r}")
        return {"output_ids": [1]}


async def test_server_that_cannot_take_a_role_asks_for_a_restart() -> None:
    http: Any = Refusing()
    with pytest.raises(RestartNeeded, match="invalid new_role=''"):
        await roles.switch(http, Role.DECODE, Role.COLOCATED, timeout_s=1.0)


class Restless:
    """An engine that never is without requests."""

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        raise EngineError(f"{path}: status 400, Flush cache failed; instance is not idle")


async def test_engine_that_never_comes_to_rest() -> None:
    engine: Any = Restless()
    with pytest.raises(EngineTimeout, match=r"did not come to rest within 0\.1 s"):
        await roles.until_idle(engine, timeout_s=0.1)
    with pytest.raises(EngineTimeout, match=r"did not switch within 0\.1 s"):
        await roles.switch(engine, Role.DECODE, Role.PREFILL, timeout_s=0.1)


async def test_restart_brings_the_same_weights_back(engine: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that would start is the one that runs."""
    if engine._kv is None:
        pytest.skip(str(transfer.missing()))
    client, stopped = engine._client, []
    before = await engine.generate(request("before"))

    async def refuse(*_: Any, **__: Any) -> None:
        raise RestartNeeded("as an old engine would")

    async def launch(_: Any, role: Role) -> None:
        fresh = copy.copy(client)
        assert fresh is not None
        fresh.role, fresh.version = role, None
        engine._client = fresh

    async def stop(grace_s: float) -> None:
        stopped.append(grace_s)

    with monkeypatch.context() as patch:
        patch.setattr(client, "switch_role", refuse)
        patch.setattr(engine, "_launch", launch)
        patch.setattr(engine, "stop", stop)
        switched = await engine.switch_role("colocated")
    assert (switched["way"], stopped) == ("restart", [0.0])
    assert engine._client is not client
    after = await engine.generate(request("after"))
    assert (after["token_ids"], after["versions"]) == (before["token_ids"], before["versions"])


async def test_role_without_an_interface_is_the_users_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is to be a decode engine, and no interface is named"):
        await start(RolloutWorker(), tiny_model, tmp_path, role="decode", kv_interface=None)
    with pytest.raises(UserError, match="'no-such0' has no IPv4 address"):
        await start(RolloutWorker(), tiny_model, tmp_path, kv_interface="no-such0")


async def test_doctor_names_what_roles_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    found = doctor._roles()
    assert found.state == "missing" and "by a restart" in found.text and "pip install -e" in found.remedy

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(transfer, "find_spec", lambda name: name)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    found = doctor._transfer()
    assert found.state == "missing" and "colocated only" in found.text and "apt-get install libibverbs1" in found.remedy


async def test_plugin_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.available() == ""
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.24")
    assert "pinned to sglang 0.5.23; this is 0.5.24" in plugin.available()
