"""Rollout workers as actors: carries out StartEngine, SyncWeights, AbortRequests and Generate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorError
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason
from pearl.errors import RunFailed, UserError
from pearl.live.actors import Actors
from pearl.live.journal import Journal
from pearl.live.run_directory import RunDirectory
from pearl.live.tokens import LiveTrajectory
from pearl.weights.snapshot import snapshot_directory

Post = Callable[[Event], None]


def turn_telemetry(prompt_tokens: int, reply: dict[str, Any]) -> TurnTelemetry | None:
    """Of a rollout worker's reply; None where it has no token or measured nothing."""
    tokens, at_first = len(reply["token_ids"]), reply.get("first_tokens", 0)
    if not at_first:
        return None
    # An engine streams several tokens at a time, so the time to the first of them is not seen.
    seen_s = reply["seconds"] - reply["first_token_s"]
    decode_s = seen_s * (tokens - 1) / (tokens - at_first) if tokens > at_first else -1.0
    stall_s = reply["stall_s"] * decode_s / seen_s if seen_s > 0 else 0.0
    return TurnTelemetry(
        prompt_tokens,
        reply["cached_tokens"],
        queue_s=reply["queue_s"],
        prefill_s=reply["prefill_s"],
        decode_s=decode_s,
        stall_s=stall_s,
        decode_batch=reply["decode_batch"],
        decode_kv_tokens=reply["decode_kv_tokens"],
    )


class RolloutWorkers:
    """The present life of each rollout slot. Every method answers with events, never with an exception."""

    def __init__(
        self,
        actors: Actors,
        config: RunConfig,
        model_directory: Path,
        directory: RunDirectory,
        post: Post,
        journal: Journal,
    ) -> None:
        self.actors, self.config, self.directory, self.post = actors, config, directory, post
        self.journal = journal
        self.model_directory = model_directory
        self.refs: dict[str, tuple[int, ActorRef]] = {}
        self.gone: set[tuple[str, int]] = set()
        """Lives whose loss was posted: the first cause is the cause."""
        self.info: dict[str, dict[str, Any]] = {}
        """What each engine said of itself when it started."""
        self.checksums: dict[str, tuple[int, str]] = {}
        """Per slot: the version it holds and the checksum over all its tensors."""

    async def start(self, i: ev.StartEngine) -> None:
        config, deadlines = self.config, self.config.deadlines
        self.refs.pop(i.worker, None)
        try:
            ref = await self.actors.start(i.worker, i.incarnation, self.actors.classes.rollout)
            self.refs[i.worker] = (i.incarnation, ref)
            self.info[i.worker] = await self.actors.call(
                ref,
                "start",
                config.engine.model_dump(mode="json"),
                config.model.model_dump(mode="json"),
                str(self.model_directory),
                str(self.directory.path),
                f"{i.worker}.{i.incarnation}",
                config.seed,
                deadlines.engine_start_s,
                timeout_s=deadlines.engine_start_s,
            )
            self.post(ev.EngineLoaded(i.worker, i.incarnation))
        except (ActorError, RunFailed, UserError) as error:
            await self._condemn(i.worker, i.incarnation, str(error))

    async def sync(self, i: ev.SyncWeights) -> None:
        if (ref := self._ref(i.worker, i.incarnation)) is None:
            return
        snapshot = str(snapshot_directory(self.directory.snapshots, i.version))
        limit = self.config.deadlines.sync_s
        try:
            reply = await self.actors.call(ref, "sync", snapshot, i.version, limit, timeout_s=limit)
        except ActorError as error:
            await self._condemn(i.worker, i.incarnation, f"weights of version {i.version}: {error}")
            return
        self.checksums[i.worker] = (i.version, reply["checksum"])
        self.post(ev.WeightsSynced(i.worker, i.incarnation, i.version))

    async def abort(self, i: ev.AbortRequests) -> None:
        if (ref := self._ref(i.worker, i.incarnation)) is None:
            return
        limit = self.config.deadlines.abort_s
        try:
            await self.actors.call(ref, "abort", limit, timeout_s=limit)
        except ActorError as error:
            await self._condemn(i.worker, i.incarnation, f"abort: {error}")
            return
        self.post(ev.AbortAcknowledged(i.worker, i.incarnation))

    async def generate(self, i: ev.Generate, trajectory: LiveTrajectory) -> None:
        """Answers with one TurnGenerated; the tokens are in `trajectory` before that."""
        sampling, limit = self.config.engine.sampling, self.config.deadlines.generate_s
        finish, reason, tokens, version = FinishReason.LOST, "its worker is gone", 0, i.version
        telemetry = None
        if (ref := self._ref(i.worker, i.incarnation)) is not None:
            request = {
                "rid": f"{i.trajectory}@{len(trajectory.token_ids)}",
                "token_ids": trajectory.token_ids,
                "max_new_tokens": i.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop": list(sampling.stop),
                "timeout_s": limit,
            }
            try:
                reply = await self.actors.call(ref, "generate", request, timeout_s=limit, waiter=str(i.trajectory))
                telemetry = turn_telemetry(len(trajectory.token_ids), reply)
                trajectory.add_response(reply["token_ids"], reply["logprobs"], reply["versions"])
                tokens = len(reply["token_ids"])
                finish, reason = FinishReason(reply["finish"]), reply["reason"]
                if reply["versions"]:
                    version = min(v for v, _ in reply["versions"])
                self._record(i, reply)
            except (ActorError, ValueError) as error:
                reason = str(error)
        if finish is FinishReason.LOST:  # the loss is told first, else the turn would go straight back to the dead
            await self._condemn(i.worker, i.incarnation, reason)
        self.post(ev.TurnGenerated(i.trajectory, i.worker, i.incarnation, tokens, version, finish, reason, telemetry))

    def _record(self, i: ev.Generate, reply: dict[str, Any]) -> None:
        kept = {name: reply[name] for name in ("token_ids", "logprobs", "versions", "finish")}
        full = len(reply["token_ids"]) >= i.max_new_tokens
        self.journal.write("turn", trajectory=i.trajectory, full=full, **kept)

    def left(self, slot: str, incarnation: int, reason: str) -> None:
        """The slot's process left the cluster."""
        if self._ref(slot, incarnation):
            del self.refs[slot]
        self._lost(slot, incarnation, reason)

    async def stop(self, timeout_s: float) -> None:
        await asyncio.gather(*(self._stop(ref, timeout_s) for _, ref in self.refs.values()))

    async def _stop(self, ref: ActorRef, timeout_s: float) -> None:
        try:
            await self.actors.call(ref, "stop", timeout_s=timeout_s, margin=False)
        except ActorError:
            pass  # the process group is killed next

    def _ref(self, worker: str, incarnation: int) -> ActorRef | None:
        """The actor, if this life of the slot is still the present one (its loss was posted otherwise)."""
        current = self.refs.get(worker)
        return current[1] if current and current[0] == incarnation else None

    async def _condemn(self, worker: str, incarnation: int, reason: str) -> None:
        """This life is over: end what is left of it, then say so, once, with the cause that came first."""
        if (worker, incarnation) in self.gone:
            return
        current = self.refs.get(worker)
        if current and current[0] == incarnation:
            del self.refs[worker]
        cause = await self.actors.cause_of_death(worker, incarnation)
        if cause is None:
            await self.actors.kill(worker, incarnation)
        self._lost(worker, incarnation, cause or reason)

    def _lost(self, worker: str, incarnation: int, reason: str) -> None:
        if (worker, incarnation) not in self.gone:
            self.gone.add((worker, incarnation))
            self.post(ev.WorkerLost(worker, incarnation, reason))
