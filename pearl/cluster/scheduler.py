"""`python -m pearl.cluster.scheduler`: a Dask scheduler of its own, for a cluster that outlives a driver.

It runs until SIGTERM. Beyond loopback it has TLS, or is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from pearl.cluster.certificates import Certificates, require_encryption
from pearl.cluster.local import open_scheduler, require_listening
from pearl.cluster.plugin import ElasticityPlugin
from pearl.cluster.settings import configure_dask
from pearl.config.cluster import ClusterConfig
from pearl.errors import UserError

PORT = 8786


async def serve(host: str, port: int, tls: Certificates | None, told: Path | None, silent_loss_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_scheduler(host, port, tls) as scheduler:
        plugin = ElasticityPlugin(silent_loss_s)
        await scheduler.register_scheduler_plugin(plugin, idempotent=True)
        print(f"scheduler at {scheduler.address}", flush=True)
        if told is not None:
            unfinished = told.with_name(f".{told.name}.{os.getpid()}")
            unfinished.write_text(scheduler.address)
            unfinished.replace(told)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at, and no other")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one")
    parser.add_argument("--tls", type=Path, help="folder with ca.pem, scheduler.pem, scheduler.key")
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without TLS")
    parser.add_argument("--address-file", type=Path, help="write the address here when it listens")
    parser.add_argument("--silent-loss-s", type=float, default=ClusterConfig().silent_loss_s)
    args = parser.parse_args()
    configure_dask()
    try:
        require_encryption(args.host, args.tls is not None, args.insecure)
        tls = Certificates.open(args.tls, "scheduler") if args.tls else None
        require_listening(args.host, args.port)
    except UserError as error:
        sys.exit(f"error: {error}")
    asyncio.run(serve(args.host, args.port, tls, args.address_file, args.silent_loss_s))


if __name__ == "__main__":
    main()
