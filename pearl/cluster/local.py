"""A cluster whose Dask scheduler lives in this process. Its workers are processes of this machine, on loopback, unless
other launchers bring them from elsewhere; then the scheduler listens beyond loopback, with TLS."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from distributed import Scheduler

from pearl.cluster.certificates import Certificates, is_loopback
from pearl.cluster.cluster import Cluster
from pearl.cluster.processes import LocalLauncher
from pearl.config.cluster import ClusterConfig, NoticesConfig
from pearl.errors import UserError

HOST = "127.0.0.1"


class LocalCluster(Cluster):
    """Async context: a scheduler, a client, and the workers that were started through it."""

    def __init__(
        self,
        log_directory: Path,
        on_left: Callable[[str, int, str], None],
        port: int = 0,
        *,
        host: str | None = None,
        insecure: bool = False,
        silent_loss_s: float = ClusterConfig().silent_loss_s,
        notices: NoticesConfig = NoticesConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """`port` is the scheduler's, 0 a free one; `host` the address at which it and this machine's workers listen.

        Beyond loopback it gets certificates, in `tls/` beside the logs, unless it is to be `insecure`.
        """
        self.log_directory, self.port, self.host = log_directory, port, host or HOST
        plain = insecure or is_loopback(self.host)
        tls = None if plain else Certificates.make(log_directory.parent / "tls")
        launcher = LocalLauncher(log_directory, self.host)
        super().__init__(on_left, launcher, tls=tls, silent_loss_s=silent_loss_s, notices=notices)

    async def _scheduler(self) -> str:
        self.scheduler = await self._stack.enter_async_context(open_scheduler(self.host, self.port, self.tls))
        return str(self.scheduler.address)


def require_listening(host: str, port: int) -> None:
    """Raises UserError if nothing of this machine can listen there; port 0 is a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address[0], port, *address[2:]))
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"cluster.host = {host} with cluster.scheduler_port = {port} cannot be used "
            f"({getattr(error, 'strerror', None) or error})",
            "Give an address of this machine, and a free port or 0.",
        ) from None


def open_scheduler(host: str, port: int, tls: Certificates | None) -> Scheduler:
    """Listens at `host` alone; its HTTP pages (health, metrics), which know no TLS, on loopback."""
    secure = {"protocol": "tls://", "security": tls.security()} if tls else {}
    return Scheduler(host=host, port=port, dashboard_address="127.0.0.1:0", dashboard=False, **secure)
