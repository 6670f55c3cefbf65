"""What an agent's commands can see, keep and outlive: the same probes for any environment, judged from outside.

Runs in the peers' interpreter, too (`python -m bench.peer_probes`), so it imports nothing of PEARL.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Execute = Callable[[str, float], str]
"""Command and limit in seconds; what was said."""
LIMIT_S = 2.0
LATE_S = 2 * LIMIT_S
LINGER_S = 8
"""A child that outlives its command does so for this long at most, so that no probe hangs the bench."""
GREEDY_BYTES = 3 << 29
"""1.5 GB, which is written to; `MEMORY_MB` is what PEARL's sandbox is given."""
MEMORY_MB = 1024
BIG_BYTES = 200_000_000
FLOOD_BYTES = 50_000_000
MANY_PROCESSES = 400
COST_ROUNDS = 15
GREEDY_S = 60.0
"""Enough on a loaded machine: a command that is cut off would look as if it had been bounded."""
TEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a task needs in an environment that knows nothing of it."""

    tree: str
    environment: str
    """Virtual environment."""
    binds: tuple[tuple[str, str], ...]
    path: tuple[str, ...]
    variables: dict[str, str]
    """`{tree}` stands for where the repository is."""
    test_command: str


class Opened:
    """One environment of one task: `execute`, `close`, and how long it took to open."""

    def __init__(self, execute: Execute, close: Callable[[], None], start_ms: float) -> None:
        self.execute, self.close, self.start_ms = execute, close, start_ms


def probe(opened: Callable[[], Opened], test_command: str) -> dict[str, Any]:
    """Each name says what must not happen; True if it did not. Then costs."""
    mark = secrets.token_hex(6)
    found: dict[str, Any] = {}
    first, second = opened(), opened()
    host = Path(tempfile.mkdtemp(prefix="peers-", dir="/var/tmp"))
    host.chmod(0o777)
    (host / "secret").write_text(mark)
    secret = os.environ.get("PEERS_SECRET", "")
    witness = subprocess.Popen(["/usr/bin/sleep", f"600.{int(mark, 16) % 10**9}"])
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    try:
        run = _in_bash(first.execute)
        found["reads no host file"] = mark not in run(f"cat {host}/secret", LIMIT_S)
        run(f"echo x > {host}/written", LIMIT_S)
        found["writes no host file"] = not (host / "written").exists()
        found["has no variables of ours"] = bool(secret) and secret not in run("env", LIMIT_S)
        said = run("cat /proc/[0-9]*/environ | tr '\\0' '\\n'", LIMIT_S)
        found["finds no secrets in /proc"] = bool(secret) and secret not in said
        said = run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", LIMIT_S)
        found["sees no other processes"] = str(witness.args[1]) not in said  # type: ignore[index]
        said = run(f"(: > /dev/tcp/127.0.0.1/{port}) && echo reached", LIMIT_S)
        found["reaches no service of the host"] = "reached" not in said
        run(f"echo shared > /tmp/left-{mark}", LIMIT_S)
        found["shares no /tmp"] = "shared" not in second.execute(f"cat /tmp/left-{mark}", LIMIT_S)

        found["time-out ends a command"] = _seconds(run, "sleep 9") < LATE_S
        lasting = f"{LINGER_S}.{int(mark, 16) % 10**8}"
        held = f"setsid sleep {lasting} & sleep 9"
        found["time-out holds with a detached child"] = _seconds(run, held) < LATE_S
        found["time-out leaves no process"] = not _kill_all(lasting)
        run(f"setsid sleep {lasting}7 >/dev/null 2>&1 & echo started", LIMIT_S)
        time.sleep(0.3)  # a process that is being killed needs a moment
        found["ended command leaves no process"] = not _kill_all(f"{lasting}7")

        said = run(f"python3 -c 'print(len(bytearray({GREEDY_BYTES})))'", GREEDY_S)
        found["memory is bounded"] = said.split()[-1:] != [str(GREEDY_BYTES)]
        forks = f"for i in $(seq {MANY_PROCESSES}); do sleep {GREEDY_S} & done 2>/dev/null; echo $(jobs -r | wc -l)"
        forks += "; kill -9 $(jobs -p)"
        found["processes are bounded"] = run(forks, GREEDY_S).split()[-1:] != [str(MANY_PROCESSES)]
        said = run(f"head -c {BIG_BYTES} /dev/zero > big; stat -c %s big; rm -f big", GREEDY_S)
        found["files are bounded"] = said.split()[-1:] != [str(BIG_BYTES)]
        found["output is bounded"] = len(run(f"yes | head -c {FLOOD_BYTES}", GREEDY_S)) < FLOOD_BYTES // 10
        costs = [1000 * _seconds(first.execute, "true") for _ in range(COST_ROUNDS)]
        found["command_ms"] = statistics.median(costs)
        start = time.perf_counter()
        run(test_command, TEST_S)
        found["tests_ms"] = 1000 * (time.perf_counter() - start)
        found["start_ms"] = statistics.median([first.start_ms, second.start_ms])
    finally:
        for one in (first, second):
            one.close()
        listener.close()
        witness.kill()
        witness.wait()
        shutil.rmtree(host)
    left = Path(f"/tmp/left-{mark}")
    found["closing leaves no files"] = not left.exists()
    left.unlink(missing_ok=True)
    return found


def _in_bash(execute: Execute) -> Execute:
    """Some run commands in sh."""
    return lambda command, timeout_s: execute(f"bash -c {shlex.quote(command)}", timeout_s)


def _seconds(run: Execute, command: str) -> float:
    start = time.perf_counter()
    run(command, LIMIT_S)
    return time.perf_counter() - start


def _kill_all(argument: str) -> int:
    """End `sleep ARGUMENT`, our own probe's; how many there were."""
    killed = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[:2] == [b"sleep", argument.encode()]:
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed += 1
            except OSError:
                continue
    return killed


