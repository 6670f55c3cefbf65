"""One rollout worker's engine in virtual time: continuous batching on a `EngineProfile`.

The engine does one thing at a time. Waiting prompts go first, in chunks, and block decoding; then all running sequences
decode until the batch changes, which is one entry of the clock however many iterations it takes (`DecodeRun`). A
request of a pair is prefilled on one engine, waits for room on the other, crosses the sender's link behind what crosses
there already, and decodes on the other.

The first token comes out of the prefill, the others out of decode iterations.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pearl.core.layout import Role
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.sim.clock import Clock
from pearl.sim.costs import DecodeRun, prefill_compute_s
from pearl.sim.kv import KvMemory
from pearl.sim.request import Request

ROUNDING = 1e-9
"""Iterations: what the inverse of a run's duration may be off."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    chunk_tokens: int = 8192
    """Tokens of one prefill iteration at most."""
    reserve_tokens: int = 256
    """Room that admission leaves for the answer of each request that is there."""
    decode_keeps_kv: bool = True
    """Whether a decode worker keeps a trajectory's KV for its next turn, so that only the new part crosses."""
    prefill_keeps_response: bool = False
    """Whether a response's KV gets back to the prefill worker; if not, the next turn computes it there again."""


Finished = Callable[[Request, int, FinishReason, str], None]
"""(request, tokens, finish, reason): called once for each request."""
HandedOn = Callable[[Request, "Engine"], None]
"""(request, prefill engine)."""


