"""What PEARL does with one engine: generate, abort, pause, load weights, and ask how it fares.

A gate stands before generation. It is shut while the engine is paused, loads weights or ends all its requests; then a
request waits there, counted against its own deadline, and can be aborted there. Nothing is generated unless a snapshot
was loaded and verified. Control calls exclude each other; generate calls do not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

from actors.sglang import roles
from actors.sglang.errors import EngineError, EngineTimeout, StaleVersion
from actors.sglang.flight import Flight
from actors.sglang.generation import GenerateRequest, Generation
from actors.sglang.http import EngineHttp
from actors.sglang.loader import Order
from actors.sglang.meter import DecodeMeter
from actors.sglang.update import Loaded, update_weights
from pearl.core.layout import Role
from pearl.core.trajectory import FinishReason

PauseMode = Literal["abort", "in_place", "retract"]
ABORT_REPEAT_S = 0.25
"""An abort can reach the server before the request does, so it is repeated until the stream has ended."""


class EngineClient:
    def __init__(self, http: EngineHttp, *, config_hash: str, vocabulary: int, report: Path, ranks: int = 1) -> None:
        """`config_hash` (see `pearl.weights.snapshot`) and `vocabulary` (its size) are of the engine's model; `report`
        is a path for load reports that client and engine both see; `ranks` the engine's tensor-parallel size."""
        self.version: int | None = None
        """Version that the engine serves; None before the first load, after a failed one, and without its memory."""
        self.role = Role.COLOCATED
        self.released = False
        """Its memory was given back."""
        self._http = http
        self._config_hash = config_hash
        self._vocabulary = vocabulary
        self._report = report
        self._ranks = ranks
        self._newest = -1
        self._flights: dict[str, Flight] = {}
        self._meter = DecodeMeter()
        self._paused: PauseMode | None = None
        self._shut: list[str] = []
        self._gate = asyncio.Event()
        self._gate.set()
        self._control = asyncio.Lock()

    @property
    def pending(self) -> int:
        """Generate calls that have not returned."""
        return len(self._flights)

    def progress(self) -> dict[str, int]:
        """Tokens that have arrived so far, by pending request."""
        return {rid: len(flight.result.token_ids) for rid, flight in self._flights.items()}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate until a stop, `max_new_tokens`, an abort, the deadline, or the death of the server. Never raises for
        any of these: `finish` and `reason` tell, and all tokens that arrived are there."""
        refused = Generation()
        if request.rid in self._flights:
            refused.end(FinishReason.FAILED, f"a request {request.rid!r} is pending already")
            return refused
        # The server looks a token up without a check: one outside the vocabulary ends it.
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocabulary:
            refused.end(FinishReason.FAILED, f"a token id is outside the vocabulary of {self._vocabulary}")
            return refused
        flight = self._flights[request.rid] = Flight(request, self._http, self._meter)
        try:
            return await flight.run(self._gate, self._refusal)
        finally:
            del self._flights[request.rid]

    async def abort(self, rid: str, *, timeout_s: float = 60.0) -> bool:
        """End one request; returns once it has ended. False if no such request is pending."""
        async with self._alone("an abort", timeout_s):
            flight = self._flights.get(rid)
            if flight is not None:
                await self._end([flight], timeout_s, everything=False)
            return flight is not None

    async def abort_all(self, *, timeout_s: float = 60.0) -> int:
        """End all pending requests; returns their number once each has ended with the tokens it had."""
        async with self._alone("an abort", timeout_s):
            with self._shut_gate("abort"):
                return await self._end(list(self._flights.values()), timeout_s)

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float = 60.0) -> None:
        """Stop generation. `abort` ends what is pending; `in_place` keeps it with its KV cache (which then cannot be
        flushed); `retract` keeps it and gives its KV cache up, so that it is computed anew after `resume`."""
        if mode == "retract" and self.role is not Role.COLOCATED:
            # The version spans that come back then name the new version for all tokens.
            raise EngineError(f"pause mode retract is for colocated engines; this one is a {self.role} engine")
        async with self._alone("a pause", timeout_s):
            if self._paused is None:
                self._shut.append("pause")
                self._gate.clear()
            if mode == "abort":
                await self._end(list(self._flights.values()), timeout_s)
            self._paused = mode
            await self._http.post("/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float = 60.0) -> None:
        async with self._alone("a resume", timeout_s):
            await self._http.post("/continue_generation", {}, timeout_s=timeout_s)
            if self._paused is not None:
                self._paused = None
                self._reopen("pause")

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache. EngineError while requests hold parts of it."""
        await self._http.post("/flush_cache", {}, timeout_s=timeout_s)

    async def load_snapshot(self, directory: Path, version: int, *, timeout_s: float = 300.0) -> Loaded:
        """Load and verify one snapshot; the prefix cache is flushed after it.

        Pending requests are aborted first, unless the engine is paused with `retract`: those go on with the new weights
        after `resume`, and their results name both versions. Raises StaleVersion if the engine had a newer version,
        WeightLoadError if the snapshot was refused or did not read back; then the engine serves nothing until a load
        succeeds.
        """
        async with self._alone("a load of weights", timeout_s):
            if version < self._newest:
                raise StaleVersion(f"version {version} is older than version {self._newest}, which the engine had")
            if self.released:
                raise EngineError("the engine's memory is released; resume it before a load of weights")
            order = Order(str(directory), version, self._config_hash, str(self._report))
            self.version = None
            with self._shut_gate("load"):
                try:
                    async with asyncio.timeout(timeout_s):
                        if self._paused != "retract":
                            await self._settle(timeout_s)
                        loaded = await update_weights(self._http, order, self._ranks, timeout_s=timeout_s)
                except TimeoutError:
                    raise EngineTimeout(f"the engine did not load version {version} within {timeout_s:g} s") from None
                self.version = self._newest = version
            return loaded

    async def release_memory(self, *, timeout_s: float = 60.0) -> None:
        """Give the memory of weights and KV cache back, after ending all requests.

        Weights are undefined after `resume_memory`, so a snapshot must be loaded before the engine serves again.
        """
        async with self._alone("a release of memory", timeout_s):
            if self.released:
                raise EngineError("the engine's memory is released already")
            self.version = None
            with self._shut_gate("release"):
                await self._settle(timeout_s)
                self.released = True
                await self._http.post("/release_memory_occupation", {}, timeout_s=timeout_s)

    async def resume_memory(self, *, timeout_s: float = 60.0) -> None:
        async with self._alone("a return of memory", timeout_s):
            if not self.released:
                raise EngineError("the engine's memory was not released")
            await self._http.post("/resume_memory_occupation", {}, timeout_s=timeout_s)
            self.released = False

    async def switch_role(self, role: Role, *, timeout_s: float = 60.0) -> None:
        """Change the role of the live server and have it answer a probe. Weights stay, the prefix cache goes.

        Raises EngineError while requests are pending, paused, or without memory; RestartNeeded if the server cannot.
        """
        async with self._alone("a switch of role", timeout_s):
            self.require_idle()
            with self._shut_gate("switch"):
                await self._settle(timeout_s)
                await roles.switch(self._http, self.role, role, timeout_s=timeout_s)
                self.role = role

    async def health(self, *, generate: bool = False, timeout_s: float = 30.0) -> None:
        """Raises unless the server answers; with `generate`, unless it produces a token (it cannot while paused)."""
        await self._http.call("GET", "/health_generate" if generate else "/health", timeout_s=timeout_s)

    async def metrics(self, *, timeout_s: float = 30.0) -> dict[str, float]:
        """Prometheus samples by name, without labels; samples of one name are added up, histogram buckets left out."""
        text = await self._http.call("GET", "/metrics", timeout_s=timeout_s)
        found: dict[str, float] = {}
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if line.startswith("sglang:") and not name.endswith("_bucket"):
                with contextlib.suppress(ValueError):
                    found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    async def loads(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The scheduler's own account of its load: requests running and waiting, tokens in use, throughput."""
        reply = await self._http.call("GET", "/v1/loads", timeout_s=timeout_s)
        return dict(reply["loads"][0])

    async def server_info(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The server's settings as it resolved them."""
        return dict(await self._http.call("GET", "/server_info", timeout_s=timeout_s))

    async def close(self) -> None:
        await self._http.close()

    async def _end(self, flights: list[Flight], timeout_s: float, *, everything: bool = True) -> int:
        """Under the control lock. A halted scheduler takes no step, so it is let go, behind the shut gate, meanwhile.

        `everything`: these are all there are and none can come. SGLang remembers that it sent the abort of one request
        and never repeats it, even if it overtook the request; the abort of all has no such memory.
        """
        halted = bool(flights) and self._paused in ("in_place", "retract")
        try:
            async with asyncio.timeout(timeout_s):
                for flight in flights:
                    flight.aborted.set()
                if halted:
                    await self._http.post("/continue_generation", {}, timeout_s=timeout_s)
                while live := [flight for flight in flights if not flight.done.is_set()]:
                    if everything:
                        await self._http.post("/abort_request", {"abort_all": True}, timeout_s=timeout_s)
                    else:
                        await asyncio.gather(*(flight.send_abort(timeout_s) for flight in live))
                    waits = [asyncio.ensure_future(flight.done.wait()) for flight in live]
                    await asyncio.wait(waits, timeout=ABORT_REPEAT_S)
                    for wait in waits:
                        wait.cancel()
                if halted:
                    await self._http.post("/pause_generation", {"mode": self._paused}, timeout_s=timeout_s)
        except TimeoutError:
            raise EngineTimeout(f"the engine did not acknowledge an abort within {timeout_s:g} s") from None
        return len(flights)

    def require_idle(self) -> None:
        """EngineError unless the engine may change its role now."""
        if self._flights or self._paused or self.released:
            why = "is paused" if self._paused else "has no memory" if self.released else "is not idle"
            raise EngineError(f"the engine {why} ({self.pending} requests pending), so it keeps its role {self.role}")

    async def _settle(self, timeout_s: float) -> None:
        """End all requests, and wait until the scheduler holds no room any more for what they left behind."""
        await self._end(list(self._flights.values()), timeout_s)
        await roles.until_idle(self._http, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def _alone(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        """Control calls exclude each other; EngineTimeout if another one is not over within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._control.acquire()
        except TimeoutError:
            raise EngineTimeout(f"{what} waited {timeout_s:g} s for another control call of this engine") from None
        try:
            yield
        finally:
            self._control.release()

    def _refusal(self, request: GenerateRequest) -> tuple[FinishReason, str] | None:
        if self.version is None:
            return FinishReason.FAILED, "the engine has no synced weights"
        if (request.pair is None) != (self.role is Role.COLOCATED):
            kind = "a whole request" if request.pair is None else "half of a pair's request"
            return FinishReason.FAILED, f"{kind} came to a {self.role} engine"
        if request.pair and request.pair.tensor_parallel != self._ranks:
            return FinishReason.FAILED, (
                f"the prefill engine has tensor_parallel = {request.pair.tensor_parallel}, this one {self._ranks}; "
                "the halves of a pair must be equal"
            )
        if request.version not in (None, self.version):
            return FinishReason.ABORT, f"it wants version {request.version}, the engine serves version {self.version}"
        return None

    @contextlib.contextmanager
    def _shut_gate(self, why: str) -> Iterator[None]:
        self._shut.append(why)
        self._gate.clear()
        try:
            yield
        finally:
            self._reopen(why)

    def _reopen(self, why: str) -> None:
        self._shut.remove(why)
        if not self._shut:
            self._gate.set()
