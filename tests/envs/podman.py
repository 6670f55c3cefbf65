"""Podman for tests: its own storage, removed at the end, and an image that needs no registry."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.envs.rootfs import pack_rootfs

IMAGE = "localhost/pearl-test"
SETTINGS = """[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "none"
"""
"""Works where no systemd runs, as in containers and small virtual machines."""
STORAGE = '[storage]\ndriver = "{driver}"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n'


@contextmanager
def podman_image(root: Path) -> Iterator[str]:
    """Skips where podman cannot run a container."""
    program = shutil.which("podman")
    if program is None:
        pytest.skip("podman is not installed")
    with pytest.MonkeyPatch.context() as patch:
        (root / "containers.conf").write_text(SETTINGS)
        (root / "storage.conf").write_text(STORAGE.format(driver="overlay", root=root))
        patch.setenv("CONTAINERS_CONF", str(root / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(root / "storage.conf"))

        def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)

        pack_rootfs(root / "rootfs.tar")
        said = podman("import", str(root / "rootfs.tar"), IMAGE)
        (root / "rootfs.tar").unlink()
        tried = podman("run", "--rm", "--network", "none", "--memory", "64m", "--pids-limit", "16", IMAGE, "/bin/true")
        if said.returncode or tried.returncode:
            pytest.skip(f"podman runs no container here: {(said.stderr + tried.stderr).strip()[-300:]}")
        try:
            yield IMAGE
        finally:
            podman("system", "reset", "--force")
