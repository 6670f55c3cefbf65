"""The rollout worker: a Dask actor that owns one SGLang server and everything that is said to it.

Arguments and results are plain dicts, lists, strings and numbers, because they travel between machines. Bulk data never
does: weights come as the path of a snapshot on this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.sglang import memory, plugin
from actors.sglang.args import Device
from actors.sglang.client import EngineClient, PauseMode
from actors.sglang.engine import Start, start_engine
from actors.sglang.errors import EngineDied, EngineError, RestartNeeded
from actors.sglang.generation import GenerateRequest, Generation
from actors.sglang.process import EngineProcess
from actors.sglang.transfer import KvEndpoint, interface_address
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.core.layout import Role
from pearl.core.trajectory import FinishReason
from pearl.errors import UserError

RELEASED_SHARE = 0.9
"""Of the bytes that a release names, this much must be seen to come free, or the next owner must not count on them."""


class RolloutWorker:
    """One engine. `start` it, `sync` it to weights, then `generate`; after `stop` it can be started again.

    With a KV interface it can `switch_role`. A prefill and a decode engine serve a request together: both get the same
    one, with a `pair`, the first by `prefill`, the second by `generate`.

    Once the engine has died, every call but `stop` and `start` raises EngineDied with the last lines of its log, and
    `generate` returns the tokens that had arrived with `finish` = lost.
    """

    def __init__(self) -> None:
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._begun: Start | None = None
        self._device: Device = "cpu"
        self._kv: KvEndpoint | None = None
        self._snapshot: tuple[str, int] | None = None
        self._generated = 0
        self._prompt = 0
        self._cached = 0

    async def start(
        self,
        engine: Mapping[str, Any],
        model: Mapping[str, Any],
        model_directory: str,
        run_dir: str,
        name: str,
        seed: int,
        timeout_s: float = 600.0,
        role: str = Role.COLOCATED,
        kv_interface: str | None = None,
        *,
        port: int | None = None,
    ) -> dict[str, Any]:
        """Start the server and wait until it answers in its `role`.

        `engine` and `model` are dumps of EngineConfig and ModelConfig; the log is `run_dir/engines/<name>.log`. KV
        travels over the network interface `kv_interface` of this host ("lo" on one machine); None: colocated only. In
        the result, `kv` is what a `pair` needs of a prefill engine besides its room.
        Raises UserError for what cannot work, EngineDied or EngineTimeout if the server does not come up.
        """
        if self._process is not None and not self._process.died.done():
            raise EngineError(f"{name}: an engine is running already (pid {self._process.pid}); stop it first")
        await self._release()
        if role != Role.COLOCATED and kv_interface is None:
            raise UserError(
                f"{name} is to be a {role} engine, and no interface is named for its KV",
                "Name a network interface that only the cluster reaches, or serve colocated.",
            )
        begun = self._begun = Start(
            settings=EngineConfig(**engine),
            weights=ModelConfig(**model),
            directory=Path(model_directory),
            log=Path(run_dir) / "engines" / f"{name}.log",
            seed=seed,
            timeout_s=timeout_s,
            port=port,
            kv_host=None if kv_interface is None else interface_address(kv_interface),
        )
        await self._launch(begun, Role(role))
        client, process = self._live(), self._process
        assert process is not None
        info = await client.server_info()
        return {
            "name": name,
            "pid": process.pid,
            "port": process.port,
            "start_s": process.start_s,
            "device": self._device,
            "sglang_version": info["version"],
            "max_total_tokens": info.get("max_total_num_tokens", begun.settings.max_total_tokens),
            "log": str(begun.log),
            "role": str(client.role),
            "kv": self._kv.to_wire() if self._kv else None,
        }

    async def _launch(self, begun: Start, role: Role) -> None:
        self._process, self._client, self._device, self._kv = await start_engine(begun, role)

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `request`: those of GenerateRequest. Result: token_ids, logprobs (see `generation` for their
        temperature), versions ([version, count] runs), finish (a FinishReason), reason, first_token_s (None without a
        token), first_tokens, seconds, cached_tokens, and, negative where not measured, queue_s, prefill_s (with
        prefill_share), decode_batch, decode_kv_tokens and stall_s. A bad request is finish = failed; nothing raises but
        a dead or missing engine that was dead before the call. Lost with `peer_lost`: the prefill half of its pair did
        not hand its KV on; no token came of it, and this engine is well."""
        result = await self._serve(request, decodes=True)
        self._generated += len(result.token_ids)
        return result.to_wire()

    async def prefill(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the prompt of a pair's request and hand its KV to the decode engine that generates it.

        Returns once this engine has no part in it any more: `handed_on`, or how it ended otherwise (finish, reason,
        peer_lost: the decode half is gone). prompt_tokens, cached_tokens, queue_s, prefill_s and seconds as measured.
        """
        result = await self._serve(request, decodes=False)
        wire = result.to_wire()
        kept = ("finish", "reason", "peer_lost", "seconds", "cached_tokens", "queue_s", "prefill_s")
        return {
            "handed_on": result.finish in (FinishReason.LENGTH, FinishReason.STOP),
            "prompt_tokens": len(request["token_ids"]),
            **{name: wire[name] for name in kept},
        }

    async def _serve(self, request: Mapping[str, Any], *, decodes: bool) -> Generation:
        client = self._live()
        refused = Generation()
        if (client.role is Role.PREFILL) is decodes:
            refused.end(FinishReason.FAILED, f"a {client.role} engine does not {'decode' if decodes else 'prefill'}")
            return refused
        try:
            parsed = GenerateRequest.from_wire(request)
        except (ValueError, TypeError) as error:
            refused.end(FinishReason.FAILED, str(error))
            return refused
        result = await client.generate(parsed)
        self._prompt += len(parsed.token_ids) if result.token_ids else 0
        self._cached += result.cached_tokens
        return result

    async def interrupt(self, rid: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """End one request, such as one half of a pair whose other half is gone; its call returns what it had."""
        return {"aborted": int(await self._live().abort(rid, timeout_s=timeout_s))}

    async def abort(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """End all pending generate calls; returns once each has its partial tokens."""
        began = time.monotonic()
        aborted = await self._live().abort_all(timeout_s=timeout_s)
        return {"aborted": aborted, "seconds": time.monotonic() - began}

    async def sync(self, directory: str, version: int, timeout_s: float = 300.0) -> dict[str, Any]:
        """Load and verify the snapshot in `directory`. Pending generate calls are aborted first, later ones wait.

        Raises StaleVersion, WeightLoadError (then nothing is generated until a sync succeeds), EngineTimeout or
        EngineDied. With `unverified` = 0, `checksum` equals the manifest's.
        """
        began = time.monotonic()
        loaded = await self._live().load_snapshot(Path(directory), version, timeout_s=timeout_s)
        self._snapshot = directory, version
        return {
            "version": loaded.version,
            "checksum": loaded.checksum,
            "verified": loaded.verified,
            "unverified": len(loaded.unverified),
            "seconds": time.monotonic() - began,
            "read_s": loaded.read_s,
            "load_s": loaded.load_s,
            "verify_s": loaded.verify_s,
        }

    async def pause(self, mode: PauseMode = "abort", timeout_s: float = 60.0) -> dict[str, Any]:
        """Stop generation: `abort`, `in_place` or `retract` (see EngineClient.pause)."""
        if mode not in ("abort", "in_place", "retract"):
            raise ValueError(f"pause mode {mode!r} is none of abort, in_place, retract")
        await self._live().pause(mode, timeout_s=timeout_s)
        return {"mode": mode, "pending": self._live().pending}

    async def resume(self, timeout_s: float = 60.0) -> dict[str, Any]:
        await self._live().resume(timeout_s=timeout_s)
        return {"pending": self._live().pending}

    async def flush(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Empty the prefix cache; EngineError while requests are pending."""
        await self._live().flush_cache(timeout_s=timeout_s)
        return {}

    async def switch_role(self, role: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Serve in another role, with the same weights; refused (EngineError) while requests are pending.

        `way`: live, or restart where the live server cannot (a restart has the start's own deadline besides, and loads
        the newest snapshot again). Raises UserError without a KV interface, EngineError where it ends in no role.
        """
        began = time.monotonic()
        client, begun, wanted = self._live(), self._begun, Role(role)
        assert begun is not None
        if begun.kv_host is None and wanted is not client.role:
            raise UserError(
                f"{begun.log.stem} was started without a KV interface, so it stays a {client.role} engine",
                "Name a network interface that only the cluster reaches when it starts.",
            )
        way = "live"
        try:
            if self._kv is None and wanted is not Role.COLOCATED:
                client.require_idle()
                raise RestartNeeded("it was started without KV transfer, because of the missing plugin")
            await client.switch_role(wanted, timeout_s=timeout_s)
        except RestartNeeded:
            way = "restart"
            await self.stop(grace_s=0.0)
            await self._launch(begun, wanted)
            if self._snapshot is not None and client.version is not None:
                await self.sync(*self._snapshot, timeout_s=timeout_s)
        kv = self._kv.to_wire() if self._kv else None
        return {"role": str(wanted), "way": way, "kv": kv, "seconds": time.monotonic() - began}

    async def release_memory(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """End all requests and give the memory of weights and KV cache back; `resume_memory` and `sync` come before
        the next request. `freed_bytes` are as measured: resident memory of the engine's processes on a CPU, the
        driver's count of the devices on a GPU; `named_bytes` as the engine accounts for them. Raises EngineError if
        less than RELEASED_SHARE of them came free: then nobody else must count on that memory."""
        began = time.monotonic()
        client, process = self._live(), self._process
        assert process is not None and self._begun is not None
        used = await asyncio.to_thread(memory.used_bytes, self._device, process.rss_bytes)
        await client.release_memory(timeout_s=timeout_s)
        freed = used - await asyncio.to_thread(memory.used_bytes, self._device, process.rss_bytes)
        named = memory.read_report(self._begun.memory_report, self._begun.settings.tensor_parallel)
        if not named:
            raise EngineError(f"the engine does not say what it released: {plugin.available() or 'it left no report'}")
        total = sum(named.values())
        if freed < RELEASED_SHARE * total:
            raise EngineError(f"{freed / 1e6:.0f} MB came free of the {total / 1e6:.0f} MB that the engine released")
        return {"freed_bytes": freed, "named_bytes": total, **named, "seconds": time.monotonic() - began}

    async def resume_memory(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Take the memory again. What is in it is garbage: nothing is generated before a verified `sync`."""
        began = time.monotonic()
        client, process = self._live(), self._process
        assert process is not None
        used = await asyncio.to_thread(memory.used_bytes, self._device, process.rss_bytes)
        await client.resume_memory(timeout_s=timeout_s)
        taken = await asyncio.to_thread(memory.used_bytes, self._device, process.rss_bytes) - used
        return {"taken_bytes": taken, "seconds": time.monotonic() - began}

    async def metrics(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Load now (requests, tokens of KV cache, throughput as the scheduler sees it) and totals since the start."""
        client, process = self._live(), self._process
        assert process is not None
        load = await client.loads(timeout_s=timeout_s)
        return {
            "version": client.version,
            "role": str(client.role),
            "pending": client.pending,
            "pending_tokens": sum(client.progress().values()),
            "running": load["num_running_reqs"],
            "queued": load["num_waiting_reqs"],
            "used_tokens": load["num_used_tokens"],
            "capacity_tokens": load["max_total_num_tokens"],
            "token_usage": load["token_usage"],
            "tokens_per_s": load["gen_throughput"],
            "cache_hit_rate": load["cache_hit_rate"],
            "generated_tokens": self._generated,
            "prompt_tokens": self._prompt,
            "cached_tokens": self._cached,
            "rss_bytes": await asyncio.to_thread(process.rss_bytes),
            "counters": await client.metrics(timeout_s=timeout_s),
        }

    async def health(self, generate: bool = False, timeout_s: float = 30.0) -> dict[str, Any]:
        """Version served and calls pending; raises if the engine does not answer (or, with `generate`, sample)."""
        client = self._live()
        await client.health(generate=generate, timeout_s=timeout_s)
        return {"version": client.version, "pending": client.pending}

    async def stop(self, grace_s: float = 5.0) -> dict[str, Any]:
        """End the engine: pending generate calls return as lost. Harmless if there is none."""
        process = self._process
        if process is not None:
            await process.stop(grace_s)
        await self._release()
        return {"returncode": None if process is None else process.returncode}

    def _live(self) -> EngineClient:
        if self._process is None or self._client is None:
            raise EngineError("no engine was started")
        if self._process.died.done():
            raise EngineDied(self._process.died.result())
        return self._client

    async def _release(self) -> None:
        client, self._client, self._process = self._client, None, None
        if client is not None:
            with contextlib.suppress(EngineError):
                await client.close()
