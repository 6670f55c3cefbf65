"""`python -m pearl.cluster.worker`: one Dask worker process for one slot, with one fixed binding.

It has no nanny: a slot that dies is started again by its adapter, as another incarnation, or not at all. It ends when
the scheduler is gone, and with its owner if it has one (`--owner stdin`: a pipe on standard input). One that nobody
owns is *free*: when the driver that used it leaves, it begins anew as the next life, without what ran in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from distributed import Worker
from distributed.security import Security
from distributed.utils import get_ip
from pydantic import ValidationError

from pearl.cluster.certificates import Certificates, worker_security
from pearl.cluster.contact import reach
from pearl.cluster.endpoint import Endpoint
from pearl.cluster.identity import later_life, own_host, own_identity
from pearl.cluster.launcher import JOIN_S, MODULE
from pearl.cluster.notices import Reporter, source_of, watch
from pearl.cluster.plugin import IDENTITY, LOST, RENEW
from pearl.cluster.settings import configure_dask
from pearl.cluster.sigterm import SigtermNotice
from pearl.cluster.snapshots import SnapshotExchange
from pearl.config.cluster import ADDRESS, NoticesConfig
from pearl.errors import UserError
from pearl.lifeline import end_with_owner
from pearl.weights.copies import HostCopies

ZONES = ("preemptible", "reserved", "overlap", "training", "environment")
"""An overlap slot, a rank and an environment are always a driver's own."""
TLS = "PEARL_TLS"
"""Environment variable: a line of `Certificates.bundle`, for `--tls env`."""
OWNERS = ("nobody", "stdin", "scheduler")
END_S = 5.0
"""A worker that is to end says goodbye within this time, or goes without."""
LEAST_S = 1.0
"""A scheduler that was reached at the last moment has this long to take the worker."""


