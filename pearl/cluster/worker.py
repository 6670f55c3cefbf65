"""`python -m pearl.cluster.worker`: one Dask worker process for one slot, with one fixed binding.

It has no nanny: a slot that dies is started again by its adapter, as another incarnation, or not at all. It ends with
its owner (the lifeline pipe on standard input) and when the scheduler is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from distributed import Worker
from distributed.security import Security
from distributed.utils import get_ip

from pearl.cluster.certificates import Certificates, worker_security
from pearl.cluster.identity import own_host, own_identity
from pearl.cluster.notices import Reporter, source_of, watch
from pearl.cluster.plugin import IDENTITY
from pearl.cluster.settings import configure_dask
from pearl.cluster.sigterm import SigtermNotice
from pearl.cluster.snapshots import SnapshotExchange
from pearl.config.cluster import NoticesConfig
from pearl.errors import UserError
from pearl.lifeline import end_with_owner
from pearl.weights.copies import HostCopies

END_S = 5.0
"""A worker that is to end says goodbye within this time, or goes without."""


class Ending:
    """Asked for by any thread, once; awaited by the event loop, which may be blocked: then the process ends anyway."""

    def __init__(self) -> None:
        self.why = ""
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()

    def ask(self, why: str) -> None:
        self.why = why
        print(f"ending: {why}", file=sys.stderr, flush=True)
        forced = threading.Timer(END_S, os._exit, (0,))
        forced.daemon = True
        forced.start()
        self._loop.call_soon_threadsafe(self._asked.set)

    async def wait(self) -> None:
        await self._asked.wait()


async def serve(
    scheduler: str,
    slot: str,
    incarnation: int,
    zone: str,
    host: str,
    notices: NoticesConfig,
    security: Security | None = None,
) -> None:
    identity = own_identity(slot, incarnation, zone).to_wire()
    reporter = Reporter(scheduler, slot, incarnation, security)
    ending = Ending()
    SigtermNotice(notices.sigterm_grace_s, reporter.report, ending.ask)
    if source := source_of(notices):
        watch(source, notices.poll_s, reporter.report)

    async def who(worker: Worker) -> dict[str, Any]:
        return identity

    worker = Worker(
        scheduler,
        name=f"{slot}#{incarnation}",
        nthreads=1,
        memory_limit=0,
        host=host,
        protocol="tls" if security else None,
        security=security,
        dashboard_address="127.0.0.1:0",  # health and metrics know no TLS
        dashboard=False,
        startup_information={IDENTITY: who},
    )
    copies = HostCopies(own_host())
    copies.sweep()
    SnapshotExchange(worker, copies)
    async with worker:
        finished = asyncio.ensure_future(worker.finished())
        asked = asyncio.ensure_future(ending.wait())
        await asyncio.wait({finished, asked}, return_when=asyncio.FIRST_COMPLETED)
        copies.close()  # who hears of the departure may kill this process at once
        if ending.why:
            with contextlib.suppress(OSError):
                await worker.scheduler.pearl_leaving(address=worker.address, reason="closed", detail=ending.why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", required=True, help="its address, tls://host:port or tcp://host:port")
    parser.add_argument("--slot", required=True, help="name of this GPU slot, in the cluster no other's")
    parser.add_argument("--zone", required=True, help="preemptible or reserved")
    parser.add_argument("--incarnation", type=int, default=None, help="life of the slot; by default the time, in s")
    parser.add_argument("--host", help="own address to listen at; by default the one that reaches the scheduler")
    parser.add_argument("--tls", help="folder with ca.pem, worker.pem, worker.key; - reads a line of standard input")
    parser.add_argument("--notices", default="{}", help="the section cluster.notices, as JSON")
    parser.add_argument("--no-lifeline", action="store_true", help="do not end when standard input ends")
    args = parser.parse_args()
    try:
        security = _security(args.tls)
    except UserError as error:
        sys.exit(f"error: {error}")
    if not args.no_lifeline:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # the lifeline ends a whole group, which is to be ours
        end_with_owner(sys.stdin.fileno())
    configure_dask()
    notices = NoticesConfig.model_validate_json(args.notices)
    life = int(time.time()) if args.incarnation is None else args.incarnation
    host = args.host or get_ip(urllib.parse.urlsplit(args.scheduler).hostname)
    code = 0
    try:
        asyncio.run(serve(args.scheduler, args.slot, life, args.zone, host, notices, security))
    except (RuntimeError, OSError) as error:  # Dask's wrapper; what the scheduler said is inside
        print(f"the worker did not join: {error.__cause__ or error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads of an engine client or of torch must not hold a finished worker


def _security(tls: str | None) -> Security | None:
    if tls is None:
        return None
    if tls == "-":
        line = b""
        while not line.endswith(b"\n"):  # not a byte more than that line: the rest is the lifeline
            if not (byte := os.read(sys.stdin.fileno(), 1)):
                raise UserError("standard input ended before the TLS material", "Do not start it by hand with --tls -.")
            line += byte
        return worker_security(line)
    return Certificates.open(Path(tls), "worker").security()


if __name__ == "__main__":
    main()
