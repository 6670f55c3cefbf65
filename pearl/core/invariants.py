"""What must hold in the machines after every event."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pearl.core.fleet import Fleet
from pearl.core.gpus import Owner
from pearl.core.groups import Phase
from pearl.core.layout import Role
from pearl.core.state import Activity, Awaited, Goal, WorkerSlot

if TYPE_CHECKING:
    from pearl.core.pipeline import Pipeline


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise AssertionError where the state contradicts itself."""
    check_fleet(pipeline.fleet)
    present = [m for g in pipeline.groups.values() for m in g.members]
    assert pipeline.samples_unfinished == sum(not m.ended for m in present), "a sample is lost or counted twice"
    waiting = {m.sample for m in pipeline.waiting}
    open_attempts = [*pipeline.attempts.values(), *pipeline.suspended]
    live = {a.id.sample for a in open_attempts}
    assert len(waiting) == len(pipeline.waiting) and len(live) == len(open_attempts), "a sample is rolled out twice"
    for member in present:
        states = (member.sample in waiting) + (member.sample in live) + (member.finished is not None)
        assert states == 1 - (member.ended and member.finished is None), f"{member.sample} is in {states} places"
    queued = set(pipeline.queue)
    for attempt in pipeline.attempts.values():
        assert attempt.phase is not Phase.QUEUED or attempt.id in queued, f"{attempt.id} is forgotten"
    for worker in pipeline.fleet.workers.values():
        assert len(worker.in_flight) <= pipeline.settings.requests_per_worker, f"{worker.name} is overloaded"
    for slot in pipeline.environments.values():
        live_here = sum(a.environment_worker == slot.name for a in pipeline.attempts.values())
        assert slot.live == live_here <= slot.capacity, f"{slot.name} counts wrongly"
    check_progress(pipeline)
    if pipeline.training or pipeline.publishing:
        assert pipeline.fleet.gpus.trainer_home, "the trainer works while its GPUs are lent"


def check_progress(pipeline: Pipeline) -> None:
    """Nobody waits for nothing: what could be done next has been asked for."""
    if pipeline.finished:
        return
    s, rollout = pipeline.settings, pipeline.rollout
    heads = (pipeline.attempts[id] for id in sorted(pipeline.queue) if id in pipeline.attempts)
    head = next((attempt for attempt in heads if attempt.phase is Phase.QUEUED), None)
    if head is not None:
        choice = pipeline.fleet.router.choose(head.tokens, head.prefix, head.prefill_prefix)
        assert choice is None, f"{head.id} waits, and {choice} could serve it"
    if (rollout.waiting or rollout.suspended) and len(rollout.attempts) < s.max_concurrent_trajectories:
        room = [e.name for e in pipeline.environments.values() if e.ready and e.live < e.capacity]
        assert not room, f"samples wait, and there is room on {room}"
    assert pipeline.step.restarting is None or pipeline.fleet.gpus.lent, "the trainer is not restarted"
    for worker in pipeline.fleet.workers.values():
        if worker.awaits is None:
            _check_rests(pipeline.fleet, worker)
    for group in pipeline.fleet.groups.values():
        assert group.open or len(group.loaded) < len(group.members), f"group {group.number} is loaded and not opened"


def _check_rests(fleet: Fleet, worker: WorkerSlot) -> None:
    """Of the worker nothing is expected: it is where it is to be, or cannot go there now."""
    what = f"{worker.name} is {worker.activity}, is to be {worker.goal}, and nothing is asked of it"
    may_take = not worker.overlap or fleet.gpus.owner[worker.name] is Owner.NOBODY
    match worker.activity:
        case Activity.EMPTY | Activity.GONE:
            assert worker.goal is not Goal.SERVING or not worker.present or not may_take, what
        case Activity.INACTIVE:
            assert worker.goal is not Goal.SERVING or not may_take, what
        case Activity.ACTIVE:
            assert worker.goal is Goal.SERVING and worker.role is worker.goal_role, what
            assert worker.version == fleet.version, f"{worker.name} serves v{worker.version}"
        case Activity.DRAINING:
            assert not worker.idle, what
        case _:
            group = fleet.groups.get(worker.admission) if worker.admission is not None else None
            assert worker.goal is Goal.SERVING, what
            if group is not None:
                here = group.synced if group.open else group.loaded
                assert fleet.version < 0 or worker.name in here, f"{what}, as group {group.number} knows"
            else:
                assert fleet.version < 0, what


def check_fleet(fleet: Fleet) -> None:
    """One owner per GPU, and the router knows exactly who serves."""
    fleet.workers.validate()
    answering = [t for w in fleet.workers.values() for t in w.in_flight]
    assert len(answering) == len(set(answering)), "one request on two workers"
    for worker in fleet.workers.values():
        name = worker.name
        serves = worker.activity is Activity.ACTIVE
        assert serves == (name in fleet.router.workers), f"the router is wrong about {name}"
        for role, pool in fleet.router.pools.items():
            load = len(worker.prefilling if role is Role.PREFILL else worker.in_flight)
            expected = load if serves and worker.role is role else None
            assert pool.load.get(name) == expected, f"the router counts {name} wrongly"
        assert worker.kv_tokens == sum(worker.in_flight.values()), f"{name} counts its tokens wrongly"
        assert worker.cached_tokens >= 0, f"{name} counts its cache wrongly"
        if worker.goal is Goal.AWAY and worker.running:
            leaves = worker.awaits is Awaited.STOP or worker.activity in (Activity.ACTIVE, Activity.DRAINING)
            assert leaves, f"{name} is {worker.activity} and does not leave"
        if worker.overlap:
            asleep = not worker.running or worker.activity is Activity.INACTIVE
            waking = worker.awaits in (Awaited.RESUME, Awaited.STOP)  # a stop may be sent over a resume
            owns = fleet.gpus.owner[name] is Owner.WORKER
            assert owns or asleep, f"{name} is {worker.activity} without owning its GPUs"
            assert not owns or not asleep or waking, f"{name} is {worker.activity} and owns its GPUs"
        if worker.admission is not None:
            assert name in fleet.groups[worker.admission].members, f"{name} waits for a group that is not there"
    loads = Counter(w.syncing for w in fleet.workers.values() if w.syncing is not None)
    assert fleet.loads == loads, f"{fleet.loads} are counted as being loaded, and {loads} are"
    for group in fleet.groups.values():
        assert group.members and group.loaded <= group.members.keys() >= group.synced, f"group {group.number} is wrong"
        assert not group.open or len(group.synced) < len(group.members), f"group {group.number} was not admitted"
