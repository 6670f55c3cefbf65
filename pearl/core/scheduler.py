"""Both schedulers over one table of workers: the whole control plane of a run, as one machine."""

from __future__ import annotations

from pearl.core.elastic import Elastic
from pearl.core.events import Event, Instruction
from pearl.core.pipeline import Pipeline


class Scheduler:
    """`handle(event, now) -> [instruction]`; `elastic` was made for `pipeline`."""

    def __init__(self, pipeline: Pipeline, elastic: Elastic) -> None:
        self.pipeline, self.elastic = pipeline, elastic

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (seconds, monotone) and return what to do, in order.

        First everybody takes in what happened, then training and elasticity say what is wanted of the workers, and only
        then turns are dispatched: to those of whom nothing else is wanted.
        """
        pipeline, elastic = self.pipeline, self.elastic
        if pipeline.finished:
            return []
        tracker = elastic.tracker
        if tracker is not None:
            tracker.observe(event, now)
        pipeline.absorb(event, now)
        if not pipeline.finished:
            elastic.absorb(event, now)
        pipeline.train()
        if not pipeline.finished:
            elastic.follow(now)
        pipeline.roll_out()
        out = pipeline.taken()
        if tracker is not None:
            for instruction in out:
                tracker.observe(instruction, now)
        return out

    def validate(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self.pipeline.validate()
        self.elastic.validate()
