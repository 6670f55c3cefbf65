"""Public faults of this field, replayed on the real driver and Dask cluster with actors that do what went wrong.

Each docstring says what happened there, then what PEARL must do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.binding import bind
from pearl.config import RunConfig
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.events import Outcome
from pearl.core.trajectory import SampleId, SegmentKind, Trajectory
from pearl.live import actors
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.resume import load_resume
from pearl.live.run_directory import RunDirectory
from tests.faults.troubled_actors import (
    PUBLISHED,
    BreaksOneMember,
    Checkpoints,
    Dies,
    LastsUntilNewWeights,
    NeverTrains,
    RefusesWeights,
    StandsStillInItsFirstLife,
)
from tests.live.hanging_actors import Willing

STALLED_S = 20.0
"""`no_progress_s`: a run whose protection is gone ends by the watchdog, and the test fails."""
RUN_S = 90.0
"""A run that goes on without end fails its test."""


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_MARGIN_S", 0.0)


class Watched:
    """One life of a run, and all that it showed."""

    def __init__(self, folder: Path, rollout: type, other: type = Willing, **sections: dict[str, Any]) -> None:
        self.folder, self.classes = folder, ActorClasses(rollout, other, other)
        tree: dict[str, Any] = {
            "run_dir": str(folder / "run"),
            "pipeline": {"steps": 2, "groups_per_batch": 1, "group_size": 2},
            "cluster": {"rollout_workers": 1},
            "engine": {"device": "cpu"},
            "checkpoint": {"keep_weights": False},
            "deadlines": {"no_progress_s": STALLED_S},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        self.config: RunConfig = make_config(tree, "test")
        self.entries: list[Any] = []
        self.notices: list[str] = []
        self.trained: list[tuple[dict[str, float], list[Trajectory]]] = []
        self.when: Callable[[Watched, Any], None] = lambda *_: None

    def saw(self, now: float, entry: Any) -> None:
        self.entries.append(entry)
        self.when(self, entry)

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        self.trained.append((metrics, trajectories))

    def ended(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def of(self, kind: type) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def stop(self) -> None:
        self.driver.post(ev.StopRequested("the driver is killed"))

    async def play(self, *, resume: bool = False) -> ev.FinishRun:
        config = self.config
        directory = RunDirectory.reopen(config) if resume else RunDirectory.create(config)
        start = load_resume(directory) if resume else None
        bindings = bind(config, 0)
        self.driver = Driver(
            config, self.folder, 8, bindings, directory, [self], classes=self.classes, validate=True, resume=start
        )
        try:
            async with asyncio.timeout(RUN_S):
                return await self.driver.run()
        finally:
            await self.driver.close(finish_writing=False)
            directory.close()
            directory._lock_file.close()


async def test_nemo_rl_3488_collectors_that_all_died_end_the_run(tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#3488: the trainer polled an empty buffer for hours after every collector had died.

    PEARL restarts a collector `worker_restarts` times, then ends the run with the last one's cause.
    """
    run = Watched(tmp_path, Dies, pipeline={"worker_restarts": 1})
    end = await run.play()
    assert end.failed and "no rollout worker is left; the last one, rollout-0" in end.reason
    assert "exit code 3" in end.reason
    assert len(run.of(ev.WorkerLost)) == 2 and not run.of(ev.TrainBatch)


async def test_verl_7180_alive_without_progress_is_a_loss(tmp_path: Path) -> None:
    """verl-project/verl#7180: a run hung after a random number of steps while every actor was listed as ALIVE.

    In PEARL only answers count: a request that misses its deadline ends its worker, alive or not, and the turn goes on
    in the next life; meanwhile the console says who waits for whom.
    """
    deadlines = {"generate_s": 3.0, "no_progress_s": 0.5}
    run = Watched(tmp_path, StandsStillInItsFirstLife, deadlines=deadlines)
    end = await run.play()
    assert not end.failed, end.reason
    (lost,) = run.of(ev.WorkerLost)
    assert "did not answer within 3 s" in lost.reason, "not because it died"
    assert any("g0.0.0 waits for rollout-0#1.generate" in text for text in run.notices)


