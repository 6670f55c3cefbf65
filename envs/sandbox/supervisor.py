"""Runs inside remote sandboxes, by Python alone: does what one request says, and prints one JSON object.

A request is a file, named by the first argument and removed at once: `archive` makes the workspace, `pack` reads it,
`remove` removes it, `argv` runs a command in it. A command's orphans become ours, so that all of them can be ended.
"""

import base64
import ctypes
import gzip
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.01


def main(path: Path) -> dict:
    request = json.loads(path.read_text())
    path.unlink()
    workspace = request["workspace"]
    if "archive" in request:
        data = gzip.decompress(base64.b64decode(request["archive"]))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall("/", [member for member in tar if ("/" + member.name).startswith(workspace)])
        return {}
    if "pack" in request:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1, format=tarfile.GNU_FORMAT) as tar:
            tar.add(workspace, "workspace")
        return {"archive": base64.b64encode(buffer.getvalue()).decode()}
    if "remove" in request:
        shutil.rmtree(workspace, ignore_errors=True)
        return {}
    return run(request)


def run(request: dict) -> dict:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    owner = os.getppid()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(base64.b64decode(request["stdin"]))
        stdin.seek(0)
        child = subprocess.Popen(
            request["argv"],
            stdin=stdin,
            stdout=write_end,
            stderr=subprocess.DEVNULL if request["quiet"] else write_end,
            cwd=request["workspace"],
            env=request["variables"],
            start_new_session=True,
        )
    os.close(write_end)
    deadline = time.monotonic() + request["timeout_s"]
    half = request["keep_bytes"] // 2
    head, tail, total, killed, code = b"", b"", 0, "", None
    try:
        while code is None or select.select([read_end], [], [], 0)[0]:
            if time.monotonic() > deadline or os.getppid() != owner:
                killed = "wall time"
            elif total > request["kill_after_bytes"]:
                killed = "output"
            if killed:
                break
            if select.select([read_end], [], [], POLL_S)[0]:
                chunk = os.read(read_end, 1 << 16)
                if not chunk:  # all have closed it, and the command may go on
                    if code is not None:
                        break
                    time.sleep(POLL_S)
                total += len(chunk)
                room = max(request["keep_bytes"] - half - len(head), 0)
                head, tail = head + chunk[:room], tail + chunk[room:]
                tail = tail[-half:] if half else b""
            if code is None:
                code = child.poll()
    finally:
        end_all(child)
    output = base64.b64encode(head + tail).decode()
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    return {"output": output, "cut": total - len(head + tail), "head": len(head), "killed": killed, "exit_code": code}


def end_all(child: subprocess.Popen) -> None:
    """Stop, then kill, all descendants, until there is none."""
    while True:
        below = descendants(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in below:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
        child.wait()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def descendants(root: int) -> list:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    found = []
    for pid in parents:
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root and pid != root:
            found.append(pid)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