class Ending:
    """Asked for by any thread, once; awaited by the event loop, which may be blocked: then the process ends anyway."""

    def __init__(self) -> None:
        self.why = ""
        self.lost = ""
        """Why the scheduler says that it has lost this worker."""
        self.anew = False
        """The process is to begin another life."""
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()

    def ask(self, why: str, anew: bool = False) -> None:
        self.why, self.anew = why, anew
        _say(f"ending: {why}")
        forced = threading.Timer(END_S, os._exit, (0,))
        forced.daemon = True
        forced.start()
        self._loop.call_soon_threadsafe(self._asked.set)

    async def wait(self) -> None:
        await self._asked.wait()


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker process is told of itself."""

    scheduler: str
    slot: str
    life: int
    zone: str
    host: str
    notices: NoticesConfig
    free: bool
    join_s: float
    """It ends if the scheduler has not taken it within this time."""
    security: Security | None
    secret: str | None = field(default=None, repr=False)
    """Certificate and key that came through the environment, for the next life; children do not inherit it."""


async def serve(seat: Seat) -> bool:
    """Until the worker is to end. Whether it is to begin anew."""
    identity = own_identity(seat.slot, seat.life, seat.zone, seat.free).to_wire()
    reporter = Reporter(seat.scheduler, seat.slot, seat.life, seat.security)
    ending = Ending()
    SigtermNotice(seat.notices.sigterm_grace_s, reporter.report, ending.ask, seat.notices.sigterm_echo_s)
    if source := source_of(seat.notices):
        watch(source, seat.notices.poll_s, reporter.report)

    async def who(worker: Worker) -> dict[str, Any]:
        return identity

    _say(f"joining {seat.scheduler} as {seat.slot}, life {seat.life}")
    until = time.monotonic() + seat.join_s
    await reach(seat.scheduler, seat.security, seat.join_s, _say)
    worker = Worker(
        seat.scheduler,
        name=f"{seat.slot}#{seat.life}",
        nthreads=1,
        memory_limit=0,
        host=seat.host,
        protocol="tls" if seat.security else None,
        security=seat.security,
        dashboard_address="127.0.0.1:0",  # health and metrics know no TLS
        dashboard=False,
        startup_information={IDENTITY: who},
        death_timeout=max(LEAST_S, until - time.monotonic()),
    )

    def renew(always: bool, anew: bool) -> None:
        if seat.free and (always or Endpoint.used) and not ending.why:
            ending.ask("its driver is done with it", anew)

    def lost(why: str) -> None:
        ending.lost = why

    worker.stream_handlers[RENEW] = renew
    worker.stream_handlers[LOST] = lost
    copies = HostCopies(own_host())
    copies.sweep()
    SnapshotExchange(worker, copies)
    async with worker:
        _say("joined")
        finished = asyncio.ensure_future(worker.finished())
        asked = asyncio.ensure_future(ending.wait())
        await asyncio.wait({finished, asked}, return_when=asyncio.FIRST_COMPLETED)
        copies.close()  # who hears of the departure may kill this process at once
        if not ending.why:
            _say(f"ending: {ending.lost or 'the connection to the scheduler broke, or the scheduler ended it'}")
        else:
            with contextlib.suppress(OSError):
                await worker.scheduler.pearl_leaving(address=worker.address, reason="closed", detail=ending.why)
        if ending.anew:
            _begin_anew(seat)
    return ending.anew


def _begin_anew(seat: Seat) -> None:
    """The same process and its devices, as the next life: only `exec` frees all that a library holds of a GPU."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=END_S)
    if seat.secret:
        os.environ[TLS] = seat.secret
    line = list(sys.argv[1:])
    if "--incarnation" in line:
        at = line.index("--incarnation")
        del line[at : at + 2]
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *line, "--incarnation", str(seat.life + 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scheduler", required=True, type=_address, help="its address, tls://host:port or tcp://host:port"
    )
    parser.add_argument("--slot", required=True, help="name of this GPU slot, in the cluster no other's")
    parser.add_argument("--zone", default="preemptible", choices=ZONES)
    parser.add_argument("--incarnation", type=int, default=None, help="life of the slot; by default the time, in ms")
    parser.add_argument("--host", help="own address to listen at; by default the one that reaches the scheduler")
    parser.add_argument("--tls", help=f"folder of ca.pem, worker.pem, worker.key; - is standard input, env {TLS}")
    parser.add_argument("--notices", default="{}", type=_notices, help="the section cluster.notices, as JSON")
    parser.add_argument(
        "--join-s",
        type=float,
        default=JOIN_S,
        help="end if the scheduler has not taken it after so long, %(default)g s unless given",
    )
    parser.add_argument("--owner", default="nobody", choices=OWNERS, help="what the worker ends with; see above")
    args = parser.parse_args()
    if args.scheduler.startswith("tls") != bool(args.tls):
        parser.error("a scheduler at tls:// needs --tls, one at tcp:// takes none")
    try:
        security, secret = _security(args.tls)
    except UserError as error:
        sys.exit(f"error: {error}")
    if args.owner == "stdin":
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # the lifeline ends a whole group, which is to be ours
        end_with_owner(sys.stdin.fileno())
    configure_dask()
    life = later_life() if args.incarnation is None else args.incarnation
    host = args.host or get_ip(urllib.parse.urlsplit(args.scheduler).hostname)
    code = 0
    try:
        free = args.owner == "nobody"
        seat = Seat(args.scheduler, args.slot, life, args.zone, host, args.notices, free, args.join_s, security, secret)
        asyncio.run(serve(seat))
    except TimeoutError:
        _say(f"the worker did not join: the scheduler at {args.scheduler} did not take it within {args.join_s:g} s")
        code = 1
    except (UserError, RuntimeError, OSError) as error:
        _say(f"the worker did not join: {_reason(error)}")
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads of an engine client or of torch must not hold a finished worker


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    """What the scheduler said, if that is inside what Dask makes of it."""
    said = str(error.__cause__ or "") or str(error)
    refused = re.search(r"'message': (['\"])(.*)\1, 'time'", said)
    return refused[2] if refused else said


def _address(text: str) -> str:
    if not re.match(ADDRESS, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not tls://host:port or tcp://host:port")
    return text


def _notices(text: str) -> NoticesConfig:
    try:
        return NoticesConfig.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))} {fault['msg']}" for fault in error.errors())
        raise argparse.ArgumentTypeError(f"{text!r}: {faults}") from None


def _security(tls: str | None) -> tuple[Security | None, str | None]:
    """And the line it came from, if it did not come from files. Raises UserError."""
    if tls is None:
        return None, None
    if tls == "env":
        line = os.environ.pop(TLS, "")
        if not line:
            raise UserError(f"{TLS} is empty", "It holds what `Certificates.bundle` says.")
        return worker_security(line.encode()), line
    if tls == "-":
        read = b""
        while not read.endswith(b"\n"):  # not a byte more than that line: the rest is the lifeline
            if not (byte := os.read(sys.stdin.fileno(), 1)):
                raise UserError("standard input ended before the TLS material", "Do not start it by hand with --tls -.")
            read += byte
        return worker_security(read), None
    return Certificates.open(Path(tls), "worker").security(), None


if __name__ == "__main__":
    main()
