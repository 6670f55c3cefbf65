"""The driver around actors that hang, break or answer at once (real Dask workers, no engines)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.binding import bind
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.events import Outcome
from pearl.core.trajectory import FinishReason
from pearl.live import actors
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.run_directory import RunDirectory
from tests.live.idle_actors import (
    BrokenTrainer,
    HangingEngine,
    HangingOnceEngine,
    NoEngine,
    NoEnvironment,
    NoTrainer,
    RaisingEnvironment,
)


class Seen:
    """Observer that keeps all."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.notices: list[str] = []

    def saw(self, now: float, entry: Any) -> None:
        self.entries.append(entry)

    def stepped(self, *_: Any) -> None:
        pass

    def ended(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        self.notices.append(text)


async def play(folder: Path, classes: ActorClasses, **sections: dict[str, Any]) -> tuple[ev.FinishRun, Seen]:
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "pipeline": {"steps": 2, "groups_per_batch": 1, "group_size": 2, "worker_restarts": 0},
        "cluster": {"rollout_workers": 1},
        "engine": {"device": "cpu"},
        "checkpoint": {"keep_weights": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = make_config(tree, "test")
    directory, seen = RunDirectory.create(config), Seen()
    driver = Driver(config, folder, 8, bind(config, 0), directory, [seen], classes=classes, validate=True)
    try:
        return await driver.run(), seen
    finally:
        await driver.close(finish_writing=False)
        directory.close()


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_MARGIN_S", 0.0)


async def test_actors_that_answer_at_once_finish_a_run(tmp_path: Path) -> None:
    end, seen = await play(tmp_path, ActorClasses(NoEngine, NoEnvironment, NoTrainer))
    assert (end.failed, end.reason) == (False, "2 steps done")
    assert [e.outcome for e in seen.entries if isinstance(e, ev.EndSample)] == [Outcome.TRAINED] * 4


async def test_an_engine_that_hangs_is_ended_at_its_deadline_by_name(tmp_path: Path) -> None:
    classes = ActorClasses(HangingEngine, NoEnvironment, NoTrainer)
    end, _ = await play(tmp_path, classes, deadlines={"generate_s": 0.5})
    assert end.failed
    assert "rollout-0#1.generate did not answer within 0.5 s" in end.reason


async def test_standing_still_is_reported_with_who_waits_for_whom(tmp_path: Path) -> None:
    classes = ActorClasses(HangingEngine, NoEnvironment, NoTrainer)
    _, seen = await play(tmp_path, classes, deadlines={"generate_s": 4.0, "no_progress_s": 1.0})
    assert any("no progress" in text and "g0.0.0 waits for rollout-0#1.generate" in text for text in seen.notices)


async def test_a_failing_trainer_ends_the_run_with_its_words(tmp_path: Path) -> None:
    end, _ = await play(tmp_path, ActorClasses(NoEngine, NoEnvironment, BrokenTrainer))
    assert end.failed and end.reason == "the trainer failed at step 1: trainer-0#1.train: loss is not finite"


async def test_broken_tasks_fail_are_quarantined_and_end_the_run(tmp_path: Path) -> None:
    classes = ActorClasses(NoEngine, RaisingEnvironment, NoTrainer)
    changes = {"quarantine_after": 1, "sample_attempts": 1}
    end, seen = await play(tmp_path, classes, pipeline=changes)
    assert end.failed and "every task is quarantined" in end.reason
    assert any("quarantined" in text for text in seen.notices)
    reasons = {e.reason for e in seen.entries if isinstance(e, ev.EndSample)}
    assert any("this task has no files" in reason for reason in reasons)


async def test_a_turn_of_a_dead_engine_goes_on_with_the_next_one(tmp_path: Path) -> None:
    classes = ActorClasses(HangingOnceEngine, NoEnvironment, NoTrainer)
    end, seen = await play(tmp_path, classes, deadlines={"generate_s": 0.5}, pipeline={"worker_restarts": 3})
    assert not end.failed, end.reason
    lost = [e for e in seen.entries if isinstance(e, ev.WorkerLost)]
    turns = [e for e in seen.entries if isinstance(e, ev.TurnGenerated) and e.finish is FinishReason.LOST]
    assert len(lost) == 1, "one engine died"
    assert len(turns) == len({t.trajectory for t in turns}) == 4, "each request of both groups is lost once"
    assert seen.entries.index(lost[0]) < seen.entries.index(turns[0])
