"""A cluster that outlives a driver: `pearl cluster up`, `status`, `scale` and `down`.

What is about to be started is written to the state file before it is started, and all of it carries the cluster's tag.
So whenever a command is killed, `down` finds and ends what there is, and says what is left: nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed.core import rpc

from pearl.cluster.binding import Binding
from pearl.cluster.certificates import Certificates
from pearl.cluster.identity import later_life
from pearl.cluster.launcher import Launcher, LaunchFailed, WorkerOrder, WorkerProcess, tag_prefix
from pearl.cluster.local import require_listening
from pearl.cluster.processes import LocalLauncher, LocalProcess
from pearl.cluster.providers import make_launcher, provider_s
from pearl.cluster.reap import TAG, describe, reap, tagged
from pearl.cluster.settings import configure_dask
from pearl.config import RunConfig
from pearl.config.cluster import ClusterConfig
from pearl.core.layout import Zone
from pearl.errors import RunFailed, UserError
from pearl.locks import locked

STATE = "cluster.json"
LOCK_S = 2.0
ASK_S = 10.0
"""The scheduler answers a question within this time."""
POLL_S = 0.25
SCHEDULER_S = 60.0
"""The scheduler's process listens within this time."""
SCHEDULER = "scheduler"

Say = Callable[[str], None]


