"""What the inside of a bubblewrap sandbox looks like, as bwrap's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envs.sandbox.protocol import SandboxImage
from envs.sandbox.user import Interpreter

WORKSPACE = "/workspace"
SHARED_MEMORY_BYTES = 16 << 20
NAMESPACES = ("--unshare-user", "--unshare-all", "--disable-userns", "--cap-drop", "ALL")
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True)
class Mounts:
    """Read-only: /usr, a Python. Writable: the workspace (an overlay) and /tmp, both kept between commands.

    A sandbox of an image has that image's workspace, mounts and variables instead of this process's Python.
    """

    bwrap: str
    interpreter: Interpreter

    def argv(self, lower: Path, upper: Path, work: Path, tmp: Path, image: SandboxImage | None = None) -> list[str]:
        workspace = image.workspace if image else WORKSPACE
        arguments = [self.bwrap, *NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
        arguments += ["--hostname", "sandbox", "--uid", "1000", "--gid", "1000"]
        for key, value in self._environment(image).items():
            arguments += ["--setenv", key, value]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for top in TOP:
            path = Path("/") / top
            if path.is_symlink():
                arguments += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                arguments += ["--ro-bind", str(path), str(path)]
        for file in ETC:
            if Path(file).exists():
                arguments += ["--ro-bind", file, file]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        arguments += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--bind", str(tmp), "/tmp"]
        arguments += ["--overlay-src", str(lower), "--overlay", str(upper), str(work), workspace]
        for here, inside in self._binds(image):  # after /tmp, which they may lie in
            arguments += ["--ro-bind", here, inside]
        for directory in image.hidden if image else ():
            arguments += ["--tmpfs", directory, "--remount-ro", directory]
        return [*arguments, "--remount-ro", "/", "--chdir", workspace]

    def _binds(self, image: SandboxImage | None) -> tuple[tuple[str, str], ...]:
        if image:
            return image.binds
        return ((self.interpreter.bind, self.interpreter.bind),) if self.interpreter.bind else ()

    def _environment(self, image: SandboxImage | None) -> dict[str, str]:
        own = [str(Path(self.interpreter.path).parent)] if self.interpreter.bind else []
        if image:
            own = list(image.path)
        return {
            "PATH": ":".join([*own, "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "PAGER": "cat",
            "PYTHONDONTWRITEBYTECODE": "1",
            **(image.variables if image else {}),
        }
