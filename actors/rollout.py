"""The rollout worker: a Dask actor that owns one SGLang server and everything that is said to it.

Arguments and results are plain dicts, lists, strings and numbers, because they travel between machines. Bulk data never
does: weights come as the path of a snapshot on this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.sglang.args import plan_server
from actors.sglang.client import EngineClient, PauseMode
from actors.sglang.errors import EngineDied, EngineError, PortTaken
from actors.sglang.generation import GenerateRequest, Generation
from actors.sglang.http import EngineHttp
from actors.sglang.process import EngineProcess, free_port, require_free
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.core.trajectory import FinishReason
from pearl.weights.snapshot import config_hash

STARTS = 3
"""A free port can be taken by another process before the server binds it; then another one is tried."""


class RolloutWorker:
    """One engine. `start` it, `sync` it to weights, then `generate`; after `stop` it can be started again.

    Once the engine has died, every call but `stop` and `start` raises EngineDied with the last lines of its log, and
    `generate` returns the tokens that had arrived with `finish` = lost.
    """

    def __init__(self) -> None:
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
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
        *,
        port: int | None = None,
    ) -> dict[str, Any]:
        """Start the server and wait until it answers.

        `engine` and `model` are dumps of EngineConfig and ModelConfig; the log is `run_dir/engines/<name>.log`.
        Raises UserError for what cannot work, EngineDied or EngineTimeout if the server does not come up.
        """
        if self._process is not None and not self._process.died.done():
            raise EngineError(f"{name}: an engine is running already (pid {self._process.pid}); stop it first")
        await self._release()
        settings, weights = EngineConfig(**engine), ModelConfig(**model)
        directory = Path(model_directory)
        log = Path(run_dir) / "engines" / f"{name}.log"
        if port is not None:
            require_free(port)
        for attempt in range(1, STARTS + 1):
            chosen = port or free_port()
            plan = plan_server(settings, weights, directory, port=chosen, seed=seed)
            try:
                process = await EngineProcess.start(
                    plan.flags, plan.environment, port=chosen, log=log, timeout_s=timeout_s
                )
                break
            except PortTaken:
                if port is not None or attempt == STARTS:
                    raise
        self._process = process
        self._client = EngineClient(
            EngineHttp(process.url, process.died),
            config_hash=config_hash(directory),
            vocabulary=json.loads((directory / "config.json").read_text())["vocab_size"],
            report=log.with_suffix(".load"),
            ranks=settings.tensor_parallel,
        )
        info = await self._client.server_info()
        return {
            "name": name,
            "pid": process.pid,
            "port": process.port,
            "start_s": process.start_s,
            "device": plan.device,
            "sglang_version": info["version"],
            "max_total_tokens": info.get("max_total_num_tokens", settings.max_total_tokens),
            "log": str(log),
        }

    async def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `request`: those of GenerateRequest. Result: token_ids, logprobs (see `generation` for their
        temperature), versions ([version, count] runs), finish (a FinishReason), reason, first_token_s (None without a
        token), first_tokens, seconds, cached_tokens, and, negative where not measured, queue_s, prefill_s,
        decode_batch, decode_kv_tokens and stall_s. A bad request is finish = failed; nothing raises but a dead or
        missing engine that was dead before the call."""
        client = self._live()
        try:
            parsed = GenerateRequest.from_wire(request)
        except (ValueError, TypeError) as error:
            refused = Generation()
            refused.end(FinishReason.FAILED, str(error))
            return refused.to_wire()
        result = await client.generate(parsed)
        self._generated += len(result.token_ids)
        self._prompt += len(parsed.token_ids) if result.token_ids else 0
        self._cached += result.cached_tokens
        return result.to_wire()

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

    async def release_memory(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """End all requests and give device memory back; `resume_memory` and `sync` before generating again."""
        await self._live().release_memory(timeout_s=timeout_s)
        return {}

    async def resume_memory(self, timeout_s: float = 60.0) -> dict[str, Any]:
        await self._live().resume_memory(timeout_s=timeout_s)
        return {}

    async def metrics(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Load now (requests, tokens of KV cache, throughput as the scheduler sees it) and totals since the start."""
        client, process = self._live(), self._process
        assert process is not None
        load = await client.loads(timeout_s=timeout_s)
        return {
            "version": client.version,
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