class Engine:
    """`finished` is called once for each request that was submitted, in `clock`'s time."""

    def __init__(
        self,
        name: str,
        profile: EngineProfile,
        role: Role,
        clock: Clock,
        options: EngineOptions,
        finished: Finished,
        handed_on: HandedOn,
    ) -> None:
        self.name, self.profile, self.role, self.clock, self.options = name, profile, role, clock, options
        self.finished, self.handed_on = finished, handed_on
        self.kv = KvMemory(profile.kv_capacity_tokens)
        self.requests: dict[TrajectoryId, Request] = {}
        """All that this engine has a part in."""
        self.queue: deque[Request] = deque()
        """Wait for their prefill here, the first maybe half done."""
        self.incoming: deque[Request] = deque()
        """Prefilled elsewhere, wait for room here."""
        self.landed: list[Request] = []
        """Prefilled and here: decode from the next iteration on."""
        self.running: list[tuple[int, int, Request]] = []
        """Heap of (iteration in which it ends, tie, request)."""
        self.contexts = 0
        """Sum of the running sequences' contexts."""
        self.step = 0
        """Decode iterations done."""
        self.batch_sum = 0.0
        self.kv_sum = 0.0
        self.link_free_s = 0.0
        """When the last transfer from here will be over."""
        self.busy_s = 0.0
        self.prefill_s = 0.0
        """Of it, in prefill iterations."""
        self._run: DecodeRun | None = None
        self._steps = 0
        self._since = 0.0
        self._prefilled: list[Request] | None = None
        self._turn = 0
        """Counts plans: a wake-up for an older one is void."""
        self._tie = 0

    # --- what the interpreter asks for ------------------------------------------------------------

    def submit(self, request: Request, prefill: Engine | None = None) -> None:
        """Serve it here, with its prefill on `prefill` if given."""
        request.worker, request.prefill = self, prefill
        request.asked_s = self.clock.now
        self.requests[request.trajectory] = request
        first = prefill or self
        first.requests[request.trajectory] = request
        if request.context + 1 > min(self.kv.capacity, first.kv.capacity):
            reason = f"{request.context} tokens do not fit in the engine's KV memory of {self.kv.capacity}"
            self._end(request, FinishReason.FAILED, reason)
            return
        first.queue.append(request)
        first._poke()

    def interrupt(self, finish: FinishReason, reason: str = "", *, lose_tokens: bool = False) -> int:
        """End all requests that this engine has a part in; tokens that were generated and are lost."""
        self._settle()
        self._stop()
        lost = 0
        partners = {id(e): e for r in self.requests.values() for e in (r.worker, r.prefill) if e not in (None, self)}
        for request in list(self.requests.values()):
            if lose_tokens:
                lost += request.worker._tokens(request)
            self._end(request, finish, reason, lose_tokens=lose_tokens)
        self.queue.clear()
        self.incoming.clear()
        self.landed.clear()
        self.running.clear()
        self.contexts = 0
        for partner in partners.values():
            partner._poke_if_waiting()
        return lost

    def change_role(self, role: Role) -> None:
        assert not self.requests, f"{self.name} changes its role with requests"
        self.role = role
        self.kv.clear()

    # --- one thing after another ------------------------------------------------------------------

    def _poke(self) -> None:
        """Something came: begin at once if idle, or behind the running iteration if decoding."""
        if self._run is not None:
            elapsed = self._run.within(self.clock.now - self._since)
            steps = max(1, math.ceil(elapsed - ROUNDING))
            if steps < self._steps:
                self._steps = steps
                self._wake_at(self._since + self._run.seconds(steps))
        elif self._prefilled is None:
            self._next()

    def _wake_at(self, time_s: float) -> None:
        self._turn += 1
        self.clock.at(time_s, self._wake, self._turn)

    def _wake(self, turn: int) -> None:
        if turn != self._turn:
            return
        self.busy_s += self.clock.now - self._since
        if self._prefilled is not None:
            self.prefill_s += self.clock.now - self._since
            self._prefill_done(self._prefilled)
        elif self._run is not None:
            self._decoded(self._steps)
        self._next()

    def _stop(self) -> None:
        """Drop the present plan."""
        self._turn += 1
        self._run = None
        self._prefilled = None

    def _settle(self) -> None:
        """Count the whole decode iterations up to now."""
        if self._run is not None:
            done = min(self._steps, math.floor(self._run.within(self.clock.now - self._since) + ROUNDING))
            self.busy_s += self.clock.now - self._since
            self._decoded(done)

    def _next(self) -> None:
        self._run = None
        self._prefilled = None
        self._admit_incoming()
        for request in self.landed:
            self._join(request)
        self.landed.clear()
        if self.queue and self._begin_prefill():
            return
        if self.running:
            self._begin_decode()

    # --- prefill ----------------------------------------------------------------------------------

    def _begin_prefill(self) -> bool:
        budget = self.options.chunk_tokens
        p = self.profile
        parts: list[tuple[Request, float]] = []
        done: list[Request] = []
        now = self.clock.now
        while self.queue and budget > 0:
            request = self.queue[0]
            if request.over:
                self.queue.popleft()
                continue
            if request.started_s < 0 and not self._admit(request):
                break
            tokens = min(budget, request.left)
            have = request.context - request.left
            parts.append((request, prefill_compute_s(p, tokens, have)))
            request.left -= tokens
            budget -= tokens
            if request.left == 0:
                done.append(self.queue.popleft())
        if not parts:
            return False
        share = p.prefill_fixed_s / len(parts)
        seconds = p.prefill_fixed_s
        for request, compute in parts:
            request.prefill_s += compute + share
            request.prefill_share += 1 / len(parts)
            seconds += compute
        if self.role is Role.COLOCATED:
            seconds += p.turn_overhead_s
        self._prefilled = done
        self._since = now
        self._wake_at(now + seconds)
        return True

    def _admit(self, request: Request) -> bool:
        """Take the KV memory for a prompt; False if there is no room or no place in the batch."""
        alone = request.prefill is None
        if alone and len(self.kv.held) >= self.profile.max_running_requests:
            return False
        cached = self.kv.cached(request.trajectory)
        reserve = self.options.reserve_tokens * (len(self.kv.held) + 1) if alone else 0
        if not self.kv.take(request.trajectory, request.context + alone, request.shared, reserve):
            return False
        request.started_s = self.clock.now
        cached = min(cached, request.context - 1)
        request.left = request.context - cached
        if not request.made:
            request.cached = cached
        return True

    def _prefill_done(self, done: list[Request]) -> None:
        for request in done:
            if request.over:
                continue
            request.first_s = self.clock.now
            if request.prefill is None:
                if request.wanted == 1:
                    self._end(request, request.finish)
                else:
                    self._join(request)
            else:
                request.worker.incoming.append(request)
                request.worker._poke()

    # --- pairs ------------------------------------------------------------------------------------

    def _admit_incoming(self) -> None:
        """Let what was prefilled elsewhere cross, as far as there is room."""
        while self.incoming:
            request = self.incoming[0]
            if request.over:
                self.incoming.popleft()
                continue
            if len(self.kv.held) >= self.profile.max_running_requests:
                return
            shared = request.shared if self.options.decode_keeps_kv else 0
            cached = min(self.kv.cached(request.trajectory), request.context)
            reserve = self.options.reserve_tokens * (len(self.kv.held) + 1)
            if not self.kv.take(request.trajectory, request.context + 1, shared, reserve):
                return
            self.incoming.popleft()
            sender = request.prefill or self
            p = self.profile
            request.transfer_bytes = round((request.context - cached) * p.kv_bytes_per_token)
            request.transfer_s = p.transfer_latency_s + request.transfer_bytes / p.transfer_bytes_per_s
            sender.link_free_s = max(self.clock.now, sender.link_free_s) + request.transfer_s
            self.clock.at(sender.link_free_s, self._arrived, request)

    def _arrived(self, request: Request) -> None:
        if request.over:
            return
        if sender := request.prefill:
            request.prefill = None
            del sender.requests[request.trajectory]
            sender.kv.give(request.trajectory)
            if self.options.prefill_keeps_response:
                sender.kv.extend(request.trajectory, request.wanted)
            sender._poke_if_waiting()
            self.handed_on(request, sender)
            request.first_s = self.clock.now
        if request.wanted == 1:
            self._end(request, request.finish)
        else:
            self.landed.append(request)
            self._poke()

    def _poke_if_waiting(self) -> None:
        if self._run is None and self._prefilled is None and (self.queue or self.incoming or self.running):
            self._next()

    # --- decode -----------------------------------------------------------------------------------

    def _join(self, request: Request) -> None:
        if request.over:
            return
        request.first_step = self.step
        request.batch_before, request.kv_before = self.batch_sum, self.kv_sum
        request.stall_before = self.prefill_s
        self._tie += 1
        heapq.heappush(self.running, (self.step + request.wanted - 1, self._tie, request))
        self.contexts += request.context + 1

    def _begin_decode(self) -> None:
        batch = len(self.running)
        room = (self.kv.capacity - self.kv.held_tokens) // batch
        while room < 1:
            self._retract()
            batch = len(self.running)
            if not batch:
                return
            room = (self.kv.capacity - self.kv.held_tokens) // batch
        self._steps = min(self.running[0][0] - self.step, room)
        self._run = DecodeRun(self.profile, batch, self.contexts)
        self._since = self.clock.now
        self._wake_at(self._since + self._run.seconds(self._steps))

    def _decoded(self, steps: int) -> None:
        batch = len(self.running)
        grown = steps * batch
        self.step += steps
        self.batch_sum += grown
        self.kv_sum += steps * self.contexts + batch * steps * (steps - 1) / 2
        self.contexts += grown
        self._run = None
        self.kv.grow(grown)
        while self.running and self.running[0][0] <= self.step:
            request = heapq.heappop(self.running)[2]
            self.contexts -= request.context + request.wanted
            self._end(request, request.finish)

    def _retract(self) -> None:
        """The memory is full: the newest request gives its room up and comes back later with what it has."""
        entry = max(self.running, key=lambda e: (e[2].first_step, e[1]))
        self.running.remove(entry)
        heapq.heapify(self.running)
        request = entry[2]
        tokens = self.step - request.first_step + 1
        self.contexts -= request.context + tokens
        if not self.running:
            self._end(request, FinishReason.FAILED, "its context alone fills the engine's KV memory", keep=False)
            return
        self.kv.give(request.trajectory, grown=tokens - 1, keep=False)
        request.made += tokens
        request.context += tokens
        request.wanted -= tokens
        request.first_step = -1
        if self.role is Role.DECODE:
            self.incoming.appendleft(request)  # from the host's memory, at the price of a transfer
        else:
            request.started_s = -1.0
            self.queue.appendleft(request)

    # --- ends -------------------------------------------------------------------------------------

    def _tokens(self, request: Request) -> int:
        """Generated so far, the first one included."""
        return request.made + (self.step - request.first_step + 1 if request.first_step >= 0 else 0)

    def _end(
        self, request: Request, finish: FinishReason, reason: str = "", *, lose_tokens: bool = False, keep: bool = True
    ) -> None:
        """Once for each request, whatever becomes of it."""
        request.over = True
        worker = request.worker
        del worker.requests[request.trajectory]
        tokens = request.made + request.wanted if finish is request.finish else worker._tokens(request)
        if request.trajectory in worker.kv.held:
            stays = keep and (worker.role is not Role.DECODE or worker.options.decode_keeps_kv)
            if request.first_step >= 0:
                worker.kv.give(request.trajectory, grown=worker.step - request.first_step, keep=stays)
            else:
                worker.kv.give(request.trajectory, unwritten=request.left + 1, keep=stays)
        if sender := request.prefill:
            sender.requests.pop(request.trajectory, None)
            if request.trajectory in sender.kv.held:
                sender.kv.give(request.trajectory, unwritten=request.left)
        self.finished(request, 0 if lose_tokens else tokens, finish, reason)

    def telemetry(self, request: Request) -> TurnTelemetry:
        steps = max(0, self.step - request.first_step) if request.first_step >= 0 else 0
        return TurnTelemetry(
            prompt_tokens=request.context - request.made,
            cached_tokens=request.cached,
            queue_s=request.started_s - request.asked_s if request.started_s >= 0 else -1.0,
            prefill_s=request.prefill_s,
            prefill_share=request.prefill_share,
            decode_s=self.clock.now - request.first_s if request.first_s >= 0 else -1.0,
            stall_s=self.prefill_s - request.stall_before if steps else 0.0,
            decode_batch=(self.batch_sum - request.batch_before) / steps if steps else -1.0,
            decode_kv_tokens=(self.kv_sum - request.kv_before) / steps if steps else -1.0,
            transfer_bytes=request.transfer_bytes,
            transfer_s=request.transfer_s,
        )
