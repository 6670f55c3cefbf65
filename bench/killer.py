"""Observer that kills parts of a live run at random moments, and waits until each is replaced.

| kind | what happens to whom |
|---|---|
| `engine`, `worker` | the engine of a reserved slot, or its whole worker process, gets a SIGKILL |
| `environment`, `trainer` | an environment worker, or a trainer rank |
| `preemptible` | the worker process of a preemptible slot |
| `crash` | the engine in it |
| `frozen` | it is stopped (SIGSTOP), with all its connections open |
| `cut` | its TCP connections with the driver are reset, both ways (`ss -K`, which needs root) |
| `notice` | it gets a SIGTERM, and a SIGKILL up to NOTICE_S later if it is still there then; then it is offered again |
| `overlap` | the worker process of an overlap slot, at work or asleep |
| `hung` | the engine of an overlap slot is stopped while it has the GPUs |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import psutil

from pearl.cluster.local_adapter import LocalAdapter
from pearl.core import events as ev
from pearl.core.gpus import Owner
from pearl.core.state import Awaited, WorkerSlot
from pearl.live.driver import Driver

PREFIXES = {
    "engine": "rollout-", "worker": "rollout-", "environment": "environment-", "trainer": "trainer-",
    "preemptible": "preemptible-", "crash": "preemptible-", "frozen": "preemptible-", "cut": "preemptible-",
    "notice": "preemptible-", "overlap": "overlap-", "hung": "overlap-",
}  # fmt: skip
KINDS = tuple(PREFIXES)
SLOT_KINDS = ("preemptible", "frozen", "cut", "notice")
"""Their slot leaves, which is told in other words than the loss of a worker."""
IN_ENGINE = ("engine", "crash", "hung")
OVERDUE_MARGIN_S = 2.0
"""A wait may outlive its deadline by this much: the event loop shares its core with what it waits for."""
LONGEST_WAIT_S = 3.0
"""A kill comes at most this long after there is room for it."""
RESTLESS_WAIT_S = 24.0
"""The same where victims are killed again before they are back."""
LONGEST_RECOVERY_S = 240.0
"""A victim that is left alone and not replaced by then is a fault, and the run is ended."""
NOTICE_S = 8.0
GRACE_S = 100.0
TIME_IS_OVER = "the time is over"


@dataclass(frozen=True, slots=True)
class Kill:
    what: str
    slot: str
    at: float
    incarnation: int
    step: int
    """Steps that were done or begun."""

    def over(self, entry: ev.Event | ev.Instruction) -> bool:
        """The successor serves: engines with verified weights. Of overlap slots, which start again when they are lent
        the next time: a whole step was trained."""
        match entry:
            case ev.WeightsSynced():
                return entry.worker == self.slot and entry.incarnation > self.incarnation
            case ev.BatchTrained():
                return self.slot.startswith("overlap-") and entry.step > self.step
            case ev.EnvironmentWorkerReady():
                return entry.worker == self.slot
            case ev.TrainerReady():
                return self.what == "trainer"
        return False


class Killer:
    """Kills `victims` in turn, at most `together` at a time, and none later than `seconds` from now;
    then it ends the run: what is drawn is trained, nothing more is drawn. If that takes longer than GRACE_S, the run is
    stopped as by Ctrl-C.

    `restless`: a slot may be killed again as soon as it has come back, whether it serves yet or is still starting.
    """

    def __init__(
        self, victims: list[str], seed: int, together: int = 1, seconds: float = float("inf"), restless: bool = False
    ) -> None:
        self.victims, self.together, self.seconds, self.restless = list(victims), together, seconds, restless
        self.random = random.Random(seed)
        self.driver: Driver | None = None
        self.killed: list[Kill] = []
        """What is being recovered from."""
        self.dying: set[str] = set()
        """Slots whose loss is not told yet."""
        self.kills: list[Kill] = []
        self.recoveries: list[dict[str, Any]] = []
        self.overdue: set[str] = set()
        self.unrecovered: list[Kill] = []
        self.stopped = False
        """Before what was drawn was trained."""
        self._began = time.monotonic()
        self._waiting = False
        self._ended = False

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        assert self.driver is not None
        self.overdue.update(self.driver.waits.overdue(OVERDUE_MARGIN_S))
        if isinstance(entry, ev.SlotLost | ev.WorkerLost):
            self.dying.discard(entry.worker)
            if isinstance(entry, ev.SlotLost) and any(
                k.what == "notice" and k.slot == entry.worker for k in self.killed
            ):
                adapter = self.driver.slots.adapter
                assert isinstance(adapter, LocalAdapter), "the killer plays the cloud on this machine"
                asyncio.get_running_loop().call_soon(adapter.offer, entry.worker)
        over = [kill for kill in self.killed if kill.over(entry)]
        for kill in over:
            self.killed.remove(kill)
            self.dying.discard(kill.slot)
            last = kill is next(k for k in reversed(over) if k.slot == kill.slot)
            seconds = round(now - kill.at, 1) if last else None  # the successor was killed, too
            self.recoveries.append({"what": kill.what, "slot": kill.slot, "seconds": seconds})
        newest = {kill.slot: kill for kill in self.killed}
        for kill in newest.values():
            if now - kill.at > LONGEST_RECOVERY_S and kill not in self.unrecovered:
                self.unrecovered.append(kill)
                self.driver.post(ev.StopRequested(f"{kill.slot} is not back after its {kill.what}"))
        if now - self._began > self.seconds + GRACE_S and not self.stopped:
            self.stopped = True
            self.driver.post(ev.StopRequested(TIME_IS_OVER))
        if isinstance(entry, ev.Generate):
            self._go_on(now - self._began)

    def _go_on(self, seconds: float) -> None:
        assert self.driver is not None
        if seconds > self.seconds:
            self.victims.clear()
        if self.victims and len(self._immune()) < self.together and not self._waiting:
            self._waiting = True
            wait_s = self.random.uniform(0.05, RESTLESS_WAIT_S if self.restless else LONGEST_WAIT_S)
            asyncio.get_running_loop().call_later(wait_s, self._kill)
        elif not self.victims and not self.killed and not self._waiting and not self._ended:
            self._ended = True
            pipeline = self.driver.pipeline
            drawn = pipeline.drawn_groups - pipeline.samples.dropped_groups
            object.__setattr__(pipeline.settings, "steps", drawn // pipeline.settings.groups_per_batch)

    def _immune(self) -> set[str]:
        return self.dying if self.restless else {kill.slot for kill in self.killed}

    def _kill(self) -> None:
        self._waiting = False
        assert self.driver is not None
        for number, what in enumerate(self.victims):
            if slots := [slot for slot in sorted(self.driver.cluster.workers) if self._mortal(what, slot)]:
                del self.victims[number]
                break
        else:
            return  # it is asked again at the next dispatch
        slot, pipeline = self.random.choice(slots), self.driver.pipeline
        worker = pipeline.fleet.workers.get(slot)
        steps = pipeline.steps_done + bool(pipeline.training)
        kill = Kill(what, slot, time.monotonic(), worker.incarnation if worker else 0, steps)
        self.killed.append(kill)
        self.dying.add(slot)
        self.kills.append(kill)
        self._strike(kill)

    def _mortal(self, what: str, slot: str) -> bool:
        """Whether the slot is there, is nobody's victim yet, and nothing ends it anyway."""
        driver = self.driver
        assert driver is not None
        process = driver.cluster.workers[slot]
        if driver.closing or slot in self._immune() or not slot.startswith(PREFIXES[what]):
            return False
        if process.address is None or process.process.returncode is not None:
            return False
        worker: WorkerSlot | None = driver.pipeline.fleet.workers.get(slot)
        if worker is None:  # an environment worker or a rank
            return what in ("environment", "trainer")
        if worker.awaits is Awaited.STOP or not worker.present:
            return False
        if self.restless and what in SLOT_KINDS:
            return True
        if slot not in driver.rollout.refs:
            return False
        if what == "hung":
            return slot in driver.rollout.info and driver.pipeline.fleet.gpus.owner[slot] is Owner.WORKER
        return what == "overlap" or slot in driver.rollout.checksums

    def _strike(self, kill: Kill) -> None:
        assert self.driver is not None
        worker = self.driver.cluster.workers[kill.slot]
        pid = worker.process.pid
        if kill.what in IN_ENGINE:
            pid = self.driver.rollout.info[kill.slot]["pid"]
        if kill.what == "cut":
            cut(pid)
            return
        number = {"notice": signal.SIGTERM, "frozen": signal.SIGSTOP, "hung": signal.SIGSTOP}.get(
            kill.what, signal.SIGKILL
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number) if kill.what == "hung" else os.kill(pid, number)
        if kill.what == "notice":

            def take() -> None:
                if worker.process.returncode is None:
                    worker.process.kill()

            asyncio.get_running_loop().call_later(self.random.uniform(0.0, NOTICE_S), take)

    def ended(self, *_: Any) -> None: ...
    def stepped(self, *_: Any) -> None: ...
    def notice(self, text: str) -> None: ...


def cut(pid: int) -> None:
    """Reset every TCP connection between this process and another one of this machine."""
    mine = {c.laddr for c in psutil.Process().net_connections("tcp") if c.raddr}
    theirs = [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr and c.raddr in mine]
    pairs = " or ".join(f"( sport = :{c.laddr.port} and dport = :{c.raddr.port} )" for c in theirs)
    subprocess.run(["ss", "-K", "-t", "state", "established", pairs], check=True, stdout=subprocess.DEVNULL)