@dataclass
class State:
    """All that a later command needs to know."""

    id: str
    config: dict[str, Any]
    """Section `cluster`."""
    width: int
    """GPUs of a slot, 0 on a CPU."""
    threads: int
    address: str | None = None
    slots: dict[str, int] = field(default_factory=dict)
    """Place by name."""

    def save(self, path: Path) -> None:
        """On the disk when this returns, whole."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        with unfinished.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


class StandingCluster:
    """The cluster whose files lie in `directory`."""

    def __init__(self, directory: Path, say: Say) -> None:
        configure_dask()
        self.directory, self.say = directory, say
        self.path = directory / STATE

    def line(self, verb: str) -> str:
        """What a user types for this cluster."""
        return f"`pearl cluster {verb} --directory {self.directory}`"

    async def up(self, config: RunConfig, slots: int, gpus: int) -> dict[str, Any]:
        """Start scheduler and `slots` workers; `gpus`: of one slot. Returns `status`. Raises UserError or RunFailed."""
        if config.cluster.kind == "existing":
            raise UserError("cluster.kind = existing names a cluster that is up", "Name the kind of its workers.")
        with self._alone():
            if self.path.exists():
                said = f"{self.path} says that there is a cluster"
                raise UserError(said, f"End it with {self.line('down')} first, or give another --directory.")
            require_listening(config.cluster.host, config.cluster.scheduler_port)
            section = config.cluster.model_dump(mode="json")
            state = State(secrets.token_hex(8), section, gpus, config.engine.threads)
            launcher = self._launcher(state)
            await launcher.check()
            tls = Certificates.make(self.directory / "tls")
            state.save(self.path)
            await self._start_scheduler(state, config.cluster)
            start_s = config.deadlines.worker_start_s + provider_s(config.cluster)
            await self._grow(state, launcher, tls, slots, start_s)
        return await self.status()

    async def scale(self, slots: int, start_s: float, grace_s: float) -> dict[str, Any]:
        """Have `slots` workers, those that are gone anew; what a driver uses gets a notice of `grace_s` before it ends.

        Returns `status`. Raises UserError or RunFailed.
        """
        state = self._read()
        with self._alone():
            state = self._read()
            launcher, tls = self._launcher(state), Certificates(self.directory / "tls")
            try:
                here = {e["identity"]["slot"] for e in (await self._members(state))["events"] if e["kind"] == "joined"}
            except (OSError, TimeoutError) as error:
                said = f"the scheduler does not answer: {_why(error)}"
                raise UserError(said, f"End the cluster with {self.line('down')}, and start it anew.") from None
            for name in sorted(set(state.slots) - here):
                await self._drop(state, launcher, name, "it is gone")
            if len(state.slots) < slots:
                await self._grow(state, launcher, tls, slots, start_s)
            surplus = sorted(state.slots, key=lambda name: -state.slots[name])[: max(0, len(state.slots) - slots)]
            await self._warn(state, surplus, grace_s)
            for name in surplus:
                await launcher.sweep(state.id, name)
                if left := await launcher.left(state.id, name):
                    raise RunFailed(f"{name} is still there: {'; '.join(left)}")
                del state.slots[name]
                state.save(self.path)
                self.say(f"{name} is gone")
        return await self.status()

    async def status(self) -> dict[str, Any]:
        """What the state file says, and who is there by the scheduler's word. Raises UserError without a cluster."""
        state = self._read()
        try:
            here = await self._members(state)
        except (OSError, TimeoutError) as error:
            here = {"events": [], "claimed": False, "fault": _why(error)}
        last: dict[str, dict[str, Any]] = {}
        for event in here["events"]:
            last[event["identity"]["slot"]] = event
        slots = []
        for name in sorted({*state.slots, *last}):
            event = last.get(name)
            identity = event["identity"] if event else {}
            slots.append(
                {
                    "slot": name,
                    "state": {"joined": "here", "notice": "has notice", "left": "gone", None: "awaited"}[
                        event["kind"] if event else None
                    ],
                    "zone": identity.get("zone", str(Zone.PREEMPTIBLE)),
                    "life": identity.get("incarnation"),
                    "host": identity.get("host"),
                    "devices": identity.get("devices"),
                    "detail": event.get("detail", "") if event else "",
                }
            )
        return {
            "directory": str(self.directory),
            "kind": state.config["kind"],
            "address": state.address,
            "tls_directory": str((self.directory / "tls").resolve()),
            "scheduler": here.get("fault", "here"),
            "driver": here["claimed"],
            "slots": slots,
        }

    async def down(self) -> list[str]:
        """End all that was started, also by a command that was killed: what is left, which is to be nothing."""
        self._read()
        with self._alone():
            state = self._read()
            launcher, here = self._launcher(state), tag_prefix(state.id)
            await asyncio.to_thread(reap, here)  # scheduler and helpers first: nothing can join any more
            left: list[str] = []
            try:
                await launcher.sweep(state.id)
                left += await launcher.left(state.id)
            except LaunchFailed as error:
                left.append(str(error))
            left += describe(await asyncio.to_thread(tagged, here))
            if not left:
                shutil.rmtree(self.directory / "tls", ignore_errors=True)  # each cluster has its own
                self.path.unlink()
        return left

    async def _start_scheduler(self, state: State, config: ClusterConfig) -> None:
        told, log = self.directory / "address", self.directory / "scheduler.log"
        told.unlink(missing_ok=True)
        line = [sys.executable, "-m", "pearl.cluster.scheduler", "--host", config.host]
        line += [
            "--port",
            str(config.scheduler_port),
            "--tls",
            str(self.directory / "tls"),
            "--address-file",
            str(told),
        ]
        line += ["--silent-loss-s", str(config.silent_loss_s)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *line, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, TAG: f"{state.id}/{SCHEDULER}#1"},
            )  # fmt: skip
        until = time.monotonic() + SCHEDULER_S
        while not told.exists():
            if process.returncode is not None or time.monotonic() > until:
                raise RunFailed(f"the scheduler does not start; see {log}")
            await asyncio.sleep(POLL_S)
        state.address = told.read_text()
        state.save(self.path)
        self.say(f"scheduler at {state.address}")

    async def _grow(self, state: State, launcher: Launcher, tls: Certificates, slots: int, start_s: float) -> None:
        """Start workers until there are `slots`; places that fail are passed over, each with its reason."""
        assert state.address is not None
        failed: set[int] = set()
        while len(state.slots) < slots:
            started: dict[str, WorkerProcess] = {}
            while len(state.slots) < slots and len(failed) <= slots:
                place = next(n for n in range(10**6) if n not in failed and n not in state.slots.values())
                name = f"slot-{place}"
                state.slots[name] = place
                state.save(self.path)
                binding = Binding(name, Zone.PREEMPTIBLE, (), state.threads, elsewhere=True)
                config = ClusterConfig.model_validate(state.config)
                option = launcher.options[len(failed) % len(launcher.options)]
                order = WorkerOrder(
                    state.id, name, later_life(), Zone.PREEMPTIBLE, state.address, state.width, state.threads,
                    binding.environment(), config.notices, tls, option, place,
                )  # fmt: skip
                try:
                    started[name] = await launcher.start(order)
                except LaunchFailed as error:
                    await self._drop(state, launcher, name, str(error))
                    failed.add(place)
            for name, reason in (await self._joined(state, started, start_s)).items():
                failed.add(state.slots[name])
                await self._drop(state, launcher, name, reason)
            if len(failed) > slots or (not started and len(state.slots) < slots):
                raise RunFailed(
                    f"{len(state.slots)} of {slots} slots are there; see what was said of the others. "
                    f"{self.line(f'scale {slots}')} asks for them again, {self.line('down')} ends all"
                )

    async def _drop(self, state: State, launcher: Launcher, name: str, reason: str) -> None:
        self.say(f"{name}: {reason}")
        await launcher.sweep(state.id, name)
        del state.slots[name]
        state.save(self.path)

    async def _joined(self, state: State, started: dict[str, WorkerProcess], start_s: float) -> dict[str, str]:
        """Why each of those that have not joined after `start_s`, or have ended, is not there."""
        until, awaited, gone = time.monotonic() + start_s, set(started), dict[str, str]()
        while awaited and time.monotonic() < until:
            here = (await self._members(state))["events"]
            for name in sorted(awaited & {e["identity"]["slot"] for e in here if e["kind"] == "joined"}):
                awaited.discard(name)
                self.say(f"{name} is here")
            for name in sorted(awaited):
                process = started[name]
                if process.failed() or (isinstance(process, LocalProcess) and process.returncode):
                    gone[name] = str(process.failed() or process.how("gone"))
                    awaited.discard(name)
            await asyncio.sleep(POLL_S if awaited else 0)
        return gone | {
            name: f"it did not join within {start_s:g} s; {started[name].how('started')}" for name in awaited
        }

    async def _warn(self, state: State, names: list[str], grace_s: float) -> None:
        """Let the driver, if there is one, drain them first."""
        until = time.monotonic() + grace_s
        while names and time.monotonic() < until:
            try:
                members = await self._members(state)
                present = {e["identity"]["slot"]: e["identity"] for e in members["events"] if e["kind"] != "left"}
                staying = [name for name in names if name in present]
                if not members["claimed"] or not staying:
                    return
                for name in staying:
                    who = {"slot": name, "incarnation": present[name]["incarnation"]}
                    left_s = until - time.monotonic()
                    await self._ask(state, "pearl_notice", **who, seconds_left=left_s, source="pearl cluster scale")
            except (OSError, TimeoutError):
                return
            await asyncio.sleep(POLL_S)

    async def _members(self, state: State) -> dict[str, Any]:
        members: dict[str, Any] = await self._ask(state, "pearl_members")
        return members

    async def _ask(self, state: State, operation: str, **what: Any) -> Any:
        if state.address is None:
            raise OSError("it was not started")
        arguments = Certificates.open(self.directory / "tls", "client").security().get_connection_args("client")
        async with asyncio.timeout(ASK_S):
            async with rpc(state.address, connection_args=arguments, timeout=ASK_S) as scheduler:
                return await getattr(scheduler, operation)(**what)

    def _launcher(self, state: State) -> Launcher:
        config, logs = ClusterConfig.model_validate(state.config), self.directory / "workers"
        width = max(1, state.width)
        return make_launcher(config, logs, width, free=True) or LocalLauncher(logs, config.host, free=True)

    def _read(self) -> State:
        try:
            state = State(**json.loads(self.path.read_text()))
            ClusterConfig.model_validate(state.config)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"there is no cluster in {self.directory}", "Start one with `pearl cluster up`.") from None
        except (OSError, ValueError, TypeError) as error:
            said = f"{self.path} cannot be read ({' '.join(str(error).split())})"
            raise UserError(said, "If another version of PEARL wrote it, end the cluster with that one.") from None
        return state

    def _alone(self) -> contextlib.ExitStack:
        """The lock, taken, in the directory, made. One command at a time."""
        stack = contextlib.ExitStack()
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(locked(self.directory / ".lock", LOCK_S))
        except TimeoutError as error:
            raise UserError(str(error), "Wait for the other `pearl cluster` command.") from None
        except OSError as error:
            said = f"--directory {self.directory} cannot be written ({error.strerror})"
            raise UserError(said, "Give one that can.") from None
        return stack


def _why(error: Exception) -> str:
    return str(error) or f"no answer within {ASK_S:g} s"
