"""Whether a Dask scheduler can be reached, and in plain words why not."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distributed.comm import CommClosedError, connect
from distributed.comm.addressing import get_address_host_port
from distributed.security import Security

from pearl.errors import UserError

TRY_S = 5.0
"""One attempt to connect; Dask itself goes on trying for so long."""
GRACE_S = 1.0
"""After which an attempt is ended that Dask has not ended itself; what it raises says more."""
PLAIN_S = 1.0
"""For a bare connection, after one that brought nothing."""
PAUSE_S = 0.5
REFUSES_OURS = "UNKNOWN_CA"
"""OpenSSL's word for what the other side says of a certificate of another authority."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a scheduler was not reached."""

    said: str
    lasting: bool = False
    """No waiting mends it."""


async def fault_of(address: str, error: BaseException, limit_s: float) -> Fault:
    """Of what Dask raised for a connection, or an answer, that did not come within `limit_s`.

    Dask tries again until its time is up, and its last attempt may have been too short to be refused; so silence is
    asked once more, plainly.
    """
    if fault := _fault(error):
        return fault
    silence = Fault(f"nothing within {limit_s:g} s")
    try:
        async with asyncio.timeout(PLAIN_S):
            _, writer = await asyncio.open_connection(*get_address_host_port(address))
            writer.close()
    except OSError as plain:  # TimeoutError, too
        return _fault(plain) or silence
    return silence


def _fault(error: BaseException) -> Fault | None:
    """None: silence."""
    links = list(_chain(error))
    for link in links:
        match link:
            case ssl.SSLCertVerificationError():
                return Fault(f"it has other certificates than we have: {link.verify_message}", lasting=True)
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return Fault("what listens there speaks no TLS", lasting=True)
            case ConnectionRefusedError():
                return Fault("nobody listens there")
            case socket.gaierror():
                return Fault(f"that host has no address: {link.strerror}")
    if any(REFUSES_OURS in str(link) for link in links):
        return Fault("it has other certificates than we have: it refuses ours", lasting=True)
    if any(isinstance(link, CommClosedError) for link in links):
        return Fault("it ends the connection: it has other certificates, or the address other encryption")
    if any(isinstance(link, TimeoutError) for link in links):
        return None
    return Fault(str(error) or repr(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def reach(address: str, security: Security | None, limit_s: float, say: Callable[[str], None]) -> None:
    """Return once the scheduler takes a worker's connection; each new reason why it does not is said.

    Raises UserError after `limit_s`, and at once for what no waiting mends.
    """
    arguments = security.get_connection_args("worker") if security else {}
    until, try_s, before = time.monotonic() + limit_s, min(TRY_S, limit_s), ""
    while True:
        try:
            async with asyncio.timeout(try_s + GRACE_S):
                comm = await connect(address, timeout=try_s, **arguments)
                await comm.close()
                return
        except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
            fault = await fault_of(address, error, try_s)
        if fault.lasting:
            raise UserError(
                f"the scheduler at {address} cannot be used ({fault.said})",
                "Give --tls a copy of the folder of its own cluster, or mend --scheduler.",
            )
        if time.monotonic() >= until:
            raise UserError(
                f"no scheduler was reached at {address} within {limit_s:g} s ({fault.said})",
                "Start it, or mend --scheduler; --join-s waits longer.",
            )
        if fault.said != before:
            say(f"not reached yet, asking again for up to {limit_s:g} s: {fault.said}")
            before = fault.said
        await asyncio.sleep(PAUSE_S)
