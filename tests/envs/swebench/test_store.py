import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.swebench.errors import BuildFailed, BuildTimeout
from envs.swebench.store import Store
from envs.swebench.tools import Tools
from tests.envs.conftest import processes_with

GB = 10**9


def made(store: Store) -> set[str]:
    return {str(path.relative_to(store.directory)) for path in store.directory.glob("*/*") if path.is_dir()}


def test_sixteen_who_ask_at_once_build_it_once(directory: Path) -> None:
    builds: list[int] = []
    gate = threading.Barrier(16)
    found: list[Path] = []

    def build(target: Path) -> None:
        builds.append(1)
        (target / "part").write_text("whole")

    def ask() -> None:
        store = Store(directory / "store", GB, 60.0)
        gate.wait(30)
        found.append(store.make("trees", "one", build))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(builds) == 1 and len(found) == 16 and len(set(found)) == 1
    assert (found[0] / "part").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing(directory: Path) -> None:
    store = Store(directory / "store", GB, 60.0)

    def build(target: Path) -> None:
        (target / "half").touch()
        raise BuildFailed("no")

    with pytest.raises(BuildFailed):
        store.make("trees", "one", build)
    assert made(store) == set()
    assert store.make("trees", "one", lambda target: None).is_dir()


def _build_and_die(directory: Path, ready: Path) -> None:
    def build(target: Path) -> None:
        (target / "half").touch()
        ready.touch()
        time.sleep(600)

    Store(directory, GB, 60.0).make("trees", "one", build)


def test_a_killed_builder_leaves_nothing_half_done(directory: Path) -> None:
    ready = directory / "ready"
    store = Store(directory / "store", GB, 60.0)
    process = multiprocessing.get_context("spawn").Process(target=_build_and_die, args=(directory / "store", ready))
    process.start()
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        process.join(0.02)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(60)
    assert len(made(store)) == 1  # what it left is not taken for the thing
    target = store.make("trees", "one", lambda target: (target / "whole").touch())
    assert made(store) == {"trees/one"} and [entry.name for entry in target.iterdir()] == ["whole"]


def test_who_waits_for_a_builder_too_long_is_told(directory: Path) -> None:
    store = Store(directory / "store", GB, 0.1)

    def waits(target: Path) -> None:
        Store(directory / "store", GB, 0.1).make("trees", "one", print)

    with pytest.raises(BuildTimeout, match=r"one\.lock"):
        store.make("trees", "one", waits)


def fill(kilobytes: int) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        (target / "data").write_bytes(b"x" * 1024 * kilobytes)

    return write


def test_what_was_not_used_for_longest_goes_when_the_budget_is_exceeded(directory: Path) -> None:
    first = Store(directory / "store", GB, 60.0)
    for number, key in enumerate(("old", "middle", "new")):
        first.make("trees", key, fill(100))
        os.utime(directory / "store" / "trees" / f"{key}.use", (number, number))
    first.close()
    small = Store(directory / "store", 260 * 1024, 60.0)
    small.make("trees", "middle", fill(100))
    assert made(small) == {"trees/middle", "trees/new"}


def test_what_is_in_use_stays_whatever_the_budget(directory: Path) -> None:
    user, other = Store(directory / "store", GB, 60.0), Store(directory / "store", 1, 60.0)
    user.make("trees", "used", fill(100))
    other.make("trees", "own", fill(100))
    assert made(user) == {"trees/used", "trees/own"}
    user.close()
    assert [path.name for path in other.evict()] == ["used"]
    assert json.dumps(sorted(made(user))) == '["trees/own"]'


def test_a_command_ends_with_all_it_started_at_its_deadline_and_when_it_is_stopped(directory: Path) -> None:
    with pytest.raises(BuildTimeout):
        Tools.within(0.5).run(["bash", "-c", "sleep 98437 & wait"], directory)
    stop = threading.Event()
    stop.set()
    with pytest.raises(BuildFailed, match="stopped"):
        Tools.within(60.0, stop).run(["bash", "-c", "sleep 98437 & wait"], directory)
    deadline = time.monotonic() + 20
    while processes_with("98437") and time.monotonic() < deadline:
        os.sched_yield()
    assert processes_with("98437") == []
