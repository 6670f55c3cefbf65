"""Read a tar stream that came out of a sandbox. Nothing is ever unpacked on the host."""

from __future__ import annotations

import io
import posixpath
import tarfile

from envs.sandbox.protocol import Entry


def parse_tar(stream: bytes) -> dict[str, Entry]:
    """Entries by path. A link counts as "other": what it points to is not followed."""
    entries: dict[str, Entry] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(stream), mode="r:") as archive:
            for member in archive:
                entries[posixpath.normpath(member.name)] = _entry(archive, member)
    except (tarfile.TarError, EOFError, ValueError):
        pass  # cut short: an unreadable file ended it; what came before stands
    return entries


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    if member.isdir():
        return Entry("directory")
    content = archive.extractfile(member) if member.isreg() else None
    return Entry("file", content.read()) if content is not None else Entry("other")
