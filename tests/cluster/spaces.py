"""Another host, as a network namespace that a test makes for itself: one cable, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Space:
    name: str
    here: str
    """Address of this host, as the other one sees it."""
    there: str

    def command(self, *line: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *line]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def other_host(number: int = 0) -> Iterator[Space]:
    """Skips the test where a namespace cannot be made; `number` tells those of one test apart."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and iproute2")
    name, net = f"pt{os.getpid()}x{number}", f"10.{215 + number}.{os.getpid() % 254 + 1}"
    space = Space(name, f"{net}.1", f"{net}.2")
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        for where, device, address in (([], name, space.here), (["-n", name], "eth0", space.there)):
            ip(*where, "addr", "add", f"{address}/30", "dev", device)
            ip(*where, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield space
    except subprocess.CalledProcessError as error:
        if "netns" not in str(error.cmd):
            raise
        pytest.skip(f"no network namespace here: {error.stderr.decode()}")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
