"""What must hold in the Pipeline machine after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.core.groups import Phase

if TYPE_CHECKING:
    from pearl.core.pipeline import Pipeline


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise AssertionError where the state contradicts itself."""
    pipeline.fleet.workers.validate()
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
    generating = {t for w in pipeline.fleet.workers.values() for t in w.in_flight}
    for attempt in pipeline.attempts.values():
        assert attempt.phase is not Phase.QUEUED or attempt.id in queued, f"{attempt.id} is forgotten"
    for worker in pipeline.fleet.workers.values():
        assert len(worker.in_flight) <= pipeline.settings.requests_per_worker, f"{worker.name} is overloaded"
    assert sum(len(w.in_flight) for w in pipeline.fleet.workers.values()) == len(generating), (
        "one request on two workers"
    )
    for slot in pipeline.environments.values():
        live_here = sum(a.environment_worker == slot.name for a in pipeline.attempts.values())
        assert slot.live == live_here <= max(slot.capacity, live_here), f"{slot.name} counts wrongly"
