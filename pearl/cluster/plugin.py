"""Membership, on the Dask scheduler: who joined, who left and how, who has notice. It decides nothing.

Every event has a sequence number within this scheduler's life (`epoch`). Beside the live topic the plugin keeps a
compacted log, one entry a slot: present members with their notices, and each slot's last departure. A driver that was
away asks for what is newer than the number it has seen, and misses nothing that still matters.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.comm import Comm
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import heartbeat_interval
from tornado.ioloop import PeriodicCallback

from pearl.cluster.identity import own_versions

TOPIC = "pearl-membership"
IDENTITY = "pearl"
"""Key of a worker's startup information that holds its identity."""
RENEW = "pearl-renew"
"""Message to a free worker."""
LOST = "pearl-lost"
"""Message to a worker that is about to be removed, with the reason; one that hangs reads it when it goes on."""
REFUSED = "refused"
"""Kind of an event that only tells the driver: a worker wanted to join under the name of a living one."""
LOOK_S = 0.1
"""Between two looks for a sign of life."""
CHECK_S = 1.0
"""How often silence is looked for."""
HEARTBEATS = 5
"""A worker may always miss this many heartbeats; Dask makes them rarer as workers grow in number."""
EARLIER_S = 1.0
"""A notice is news again if it leaves this much less time than the one before."""
HEAD_START_S = 0.01
"""The driver hears of a departure this much earlier than the other workers: to tell a thousand takes a while."""
ROUND_S = 0.25
"""The other workers are told in rounds so far apart, of all departures of a round in one message each."""


@dataclass
class Slot:
    """What is known of one slot; `address` is None while nobody lives there."""

    incarnation: int
    address: str | None
    joined: dict[str, Any]
    notice: dict[str, Any] | None = None
    left: dict[str, Any] | None = None


