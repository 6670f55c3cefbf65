"""Fault search: play the schedules of seeds, say of each that broke what broke, and make it smaller.

See `docs/faults.md`; `python -m bench.faults` is the command.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from pearl.core import events as ev
from pearl.core.settings import Borrowing, Roles
from pearl.sim.search.case import Case, draw
from pearl.sim.search.world import World

LAST_ENTRIES = 40
"""Of the log, in a report."""
SHRINKING_RUNS = 400
"""Smaller cases that are tried at most."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A run that broke an invariant. `what` is the first line of what was raised, `where` the frame that raised it."""

    case: Case
    what: str
    where: str
    world: World = field(repr=False, compare=False)


def play(case: Case) -> tuple[World, Broken | None]:
    """The whole run, and what it broke."""
    world = World(case)
    try:
        world.run()
    except Exception as error:  # whatever the machine raises is what is searched for
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/pearl/')[2]}:{frame.name}"
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return world, Broken(case, what, where, world)
    return world, None


def play_seed(seed: int) -> tuple[World, Broken | None]:
    """The schedule of a seed."""
    return play(draw(seed))


def shrink(broken: Broken) -> Broken:
    """The same fault (raised at the same place) in a smaller case: fewer faults, slots, steps and policies."""
    runs = 0
    again = True
    while again and runs < SHRINKING_RUNS:
        again = False
        for case in _smaller(broken.case):
            runs += 1
            _, found = play(case)
            if found is not None and found.where == broken.where:
                broken, again = found, True
                break
    return broken


def _smaller(case: Case) -> Iterator[Case]:
    faults = case.faults
    for i in range(len(faults)):
        yield replace(case, faults=faults[:i] + faults[i + 1 :])
    if case.fault_rate:
        yield replace(case, fault_rate=0.0)
    for name, least in (
        ("preemptible", 0), ("overlap", 0), ("reserved", 1), ("environment_workers", 1), ("tracked", False),
    ):  # fmt: skip
        value = getattr(case, name)
        if value > least:
            fewer: dict[str, Any] = {name: type(least)(value - 1)}
            yield replace(case, **fewer)
    p = case.pipeline
    for name, least in (("steps", 1), ("groups_per_batch", 1), ("group_size", 2), ("max_staleness_steps", 0)):
        if getattr(p, name) > least:
            fewer = {name: getattr(p, name) - 1}
            yield replace(case, pipeline=replace(p, **fewer))
    for name, simple in (("max_concurrent_trajectories", 64), ("requests_per_worker", 4), ("kv_tokens_per_worker", 0)):
        if getattr(p, name) != simple:
            simpler: dict[str, Any] = {name: simple}
            yield replace(case, pipeline=replace(p, **simpler))
    e = case.elastic
    if e is None:
        return
    yield replace(case, elastic=None, overlap=0, preemptible=0)
    if e.roles is not Roles.COLOCATED:
        yield replace(case, elastic=replace(e, roles=Roles.COLOCATED))
    if e.roles is Roles.DYNAMIC:
        yield replace(case, elastic=replace(e, roles=Roles.FIXED))
    if e.intra_scale is not Borrowing.NEVER:
        yield replace(case, elastic=replace(e, intra_scale=Borrowing.NEVER), overlap=0)
    for i, fault in enumerate(faults):
        if fault.wait_s:
            yield replace(case, faults=(*faults[:i], replace(fault, wait_s=0.0), *faults[i + 1 :]))


def report(broken: Broken) -> str:
    """For a person: what broke, in which case, the story of the workers concerned, the last entries."""
    world = broken.world
    lines = [f"seed {broken.case.seed}: {broken.what}", f"  at {broken.where}", "", "the run:"]
    lines += [f"  {line}" for line in describe(broken.case)]
    lines += ["", "faults that happened:", *(f"  {fault}" for fault in world.struck)]
    last = world.log[-LAST_ENTRIES:]
    text = broken.what + repr(last[-3:])
    for name, worker in world.pipeline.fleet.workers.items():
        if name in text:
            state = f"{worker.role}, {worker.activity}, to be {worker.goal_role} and {worker.goal}"
            lines += ["", f"{name}: {state}, awaits {worker.awaits or 'nothing'}, life {worker.life}"]
            lines += [f"  {at:8.2f}  {activity:<9} {why}" for at, activity, why in list(worker.story)[-12:]]
    lines += ["", "the last entries:"]
    for at, entry in last:
        arrow = "<-" if isinstance(entry, ev.Event) else "->"
        lines.append(f"  {at:8.2f} {arrow} {_short(entry)}")
    return "\n".join(lines)


def describe(case: Case) -> list[str]:
    """One line per part, with what differs from the defaults."""
    lines = [
        f"{case.reserved} reserved, {case.preemptible} preemptible, {case.overlap} overlap slots; "
        f"{case.environment_workers} environment workers; {'tracked' if case.tracked else 'fixed'} profile; "
        f"fault rate {case.fault_rate:g}"
    ]
    lines.append(_short(case.pipeline))
    lines.append(_short(case.elastic) if case.elastic else "no Elastic Scheduler")
    return lines + [f"planned: {fault}" for fault in case.faults]


def _short(thing: Any) -> str:
    """A dataclass without its defaults."""
    if not is_dataclass(thing):
        return str(thing)
    shown = [(f.name, getattr(thing, f.name)) for f in fields(thing) if getattr(thing, f.name) != f.default]
    return f"{type(thing).__name__}({', '.join(f'{name}={value}' for name, value in shown)})"