@pytest.mark.parametrize("option", ["finish", "abort"])
async def test_slime_2092_letting_requests_finish_means_one_version_per_turn(tmp_path: Path, option: str) -> None:
    """THUDM/slime PR#2092: with partial rollout switched off, samples still mixed tokens of several weight versions.

    PEARL's `on_weight_update: finish` aborts nothing, and each turn is of one version; `abort` (the default) may mix
    versions in a turn, and then every token says its own.
    """

    def publish(run: Watched, entry: Any) -> None:
        if option == "finish" and isinstance(entry, ev.SnapshotPublished):
            (run.driver.directory.path / PUBLISHED).touch()

    run = Watched(tmp_path, LastsUntilNewWeights, pipeline={"on_weight_update": option})
    run.when = publish
    end = await run.play()
    assert not end.failed, end.reason
    second = {
        tuple((s.version, len(s.token_ids)) for s in t.segments if s.kind is SegmentKind.RESPONSE)
        for _, trajectories in run.trained[1:]
        for t in trajectories
    }
    if option == "finish":
        assert not run.of(ev.AbortRequests)
        assert second == {((0, 4),)}
    else:
        assert run.of(ev.AbortRequests)
        assert second == {((0, 2), (1, 4))}


async def test_trl_6797_an_error_of_the_weight_update_reaches_the_user(tmp_path: Path) -> None:
    """huggingface/trl#6797: the HTTP error of a weight update was thrown away, and the broadcast waited for ever.

    PEARL loses the worker with that very error as the cause (`test_engine.py` has the waiting itself).
    """
    run = Watched(tmp_path, RefusesWeights, pipeline={"worker_restarts": 0})
    end = await run.play()
    assert end.failed and "weights of version 0: rollout-0#1.sync: /update_weights_from_tensor" in end.reason
    assert "status 500, out of memory" in end.reason
    assert not run.of(ev.Generate)


async def test_openrlhf_1322_buffered_rollouts_survive_a_resume(tmp_path: Path) -> None:
    """OpenRLHF#1322: finished rollouts that waited in the buffer were dropped when a run was resumed.

    PEARL trains exactly those, and generates none of them again.
    """

    def when_buffered(run: Watched, entry: Any) -> None:
        if len(run.of(ev.TrajectoryScored)) == 4 and isinstance(entry, ev.TrajectoryScored):
            run.stop()

    first = Watched(tmp_path, Willing, NeverTrains)
    first.when = when_buffered
    await first.play()
    buffered = {event.trajectory for event in first.of(ev.TrajectoryScored)}
    again = Watched(tmp_path, Willing)
    end = await again.play(resume=True)
    assert not end.failed, end.reason
    assert {t.id for _, trajectories in again.trained for t in trajectories} == buffered
    assert not again.of(ev.Generate) and not again.of(ev.DrawGroup)


async def test_cosmos_rl_503_a_resumed_run_goes_on_as_a_newer_version(tmp_path: Path) -> None:
    """nvidia-cosmos/cosmos-rl PR#503: after a resume the weights were version 0 again, and rollouts were starved.

    PEARL publishes the checkpoint as a version that was never used, and counts staleness in steps, so rollout goes on
    at once.
    """

    def after_two(run: Watched, entry: Any) -> None:
        if isinstance(entry, ev.CheckpointWritten) and entry.step == 2:
            run.stop()

    # Of the last two steps nothing can have been generated when the first run stops.
    settings = {"checkpoint": {"every_steps": 1, "keep": 9}, "pipeline": {"steps": 6}}
    first = Watched(tmp_path, Willing, Checkpoints, **settings)
    first.when = after_two
    await first.play()
    used = {event.version for event in first.of(ev.SnapshotPublished)} | {0}
    again = Watched(tmp_path, Willing, Checkpoints, **settings)
    end = await again.play(resume=True)
    assert not end.failed, end.reason
    (ready,) = again.of(ev.TrainerReady)
    assert ready.step == 2 and ready.version > max(used)
    assert {i.version for i in again.of(ev.Generate)} and min(i.version for i in again.of(ev.Generate)) >= ready.version
    assert [event.step for event in again.of(ev.BatchTrained)] == [3, 4, 5, 6]


async def test_agentcore_122_a_failed_rollout_is_no_sample(tmp_path: Path) -> None:
    """awslabs/agentcore-rl-toolkit PR#122: a failed rollout was padded to a sample of one token and trained on.

    PEARL ends it as failed, without a trajectory; the trainer gets the other members only.
    """
    settings = {"steps": 1, "group_size": 3, "sample_attempts": 1, "min_group_size": 2}
    run = Watched(tmp_path, Willing, BreaksOneMember, pipeline=settings)
    end = await run.play()
    assert not end.failed, end.reason
    (failed,) = [e for e in run.of(ev.EndSample) if e.outcome is Outcome.FAILED]
    assert (failed.sample, failed.trajectory) == (SampleId(0, 2), None)
    ((metrics, trajectories),) = run.trained
    assert (metrics["trajectories"], metrics["shortest"]) == (2.0, 4.0)
    assert {t.id.member for t in trajectories} == {0, 1}
