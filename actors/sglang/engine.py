"""Start one engine in a role: process, client, and where its KV travels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from actors.sglang import memory, plugin
from actors.sglang.args import Device, plan_server
from actors.sglang.client import EngineClient
from actors.sglang.errors import EngineError, PortTaken, RestartNeeded
from actors.sglang.http import EngineHttp
from actors.sglang.process import EngineProcess, free_port, require_free
from actors.sglang.transfer import KvEndpoint, require_private
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.core.layout import Role
from pearl.weights.snapshot import config_hash

STARTS = 3
"""A free port can be taken by another process before the server binds it; then another one is tried."""


@dataclass(frozen=True, slots=True)
class Start:
    """All that an engine is started with, and started again in another role."""

    settings: EngineConfig
    weights: ModelConfig
    directory: Path
    """Of the model."""
    log: Path
    seed: int
    timeout_s: float
    port: int | None
    """None: a free one."""
    kv_host: str | None
    """Address that KV travels over; None: the engine is colocated for good."""

    @property
    def memory_report(self) -> Path:
        return self.log.with_suffix(".memory")


class Engine(NamedTuple):
    process: EngineProcess
    client: EngineClient
    device: Device
    kv: KvEndpoint | None


async def start_engine(start: Start, role: Role) -> Engine:
    """A server with KV transfer starts as a decode engine and is switched live; where the live switch to colocated is
    not to be had, a colocated engine is one without KV transfer.

    Raises UserError for what cannot work, EngineDied or EngineTimeout if the server does not come up.
    """
    if start.kv_host is not None and not (role is Role.COLOCATED and plugin.available()):
        engine = await _serve(start, start.kv_host)
        engine.client.role = Role.DECODE
        try:
            await engine.client.switch_role(role, timeout_s=start.timeout_s)
            return engine
        except BaseException as error:
            await end_engine(engine)
            if role is not Role.COLOCATED or not isinstance(error, RestartNeeded):
                raise
    return await _serve(start, None)


async def end_engine(engine: Engine) -> None:
    await engine.process.stop(grace_s=0.0)
    await engine.client.close()


async def _serve(start: Start, kv_host: str | None) -> Engine:
    if start.port is not None:
        require_free(start.port)
    for _ in range(STARTS):
        port = start.port or free_port()
        kv = None if kv_host is None else KvEndpoint(kv_host, free_port(), start.settings.tensor_parallel)
        plan = plan_server(start.settings, start.weights, start.directory, port=port, seed=start.seed, kv=kv)
        environment = plan.environment | {memory.REPORT: str(start.memory_report)}
        try:
            process = await EngineProcess.start(
                plan.flags, environment, port=port, log=start.log, timeout_s=start.timeout_s
            )
        except PortTaken:
            if start.port is not None:
                raise
            continue
        if kv is not None:
            try:
                require_private(kv, [part.pid for part in process.processes()])
            except BaseException:
                await process.stop(grace_s=0.0)
                raise
        client = EngineClient(
            EngineHttp(process.url, process.died),
            config_hash=config_hash(start.directory),
            vocabulary=json.loads((start.directory / "config.json").read_text())["vocab_size"],
            report=start.log.with_suffix(".load"),
            ranks=start.settings.tensor_parallel,
        )
        return Engine(process, client, plan.device, kv)
    raise EngineError(f"{STARTS} free ports in a row were taken before the server had bound them")
