"""Plays jobs, several at once, and keeps what they gave, so that an interrupted study goes on where it was."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

import pearl
from pearl.paper.jobs import Job, Numbers

PLAYED_BY = ("core", "sim", "paper", "profiles")
"""Packages whose sources a job's numbers hang on."""


@cache
def source_digest() -> str:
    """Of all that a job runs: numbers of other sources are not taken over."""
    digest = hashlib.sha256()
    root = Path(pearl.__file__).parent
    for package in PLAYED_BY:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key_of(job: Job) -> str:
    return hashlib.sha256(repr(job).encode()).hexdigest()[:24]


class Kept:
    """Numbers by job in a file of JSON lines that is only added to. `path` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.numbers: dict[str, Numbers] = {}
        if path is not None and path.is_file():
            lines = path.read_text().splitlines()
            if lines and json.loads(lines[0]).get("source") == source_digest():
                self.numbers = {entry["job"]: entry["numbers"] for entry in map(json.loads, lines[1:])}
                return
        if path is not None:
            path.write_text(json.dumps({"source": source_digest()}) + "\n")

    def add(self, key: str, numbers: Numbers) -> None:
        self.numbers[key] = numbers
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"job": key, "numbers": numbers}) + "\n")


def play_all(
    jobs: Iterable[Job], kept: Kept, processes: int, until_s: float, progress: Callable[[int, int], None]
) -> dict[Job, Numbers] | None:
    """Numbers of every job; None if `until_s` of `time.monotonic` came first, with what is done kept."""
    wanted = {job: key_of(job) for job in jobs}
    left = [job for job, key in wanted.items() if key not in kept.numbers]
    done = len(wanted) - len(left)
    progress(done, len(wanted))
    for job, numbers in _played(left, processes, until_s):
        kept.add(wanted[job], numbers)
        done += 1
        progress(done, len(wanted))
    if done < len(wanted):
        return None
    return {job: kept.numbers[key] for job, key in wanted.items()}


def _play(job: Job) -> tuple[Job, Numbers]:
    return job, job.play()


def _played(jobs: list[Job], processes: int, until_s: float) -> Iterator[tuple[Job, Numbers]]:
    """What is ready by `until_s`, and the first one in any case, so that each call gets on."""
    if processes < 2 or len(jobs) < 2:
        for job in jobs:
            yield _play(job)
            if time.monotonic() > until_s:
                return
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(_play, jobs)
        with suppress(StopIteration, multiprocessing.TimeoutError):
            yield results.next()
            while True:
                yield results.next(timeout=None if until_s == inf else max(0.0, until_s - time.monotonic()))
