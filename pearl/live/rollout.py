"""Rollout workers as actors: carries out what is asked of engines.

The process of a reserved or an overlap slot is started with its engine and ends with it. That of a preemptible slot
comes and goes with the slot: an engine that died is started again in it, and one that does not answer costs the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorCallFailed, ActorError
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.layout import Role
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason
from pearl.errors import RunFailed, UserError
from pearl.live.actors import Actors
from pearl.live.journal import Journal
from pearl.live.measured import MemoryMoved
from pearl.live.pair import serve_pair
from pearl.live.run_directory import RunDirectory
from pearl.live.snapshots import HostSnapshots
from pearl.live.tokens import LiveTrajectory

Post = Callable[[Event], None]
NOTHING: dict[str, Any] = {
    "token_ids": [], "logprobs": [], "versions": [], "finish": str(FinishReason.LOST), "peer_lost": True,
}  # fmt: skip
"""Of a pair whose prefill half is gone; the decode half is well."""
DEPARTURE_S = 15.0
"""A worker process that is gone is known to the scheduler within milliseconds."""


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
        prefill_share=reply["prefill_share"],
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
        self.snapshots = HostSnapshots(actors.cluster, actors.waits, directory.snapshots, post)
        self.model_directory = model_directory
        self.refs: dict[str, tuple[int, ActorRef]] = {}
        self.gone: set[tuple[str, int]] = set()
        """Lives whose loss was posted: the first cause is the cause."""
        self._ending: dict[tuple[str, int], asyncio.Future[None]] = {}
        """Lives that are being ended, until their loss is posted."""
        self._lives: dict[tuple[str, int], int] = {}
        """Life of the slot in which an engine was started, of slots that come and go."""
        self._boarded: dict[str, tuple[int, ActorRef]] = {}
        """The actor in the process of such a slot, with its life."""
        self._early: dict[str, str] = {}
        """Overlap slots whose engine starts before the trainer, with the reason if it was lost."""
        self._departures: dict[tuple[str, int], asyncio.Event] = {}
        """Of lives of slots that somebody waits to be told of."""
        self.info: dict[str, dict[str, Any]] = {}
        """What each engine said of itself when it started."""
        self.checksums: dict[str, tuple[int, str]] = {}
        """Per slot: the version it holds and the checksum over all its tensors."""

    async def start(self, i: ev.StartEngine) -> None:
        if await self._bring_up(i.worker, i.incarnation, i.role):
            self.post(ev.EngineLoaded(i.worker, i.incarnation))

    async def start_early(self, slot: str) -> None:
        """Start an overlap engine while its GPUs are nobody's, and let it sleep. Failing that, it starts when lent."""
        self._early[slot] = ""
        if await self._bring_up(slot, 1):
            await self._release(slot, 1)
        self.post(ev.EngineAsleep(slot, 1))
        if reason := self._early.pop(slot):
            self.post(ev.WorkerLost(slot, 1, reason))

    async def _bring_up(self, slot: str, incarnation: int, role: Role = Role.COLOCATED) -> bool:
        """Worker, actor and engine; False, and the loss is told, if they do not come up."""
        config, limit = self.config, self.config.deadlines.engine_start_s
        self.refs.pop(slot, None)
        self.info.pop(slot, None)
        try:
            ref = await self._actor(slot, incarnation)
            self.refs[slot] = (incarnation, ref)
            self.info[slot] = await self.actors.call(
                ref,
                "start",
                config.engine.model_dump(mode="json"),
                config.model.model_dump(mode="json"),
                str(self.model_directory),
                str(self.directory.path),
                f"{slot}.{incarnation}",
                config.seed,
                limit,
                str(role),
                config.cluster.kv_interface if config.elastic.splits else None,
                timeout_s=limit,
            )
        except (ActorError, RunFailed, UserError) as error:
            await self._condemn(slot, incarnation, str(error), _answers(error))
            return False
        return True

    async def _actor(self, slot: str, incarnation: int) -> ActorRef:
        """In a fresh process, or in the one that the slot came with."""
        cls = self.actors.classes.rollout
        if not self.actors.comes_and_goes(slot):
            return await self.actors.start(slot, incarnation, cls)
        life = self._lives[slot, incarnation] = self.actors.life(slot)
        here = self._boarded.get(slot)
        if here is None or here[0] != life:
            here = self._boarded[slot] = (life, await self.actors.board(slot, life, cls))
            return here[1]
        await self._end(here[1])  # what is left of the engine before
        return here[1]

    async def _end(self, ref: ActorRef) -> None:
        limit = self.config.deadlines.engine_stop_s
        await self.actors.call(ref, "stop", limit / 2, timeout_s=limit, margin=False)

    async def sync(self, i: ev.SyncWeights) -> None:
        if (ref := self._ref(i.worker, i.incarnation)) is None:
            return
        began, limit = time.monotonic(), self.config.deadlines.sync_s
        try:
            snapshot = await self.snapshots.at(i.worker, i.version, i.peers, limit)
            limit = round(limit - (time.monotonic() - began), 1)  # what is left of it
            reply = await self.actors.call(ref, "sync", str(snapshot), i.version, limit, timeout_s=limit)
        except ActorError as error:
            why = f"weights of version {i.version}: {error}"
            await self._condemn(i.worker, i.incarnation, why, _answers(error))
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
            await self._condemn(i.worker, i.incarnation, f"abort: {error}", _answers(error))
            return
        self.post(ev.AbortAcknowledged(i.worker, i.incarnation))

    async def switch(self, i: ev.SwitchRole) -> None:
        ref, limit = self._ref(i.worker, i.incarnation), self.config.deadlines.role_switch_s
        if ref is None:
            return
        try:
            reply = await self.actors.call(ref, "switch_role", str(i.role), limit, timeout_s=limit)
        except ActorError as error:
            await self._condemn(i.worker, i.incarnation, f"change to {i.role}: {error}", _answers(error))
            return
        self.info[i.worker]["kv"] = reply["kv"]  # a restart has another port
        self.post(ev.RoleSwitched(i.worker, i.incarnation, i.role))

    async def release(self, i: ev.ReleaseEngine) -> None:
        if await self._release(i.worker, i.incarnation):
            self.post(ev.EngineReleased(i.worker, i.incarnation))

    async def _release(self, slot: str, incarnation: int) -> bool:
        """Device memory is given back; what it held is forgotten. False, and the loss is told, if that fails."""
        ref, limit = self._ref(slot, incarnation), self.config.deadlines.memory_s
        if ref is None:
            return False
        try:
            reply = await self.actors.call(ref, "release_memory", limit, timeout_s=limit)
        except ActorError as error:
            await self._condemn(slot, incarnation, f"release of memory: {error}", _answers(error))
            return False
        self.checksums.pop(slot, None)
        self.post(MemoryMoved("release", slot, reply))
        return True

    async def resume(self, i: ev.ResumeEngine) -> None:
        ref, limit = self._ref(i.worker, i.incarnation), self.config.deadlines.memory_s
        if ref is None:
            return
        try:
            reply = await self.actors.call(ref, "resume_memory", limit, timeout_s=limit)
        except ActorError as error:
            await self._condemn(i.worker, i.incarnation, f"return of memory: {error}", _answers(error))
            return
        self.post(MemoryMoved("resume", i.worker, reply))
        self.post(ev.EngineResumed(i.worker, i.incarnation))

    async def end(self, i: ev.StopEngine) -> None:
        """A preemptible slot goes back next, and its process with it; all others end with their process now."""
        ref = self._ref(i.worker, i.incarnation)
        if ref is None or not self.actors.comes_and_goes(i.worker):
            await self._condemn(i.worker, i.incarnation, i.reason)
            return
        try:
            if i.worker in self.info:  # it is up
                await self._end(ref)
        except ActorError as error:
            await self._condemn(i.worker, i.incarnation, f"{i.reason}; {error}")
        else:
            self._drop(i.worker, i.incarnation)
            self._lost(i.worker, i.incarnation, i.reason)

    async def generate(self, i: ev.Generate, trajectory: LiveTrajectory) -> None:
        """Answers with one TurnGenerated; the tokens are in `trajectory` before that."""
        sampling, limit = self.config.engine.sampling, self.config.deadlines.generate_s
        finish, reason, tokens, version = FinishReason.LOST, "its worker is gone", 0, i.version
        telemetry, answers, well = None, False, False
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
                if i.prefill_worker:
                    reply = await self._by_pair(i, ref, request)
                else:
                    reply = await self.actors.call(ref, "generate", request, timeout_s=limit, waiter=str(i.trajectory))
                telemetry = turn_telemetry(len(trajectory.token_ids), reply)
                trajectory.add_response(reply["token_ids"], reply["logprobs"], reply["versions"])
                tokens = len(reply["token_ids"])
                finish, reason, answers = FinishReason(reply["finish"]), reply["reason"], True
                well = reply.get("peer_lost", False)
                if reply["versions"]:
                    version = min(v for v, _ in reply["versions"])
                self._record(i, reply)
            except (ActorError, ValueError) as error:
                reason, answers = str(error), _answers(error)
        if finish is FinishReason.LOST and not well:
            # The loss is told first, else the turn would go straight back to the dead.
            await self._condemn(i.worker, i.incarnation, reason, answers)
        self.post(ev.TurnGenerated(i.trajectory, i.worker, i.incarnation, tokens, version, finish, reason, telemetry))

    async def _by_pair(self, i: ev.Generate, decode: ActorRef, request: dict[str, Any]) -> dict[str, Any]:
        """The decode half's reply. If the prefill half is lost, that is told; raises ActorError for the decode half."""
        prefill = self._ref(i.prefill_worker, i.prefill_incarnation)
        if prefill is None:
            await self._condemn(i.prefill_worker, i.prefill_incarnation, "its worker is gone")
            return NOTHING | {"reason": f"{i.prefill_worker} is gone"}
        reply, lost, answers = await serve_pair(
            self.actors,
            prefill,
            decode,
            request | {"version": i.version},
            self.info[i.prefill_worker]["kv"],
            interrupt_s=self.config.deadlines.abort_s,
            waiter=str(i.trajectory),
            handed_on=lambda: self.post(ev.PrefillDone(i.trajectory, i.prefill_worker, i.prefill_incarnation)),
        )
        if lost:
            await self._condemn(i.prefill_worker, i.prefill_incarnation, lost, answers)
        return reply

    def _record(self, i: ev.Generate, reply: dict[str, Any]) -> None:
        kept = {name: reply[name] for name in ("token_ids", "logprobs", "versions", "finish")}
        full = len(reply["token_ids"]) >= i.max_new_tokens
        self.journal.write("turn", trajectory=i.trajectory, full=full, **kept)

    def left(self, slot: str, incarnation: int, reason: str) -> None:
        """The process of a slot that stays left the cluster."""
        self._drop(slot, incarnation)
        self._lost(slot, incarnation, reason)

    def slot_lost(self, slot: str, life: int, reason: str) -> None:
        """A slot that comes and goes went: `SlotLost` says it, so nothing is said of its engines any more."""
        self.gone |= {key for key, began in self._lives.items() if key[0] == slot and began == life}
        if (current := self.refs.get(slot)) and (slot, current[0]) in self.gone:
            self._drop(slot, current[0])
        self._boarded.pop(slot, None)
        self._departures.setdefault((slot, life), asyncio.Event()).set()

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

    async def _condemn(self, worker: str, incarnation: int, reason: str, answers: bool = False) -> None:
        """This life is over: end what is left of it, then say so, once, with the cause that came first.

        `answers`: its actor does, so that a slot which comes and goes can keep its process. Who comes second waits for
        the first.
        """
        key = (worker, incarnation)
        if key in self.gone:
            return
        if (ending := self._ending.get(key)) is not None:
            await ending
            return
        ending = self._ending[key] = asyncio.get_running_loop().create_future()
        try:
            await self._end_life(worker, incarnation, reason, answers)
        finally:
            del self._ending[key]
            ending.set_result(None)

    async def _end_life(self, worker: str, incarnation: int, reason: str, answers: bool) -> None:
        self._drop(worker, incarnation)
        stays = not self.actors.comes_and_goes(worker)
        life = incarnation if stays else self._lives.get((worker, incarnation), 0)
        cause = await self.actors.cause_of_death(worker, life)
        if cause is None and (stays or not answers):
            await self.actors.kill(worker, life, "" if stays else reason)
        if not stays and (cause is not None or not answers):
            await self._departed(worker, life)
        self._lost(worker, incarnation, cause or reason)

    async def _departed(self, slot: str, life: int) -> None:
        """Until the cluster has said that the slot is lost, or, if it does not, for DEPARTURE_S."""
        departure = self._departures.setdefault((slot, life), asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await self.actors.waits.until("driver", f"word that {slot} is lost", DEPARTURE_S, departure.wait())

    def _drop(self, worker: str, incarnation: int) -> None:
        if self._ref(worker, incarnation):
            del self.refs[worker]
            self.checksums.pop(worker, None)

    def _lost(self, worker: str, incarnation: int, reason: str) -> None:
        if (worker, incarnation) not in self.gone:
            self.gone.add((worker, incarnation))
            if worker in self._early:
                self._early[worker] = reason
                return
            self.post(ev.WorkerLost(worker, incarnation, reason))


def _answers(error: Exception) -> bool:
    """The actor raised it, so it is there."""
    return isinstance(error, ActorCallFailed)
