"""Dask's configuration as PEARL needs it, set before anything of a cluster starts."""

from __future__ import annotations

import logging

import dask

SETTINGS = {
    "distributed.worker.daemon": False,  # workers start engines and ranks as children
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.work-stealing": False,  # an actor is bound to its slot
    "distributed.scheduler.worker-ttl": None,  # our plugin looks for silence, and more often
    "distributed.comm.timeouts.connect": "10 s",
    "distributed.comm.timeouts.tcp": "11 s",  # the least that notices a silent network loss
    "distributed.comm.retry.count": 0,  # we own the retries
    "distributed.admin.tick.limit": "30 s",  # a busy small machine is not worth a warning
    "distributed.admin.system-monitor.interval": "5 s",
}


def configure_dask() -> None:
    """Apply the settings to this process and keep Dask's chatter out of the console."""
    dask.config.set(SETTINGS)
    for name in ("distributed", "tornado", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