class ElasticityPlugin(SchedulerPlugin):
    """Events are plain dicts of one topic, microseconds each; handlers `pearl_*` are called by workers and drivers."""

    name = "pearl-elasticity"
    idempotent = True

    def __init__(self, silent_loss_s: float = 30.0) -> None:
        """A worker whose event loop sent no heartbeat for `silent_loss_s` is lost."""
        self.silent_loss_s = silent_loss_s

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler, self.epoch, self.seq = scheduler, uuid.uuid4().hex, 0
        self.slots: dict[str, Slot] = {}
        self._here: dict[str, str] = {}
        """Slot by address."""
        self._causes: dict[str, tuple[str, str]] = {}
        """Reason and detail of a departure that was announced, by address."""
        self._driver = ""
        """Id of the client that claimed the scheduler."""
        self._checked, self._clock = time.monotonic(), 0.0
        self._beats: dict[str, tuple[float, float]] = {}
        self._register = scheduler.handlers["register-worker"]
        scheduler.handlers["register-worker"] = self.register
        scheduler.handlers["pearl_notice"] = self.notice
        scheduler.handlers["pearl_leaving"] = self.leaving
        scheduler.handlers["pearl_members"] = self.members
        scheduler.handlers["pearl_claim"] = self.claim
        scheduler.handlers["pearl_renew"] = self.renew
        for address in scheduler.workers:
            self.add_worker(scheduler, address)
        self._watch = PeriodicCallback(self.check_silence, CHECK_S * 1000)
        self._watch.start()

    async def close(self) -> None:
        self._watch.stop()
        self.scheduler.handlers["register-worker"] = self._register

    async def register(self, comm: Comm, **message: Any) -> None:
        """Stands before Dask's own handler: a life that is over is refused, and a name that a living worker has."""
        if identity := message["extra"].get(IDENTITY):
            slot, life = identity["slot"], identity["incarnation"]
            present = self.slots.get(slot)
            if present and present.address and identity["free"]:  # nobody saw to it that the one before is dead
                if await self._shows_life(present.address):
                    taken = _taken(slot, present)
                    print(f"refused a worker of {identity['host']}: {taken}", file=sys.stderr, flush=True)
                    self.scheduler.log_event(TOPIC, {"kind": REFUSED, "identity": identity, "detail": taken})
                    await _refuse(comm, taken)
                elif not comm.closed():
                    await self.register(comm, **message)  # yet another life may have come meanwhile
                return
            if reason := self._refusal(slot, life):
                await _refuse(comm, reason)
                return
            if present and present.address:  # its process is dead, or it could not have been started again
                await self._remove({present.address: f"replaced by life {life}"}, "replaced")
                await self.register(comm, **message)  # as above
                return
        await self._register(comm, **message)

    async def _shows_life(self, address: str) -> bool:
        """Whether one more heartbeat comes from there; it is gone, or removed for its silence, if none does."""
        worker = self.scheduler.workers.get(address)
        before = worker and worker.last_seen
        while address in self._here:
            if worker.last_seen != before:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _refusal(self, name: str, life: int) -> str | None:
        slot = self.slots.get(name)
        if slot is None or life > slot.incarnation:
            return None
        if slot.address:
            return f"{name} is here as life {slot.incarnation}; life {life} cannot join beside it"
        return f"{name} left as life {slot.incarnation}; life {life} is over, the slot comes back as a later one"

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        identity = scheduler.workers[worker].extra.get(IDENTITY)
        if identity is None:  # somebody's plain Dask worker
            return
        name, before = identity["slot"], self.slots.get(identity["slot"])
        event = self._emit("joined", worker, identity)
        self.slots[name] = Slot(identity["incarnation"], worker, event, None, before.left if before else None)
        self._here[worker] = name

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **_: Any) -> Awaitable[None] | None:
        """What it returns Dask awaits before it tells the other workers."""
        name = self._here.pop(worker, None)
        self._beats.pop(worker, None)
        if name is None:
            return None
        drained = stimulus_id.startswith("retire-workers")
        reason, detail = self._causes.pop(worker, ("drained", "") if drained else ("lost", "its connection broke"))
        slot = self.slots[name]
        if slot.notice and reason == "lost":
            detail += f", after a notice ({slot.notice['source']})"
        slot.left = self._emit("left", worker, slot.joined["identity"], reason=reason, detail=detail)
        slot.address = slot.notice = None
        return asyncio.sleep(HEAD_START_S + -(time.monotonic() + HEAD_START_S) % ROUND_S)

    def notice(self, slot: str, incarnation: int, seconds_left: float, source: str) -> dict[str, Any]:
        """Handler: the slot will be taken away. "unknown" if that life is not here (yet)."""
        known = self.slots.get(slot)
        if known is None or known.address is None or known.incarnation != incarnation:
            return {"status": "unknown"}
        deadline = time.time() + seconds_left
        if known.notice is None or deadline < known.notice["deadline"] - EARLIER_S:
            rest = {"seconds_left": seconds_left, "source": source, "deadline": deadline}
            known.notice = self._emit("notice", known.address, known.joined["identity"], **rest)
        return {"status": "OK"}

    async def claim(self, client: str) -> dict[str, Any]:
        """Handler: a driver wants this scheduler for itself; refused while another one is connected.

        Workers that an earlier driver had started are removed, and lives that are over are forgotten: a driver counts
        the lives of its own slots from 1.
        """
        if self._driver != client and self._driver in self.scheduler.clients:
            return {"status": "refused", "message": "another driver is connected to it"}
        self._driver = client
        owned = [address for address, name in self._here.items() if not self.slots[name].joined["identity"]["free"]]
        await self._remove(dict.fromkeys(owned, "its driver is gone"), "claimed")
        self.slots = {name: slot for name, slot in self.slots.items() if slot.address}
        return {"status": "OK", "versions": own_versions()}

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """The driver is gone, or killed: free workers that it used begin anew, without what it had started there."""
        if client == self._driver:
            for address, name in self._here.items():
                if self.slots[name].joined["identity"]["free"]:
                    self.scheduler.worker_send(address, {"op": RENEW, "always": False, "anew": True})

    def renew(self, address: str) -> dict[str, Any]:
        """Handler: a free worker is to end its life with all that runs in it, and to join as a later one.

        One that has its notice is to go.
        """
        if address in self._here:
            anew = self.slots[self._here[address]].notice is None  # else there will be no next life
            self.scheduler.worker_send(address, {"op": RENEW, "always": True, "anew": anew})
        return {"status": "OK"}

    def leaving(self, address: str, reason: str, detail: str) -> dict[str, Any]:
        """Handler: the worker at `address` is about to go, `closed` or `drained`. The first word counts."""
        if address in self._here:
            self._causes.setdefault(address, (reason, detail))
        return {"status": "OK"}

    def members(self, epoch: str | None = None, since: int = 0) -> dict[str, Any]:
        """Handler: the compacted log after `since` (of `epoch`; of everything, if that was another scheduler)."""
        after = since if epoch == self.epoch else 0
        events = []
        for slot in self.slots.values():
            events += [slot.left, slot.joined if slot.address else None, slot.notice]
        newer = sorted((e for e in events if e and e["seq"] > after), key=lambda e: e["seq"])
        now = time.time()
        return {
            "epoch": self.epoch,
            "seq": self.seq,
            "claimed": self._driver in self.scheduler.clients,
            "events": [
                {**e, "seconds_left": max(0.0, e["deadline"] - now)} if e["kind"] == "notice" else e for e in newer
            ],
        }

    async def check_silence(self) -> None:
        """Remove who sent no heartbeat for too long, counting only time in which this event loop itself ran."""
        now = time.monotonic()
        self._clock += min(now - self._checked, 2 * CHECK_S)
        self._checked = now
        limit = max(self.silent_loss_s, HEARTBEATS * heartbeat_interval(len(self.scheduler.workers)))
        silent = {}
        for address in self._here:
            last_seen = self.scheduler.workers[address].last_seen
            before, since = self._beats.get(address, (None, 0.0))
            if last_seen != before:
                self._beats[address] = (last_seen, self._clock)
            elif self._clock - since > limit:
                seconds = self._clock - since
                silent[address] = f"its event loop was silent for {seconds:.1f} s (cluster.silent_loss_s)"
        await self._remove(silent, "silent")

    async def _remove(self, lost: dict[str, str], why: str) -> None:
        """Those workers, with the detail of each, all at once."""
        self._causes |= {address: ("lost", detail) for address, detail in lost.items()}
        for address, detail in lost.items():
            self.scheduler.worker_send(address, {"op": LOST, "why": detail})
        stimulus = f"pearl-{why}-{time.time()}"
        await asyncio.gather(*(self.scheduler.remove_worker(address, stimulus_id=stimulus) for address in lost))

    def _emit(self, kind: str, address: str, identity: dict[str, Any], **rest: Any) -> dict[str, Any]:
        self.seq += 1
        event = {
            "epoch": self.epoch,
            "seq": self.seq,
            "kind": kind,
            "address": address,
            "identity": identity,
            "time": time.time(),
            **rest,
        }
        self.scheduler.log_event(TOPIC, event)
        return event


def _taken(name: str, slot: Slot) -> str:
    who = slot.joined["identity"]
    noticed = ", and has notice" if slot.notice else ""
    return (
        f"the slot name {name} is taken: its worker on {who['host']} (process {who['pid']}, {slot.address}) is "
        f"alive{noticed}. Give this one another name with --slot, or end that one first"
    )


async def _refuse(comm: Comm, reason: str) -> None:
    await comm.write({"status": "error", "message": reason, "time": time.time()})
