"""Podman or Docker through its command line, the same for both."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from envs.errors import InfrastructureError
from envs.sandbox.command import run_bounded
from pearl.errors import UserError

CALL_S = 120.0
"""One call that makes, copies or removes something; a busy machine makes containers slowly."""
SAID_BYTES = 4096
ANSWER_BYTES = 1 << 20
PASSED_ON = ("HOME", "PATH", "TMPDIR", "XDG_", "DOCKER_", "CONTAINER", "STORAGE_")
"""Beginnings of our variables that the client sees; containers see none of them."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`program`: path of `podman` or `docker`. Errors of the program: InfrastructureError."""

    name: str
    program: str
    directory: Path = Path("/")
    """In which containers are started: podman's monitor leaves a file there when one runs out of memory."""

    @classmethod
    def find(cls, name: str) -> Engine:
        program = shutil.which(name)
        if program is None:
            raise UserError(
                f"environment.sandbox.backend = {name}, and there is no program {name}",
                f"Install {name}, or set environment.sandbox.backend to bubblewrap.",
            )
        return cls(name, program)

    @property
    def variables(self) -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}

    async def call(self, *arguments: str, stdin: bytes = b"", timeout_s: float = CALL_S) -> str:
        """What the program prints."""
        finished = await run_bounded(
            [self.program, *arguments],
            timeout_s=timeout_s,
            keep_bytes=ANSWER_BYTES,
            kill_after_bytes=ANSWER_BYTES,
            stdin=stdin,
            env=self.variables,
        )
        said = finished.output.decode(errors="replace").strip()
        if finished.killed is not None:
            raise InfrastructureError(f"`{self.name} {arguments[0]}` did not end within {timeout_s:g} s: {said}")
        if finished.return_code != 0:
            raise InfrastructureError(f"`{self.name} {arguments[0]}` failed: {said[-SAID_BYTES:]}")
        return said

    @contextmanager
    def reading(self, *arguments: str) -> Iterator[IO[bytes]]:
        """The program's output as a stream; it is ended when the block is left. Blocks: for threads."""
        argv = [self.program, *arguments]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.variables
        )
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()
            process.stdout.close()
            process.wait(CALL_S)

    async def copy_in(self, container: str, archive: bytes, target: str) -> None:
        """Unpack a tar archive into a directory of the container, with its owners."""
        # The option has contrary meanings.
        owners = "--archive=false" if self.name == "podman" else "--archive"
        await self.call("cp", owners, "-", f"{container}:{target}", stdin=archive)

    async def labelled(self, kind: str, label: str) -> dict[str, str]:
        """Containers ("container") or images ("image") that bear a label, with its value."""
        listing = ("ps", "-aq") if kind == "container" else ("images", "-aq")
        ids = list(dict.fromkeys((await self.call(*listing, "--no-trunc", "--filter", f"label={label}")).split()))
        found = {}
        for one in ids:
            try:
                template = f'{{{{index .Config.Labels "{label}"}}}}'
                found[one] = (await self.call(kind, "inspect", "--format", template, one)).splitlines()[-1]
            except InfrastructureError:
                continue  # gone meanwhile
        return found


def flags(name: str, values: Sequence[str] | Mapping[str, str]) -> list[str]:
    """The same option for each value, or each `key=value`."""
    texts = [f"{key}={value}" for key, value in values.items()] if isinstance(values, Mapping) else list(values)
    return [part for text in texts for part in (name, text)]


async def gone(engine: Engine, *containers: str) -> None:
    """Remove containers, running or not; those that are gone are no error."""
    if containers:
        await engine.call("rm", "--force", "--volumes", *containers)
