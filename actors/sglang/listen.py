"""Keeps the sockets of a native library on one address.

Mooncake (0.3.13) binds the two TCP ports of its transfer engine to every interface, and no setting of it changes that.
Whoever reaches them can read and write an engine's KV. So the `bind` of its two libraries is led to ours, in the table
by which a library finds the functions of others (the relocations of its ELF image): "any address" becomes the named
one. What came of it is then read from the kernel, and an engine that listens elsewhere does not serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

KV_HOST = "PEARL_KV_HOST"
"""Environment variable of an engine that hands KV on: the address it does that at."""
MODULE, LIBRARIES = "mooncake.engine", ("engine.so", "libasio.so")
"""Of its package: the handshake's socket is bound by the first, that of the data by the second."""
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
ANY_V4, ANY_V6 = bytes(4), bytes(16)
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
SYMBOL_BYTES, PROGRAM_HEADER_BYTES = 24, 56
PT_DYNAMIC = 2
READ_WRITE = 3

BIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
_kept: list[object] = []
"""What native code calls must outlive it."""


class Listener(NamedTuple):
    """Where a process listens."""

    host: str
    port: int


class KeepOn(MetaPathFinder):
    """On `sys.meta_path`: leads Mooncake's sockets to `host` in the moment in which it is imported, not earlier."""

    def __init__(self, host: str) -> None:
        self.host = host

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            run, package = spec.loader.exec_module, Path(spec.origin).parent

            def exec_module(module: ModuleType) -> None:
                run(module)
                keep_on(self.host, package)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_on(host: str, package: Path) -> None:
    """From now on what Mooncake binds to any address is bound to `host`. Raises OSError where that cannot be done."""
    native = ctypes.CDLL(None, use_errno=True).bind
    native.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
    v4 = socket.inet_aton(host)

    def bind(descriptor: int, address: int, length: int) -> int:
        raw = bytearray(ctypes.string_at(address, length))
        (family,) = struct.unpack_from("=H", raw)
        if family == socket.AF_INET and raw[4:8] == ANY_V4:
            raw[4:8] = v4
        elif family == socket.AF_INET6 and raw[8:24] == ANY_V6:
            raw[8:24] = bytes(10) + b"\xff\xff" + v4  # the same address, as a dual-stack socket names it
        result: int = native(descriptor, (ctypes.c_char * length).from_buffer(raw), length)
        return result

    led = BIND(bind)
    _kept.append(led)
    present = [package / name for name in LIBRARIES if (package / name).exists()]
    if sum(_lead(library, b"bind", ctypes.cast(led, ctypes.c_void_p).value or 0) for library in present) == 0:
        raise OSError(errno.ENOENT, f"{package} binds its sockets in another way than was expected")


def _lead(library: Path, function: bytes, to: int) -> bool:
    """Let calls of `library` to the imported `function` go `to` another address. False if it imports none."""
    base = _base(library)
    table, found = _dynamic(base), False
    for at, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        for offset, info, _ in struct.iter_unpack("<QQq", ctypes.string_at(table.get(at, 0), table.get(size, 0))):
            if not (symbol := info >> 32):
                continue
            (name,) = struct.unpack("<I", ctypes.string_at(table[DT_SYMTAB] + symbol * SYMBOL_BYTES, 4))
            if ctypes.string_at(table[DT_STRTAB] + name) == function:
                _write(base + offset, to)
                found = True
    return found


def _base(library: Path) -> int:
    """Where a library is loaded. Raises OSError if it is not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and int(offset, 16) == 0 and Path(path[0]).name == library.name and Path(path[0]).samefile(library):
            return int(span.split("-")[0], 16)
    raise OSError(errno.ENOENT, f"{library} is not loaded")


def _dynamic(base: int) -> dict[int, int]:
    """The dynamic section of a loaded image, addresses as they are in memory."""
    (headers,) = struct.unpack("<Q", ctypes.string_at(base + 32, 8))
    (count,) = struct.unpack("<H", ctypes.string_at(base + 56, 2))
    for i in range(count):
        header = ctypes.string_at(base + headers + i * PROGRAM_HEADER_BYTES, PROGRAM_HEADER_BYTES)
        kind, _, _, address, _, _, size, _ = struct.unpack("<IIQQQQQQ", header)
        if kind == PT_DYNAMIC:
            pairs = struct.iter_unpack("<qQ", ctypes.string_at(base + address, size))
            table = dict(pairs)
            addresses = (DT_JMPREL, DT_RELA, DT_SYMTAB, DT_STRTAB)
            return {tag: value + base if tag in addresses and value < base else value for tag, value in table.items()}
    raise OSError(errno.ENOEXEC, "an image without a dynamic section")


def _write(address: int, value: int) -> None:
    page = os.sysconf("SC_PAGESIZE")
    first = address - address % page
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(page), READ_WRITE):
        raise OSError(ctypes.get_errno(), "the table of a library cannot be written")
    ctypes.c_uint64.from_address(address).value = value


def listeners(pid: int | str = "self") -> list[Listener]:
    """TCP sockets on which a process listens, as the kernel says; none if it is gone."""
    process, found = Path(f"/proc/{pid}"), []
    try:
        own = {str(link) for link in _links(process / "fd")}
        for table in ("tcp", "tcp6"):
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                    address, _, port = fields[1].partition(":")
                    found.append(Listener(_host(address), int(port, 16)))
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found


def _links(folder: Path) -> Iterator[Path]:
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield link.readlink()


def strays(host: str, pid: int | str = "self") -> list[Listener]:
    """Those that others can connect to than this machine and who reaches `host`."""
    own = (host, "::1")
    return [at for at in listeners(pid) if at.host not in own and not at.host.startswith("127.")]


def _host(address: str) -> str:
    """Of 32-bit words in the machine's byte order; an IPv4 address also where a dual-stack socket names it."""
    raw = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw)
    if raw[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)