@dataclass(frozen=True, slots=True)
class Programs:
    """What peers run commands with: bubblewrap's path, a container engine and an image with bash and coreutils."""

    bwrap: str
    engine: str
    image: str


def open_peer(kind: str, place: Place, programs: Programs) -> Opened:
    """An environment of mini-swe-agent's with a copy of the repository, as its users prepare it."""
    start = time.perf_counter()
    environment: Any
    if kind == "docker":
        from minisweagent.environments.docker import DockerEnvironment  # type: ignore[import-not-found]

        tree = Path("/testbed")
        volumes = [f"{place.tree}:{tree}:O", *(f"{here}:{inside}:ro" for here, inside in place.binds)]
        environment = DockerEnvironment(
            executable=programs.engine,
            image=programs.image,
            cwd=str(tree),
            env=_variables(place, tree),
            run_args=["--rm", *(word for volume in volumes for word in ("-v", volume))],
        )
    elif kind == "bubblewrap":
        from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig  # type: ignore[import-not-found]

        default = BubblewrapEnvironmentConfig().wrapper_args
        extra = [word for here, inside in place.binds for word in ("--ro-bind", here, inside)]
        environment = BubblewrapEnvironment(executable=programs.bwrap, wrapper_args=[*default, *extra])
        tree = environment.working_dir
        environment.config.env = _variables(place, tree)
    else:
        from minisweagent.environments.local import LocalEnvironment  # type: ignore[import-not-found]

        tree = Path(tempfile.mkdtemp(prefix="peers-"))
        environment = LocalEnvironment(cwd=str(tree), env=_variables(place, tree))
    if kind != "docker":
        shutil.copytree(place.tree, tree, symlinks=True, dirs_exist_ok=True)

    def execute(command: str, timeout_s: float) -> str:
        return str(environment.execute({"command": command}, timeout=int(timeout_s))["output"])

    def close() -> None:
        environment.cleanup() if hasattr(environment, "cleanup") else shutil.rmtree(tree)

    return Opened(execute, close, 1000 * (time.perf_counter() - start))


def _variables(place: Place, tree: Path) -> dict[str, str]:
    known = {name: value.replace("{tree}", str(tree)) for name, value in place.variables.items()}
    return {**known, "PATH": ":".join([*place.path, "/usr/local/bin", "/usr/bin", "/bin"])}


def main() -> None:
    """Standard input: kind, programs, places by task. Standard output: what was found, a task a line."""
    given = json.load(sys.stdin)
    for task, fields in given["places"].items():
        place = Place(**{**fields, "binds": tuple(map(tuple, fields["binds"])), "path": tuple(fields["path"])})
        try:
            found = probe(partial(open_peer, given["kind"], place, Programs(**given["programs"])), place.test_command)
        except Exception as error:  # an environment that cannot be opened here is a row, too
            said = str(getattr(error, "stderr", None) or error)
            found = {"not run": said.strip().splitlines()[0][:200]}
        print(json.dumps({"task": task, **found}), flush=True)


if __name__ == "__main__":
    main()
