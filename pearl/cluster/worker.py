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
from typing import Any

from distributed import Worker

from pearl.cluster.identity import own_host, own_identity
from pearl.cluster.notices import Reporter, source_of, watch
from pearl.cluster.plugin import IDENTITY
from pearl.cluster.settings import configure_dask
from pearl.cluster.sigterm import SigtermNotice
from pearl.cluster.snapshots import SnapshotExchange
from pearl.config.cluster import NoticesConfig
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


async def serve(scheduler: str, slot: str, incarnation: int, zone: str, host: str, notices: NoticesConfig) -> None:
    identity = own_identity(slot, incarnation, zone).to_wire()
    reporter = Reporter(scheduler, slot, incarnation)
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
        dashboard_address=None,
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
    for name in ("--scheduler", "--slot", "--zone", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--notices", default="{}", help="the section cluster.notices, as JSON")
    args = parser.parse_args()
    end_with_owner(sys.stdin.fileno())
    configure_dask()
    notices = NoticesConfig.model_validate_json(args.notices)
    code = 0
    try:
        asyncio.run(serve(args.scheduler, args.slot, args.incarnation, args.zone, args.host, notices))
    except RuntimeError as error:  # Dask's wrapper; what the scheduler said is inside
        print(f"the worker did not join: {error.__cause__ or error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads of an engine client or of torch must not hold a finished worker


if __name__ == "__main__":
    main()
