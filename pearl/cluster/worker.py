"""`python -m pearl.cluster.worker`: one Dask worker process for one slot, with one fixed binding.

It has no nanny: a slot that dies is started again by its adapter, as another incarnation, or not at all. It ends with
its owner (the lifeline pipe on standard input) and when the scheduler is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import Any

from distributed import Worker

from pearl.cluster.identity import own_identity
from pearl.cluster.settings import configure_dask
from pearl.lifeline import end_with_owner


async def serve(scheduler: str, slot: str, incarnation: int, zone: str, host: str) -> None:
    identity = own_identity(slot, incarnation, zone).to_wire()

    async def who(worker: Worker) -> dict[str, Any]:
        return identity

    async with Worker(
        scheduler,
        name=f"{slot}#{incarnation}",
        nthreads=1,
        memory_limit=0,
        host=host,
        dashboard_address=None,
        dashboard=False,
        startup_information={"pearl": who},
    ) as worker:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        finished = asyncio.ensure_future(worker.finished())
        asked = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({finished, asked}, return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--scheduler", "--slot", "--zone", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    args = parser.parse_args()
    end_with_owner(sys.stdin.fileno())
    configure_dask()
    asyncio.run(serve(args.scheduler, args.slot, args.incarnation, args.zone, args.host))
    sys.stdout.flush()
    os._exit(0)  # threads of an engine client or of torch must not hold a finished worker


if __name__ == "__main__":
    main()
