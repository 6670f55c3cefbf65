"""As whom sandboxed commands run, and which Python they find there."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import UserError

NOBODY = 65534


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """`uid` None: the caller's own user, who is unprivileged. Else root gives itself up before each command.

    Inside, it is user 1000 either way. Root must not stay: the kernel exempts it from the limit on processes.
    """

    uid: int | None

    @classmethod
    def here(cls) -> SandboxUser:
        return cls(NOBODY if os.getuid() == 0 else None)

    def prefix(self) -> list[str]:
        """Arguments before the command. `setpriv`, as Popen's `user=` forks the whole process: 12 ms more a command."""
        if self.uid is None:
            return []
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise UserError(
                "root cannot give up its rights for sandboxed commands: setpriv is missing",
                "Install util-linux, or run as an ordinary user.",
            )
        user = str(self.uid)
        return [setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--pdeathsig", "KILL", "--"]

    def own(self, *paths: Path) -> None:
        if self.uid is not None:
            for path in paths:
                os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def can_read(self, path: Path) -> bool:
        """Whether the user may pass all directories on the way, and read what is there."""
        if self.uid is None:
            return os.access(path, os.R_OK)
        try:
            resolved = path.resolve(strict=True)
            return self.can_pass(resolved.parent) and _allows(self.uid, resolved, stat.S_IROTH)
        except OSError:
            return False

    def can_pass(self, directory: Path) -> bool:
        if self.uid is None:
            return os.access(directory, os.X_OK)
        resolved = directory.resolve(strict=True)
        return all(_allows(self.uid, parent, stat.S_IXOTH) for parent in (resolved, *resolved.parents))


def _allows(uid: int, path: Path, bit: int) -> bool:
    found = path.stat()
    shift = 6 if found.st_uid == uid else 3 if found.st_gid == uid else 0
    return bool(found.st_mode & (bit << shift))


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that exists in the sandbox; `bind` is a prefix to be made visible there, read-only."""

    path: str
    bind: str | None


def find_interpreter(user: SandboxUser, prefix: Path | None = None) -> Interpreter:
    """This process's own Python if the sandbox's user can reach it, else the system's."""
    base = (prefix or Path(sys.base_prefix)).resolve()
    own = base / "bin" / "python3"
    if own.exists():
        if base.is_relative_to("/usr"):
            return Interpreter(str(own), None)
        if user.can_read(own):
            return Interpreter(str(own), str(base))
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if user.can_read(Path(path)):
            return Interpreter(path, None)
    raise UserError(
        f"sandboxes have no Python: {base} cannot be reached by the user that runs commands, and /usr has none",
        "Install python3 from the system's packages, make that directory passable for others, or do not run as root.",
    )
