"""A container image made of this machine's own programs, so that tests need no registry."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PROGRAMS = """
    bash sh cat ls env mkdir dirname rm mv cp ln touch chmod sleep seq tr cut wc tail head stat truncate timeout nohup
    true setsid id grep sed find mknod mkfifo unshare mount nsenter chroot su dmesg chattr setfattr yes python3 git
"""
FOLDERS = ("tmp", "proc", "sys", "dev", "run", "etc", "root", "var/tmp")
PASSWD = b"root:x:0:0::/root:/bin/bash\nagent:x:1000:1000::/tmp:/bin/bash\n"


def pack_rootfs(target: Path) -> None:
    """A tar archive with PROGRAMS, the system's Python, and the libraries of this Python's interpreter."""
    with tarfile.open(target, "w") as tar:
        for folder in FOLDERS:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755
            tar.addfile(info)
        for name in ("bin", "sbin", "lib", "lib64"):
            if (link := Path("/") / name).is_symlink():
                tar.add(link, name)
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(PASSWD)
        tar.addfile(info, io.BytesIO(PASSWD))
        for path in sorted(set(_files())):
            tar.add(path.resolve(), str(path.parent.resolve() / path.name)[1:])


def _files() -> Iterator[Path]:
    programs = [
        Path(found) for name in PROGRAMS.split() if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))
    ]
    system = Path("/usr/bin/python3").resolve()
    library = Path("/usr/lib") / system.name
    modules = [
        path
        for path in library.rglob("*")
        if path.is_file() and not {"__pycache__", "test", "dist-packages"} & set(path.relative_to(library).parts)
    ]
    own = [Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"]
    own += Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so")
    locale = [path for path in Path("/usr/lib/locale/C.utf8").rglob("*") if path.is_file()]
    yield from [*programs, system, *modules, *locale]
    yield from _libraries([*programs, system, *own, *(path for path in modules if path.suffix == ".so")])


def _libraries(binaries: Iterable[Path]) -> Iterator[Path]:
    said = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"(/\S+\.so\S*) \(0x", said):
        if not path.startswith(str(sys.base_prefix)):
            yield Path(path)
