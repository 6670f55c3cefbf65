"""Slots that join and leave, GPUs lent and returned, in the live driver.

Real Dask workers hold actors that answer at once; the last tests have real engines and a real trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import msgpack
import pytest
from rich.console import Console

from bench.chaos import children
from pearl.cluster.binding import Binding, bind
from pearl.cluster.identity import HOST
from pearl.config import RunConfig
from pearl.config.load import load_config, make_config
from pearl.core import events as ev
from pearl.core.layout import Zone
from pearl.core.trajectory import trajectory_from_wire
from pearl.live import slots
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.measured import MemoryMoved, WeightsCopied
from pearl.live.preflight import preflight
from pearl.live.resume import load_resume
from pearl.live.run_directory import RunDirectory
from pearl.live.train import train
from pearl.models import resolve_model
from pearl.observe.elastic import ElasticCounts
from tests.live.idle_actors import (
    DyingJoiner,
    ElasticEngine,
    ElasticTrainer,
    FailingJoiner,
    Insomniac,
    LastingEnvironment,
    ReadingEngine,
    WritingTrainer,
)
from tests.trainer.ranks import RankProcess
from tests.trainer.samples import free_port
from trainer.wire import pack_groups

ROOT = Path(__file__).resolve().parents[2]
Entry = ev.Event | ev.Instruction
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 300,
}  # fmt: skip
"""Of the model that the prior is about."""
LIMIT_S = 120.0
"""A run that did not come to its end by then has failed."""
MANY = 100_000
"""Steps: the test ends the run."""


@dataclass
class Story:
    """Observer: all entries with their times. `plot` sees each and acts; when it returns True the run is ended."""

    plot: Callable[[Driver, Entry], bool | None]
    driver: Driver | None = None
    entries: list[tuple[float, Any]] = field(default_factory=list)
    over: bool = False

    def saw(self, now: float, entry: Entry) -> None:
        self.entries.append((now, entry))
        assert self.driver is not None
        if not self.over and self.plot(self.driver, entry):
            self.over = True
            self.driver.post(ev.StopRequested("the test has seen enough"))

    def stepped(self, *_: Any) -> None: ...
    def ended(self, *_: Any) -> None: ...
    def notice(self, text: str) -> None:
        assert "failed and is switched off" not in text, text

    def all(self, kind: type) -> list[Any]:
        return [entry for _, entry in self.entries if isinstance(entry, kind)]

    def index(self, condition: Callable[[Any], bool]) -> int:
        return next(i for i, (_, entry) in enumerate(self.entries) if condition(entry))

    def operations(self, kind: str) -> list[tuple[str, tuple[str, ...], str]]:
        return [(o.phase, o.workers, o.reason) for o in self.all(ev.RecordOperation) if o.kind == kind]


async def play(
    folder: Path,
    plot: Callable[[Driver, Entry], bool | None],
    engine: type = ElasticEngine,
    *,
    resume: bool = False,
    trainer: type = ElasticTrainer,
    **elastic: Any,
) -> tuple[Story, ElasticCounts]:
    tree = {
        "run_dir": str(folder / "run"),
        "pipeline": {"steps": MANY, "groups_per_batch": 2, "group_size": 4, "max_trajectory_tokens": 1000},
        "cluster": {"rollout_workers": 1, "notices": {"sigterm_grace_s": 20}},
        "environment": {"max_turns": 10},
        "engine": {"device": "cpu"},
        "checkpoint": {"keep_weights": False},
        "elastic": {"join_window_s": 20.0, **elastic},
    }
    config = make_config(tree, "test")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    directory = RunDirectory.reopen(config) if resume else RunDirectory.create(config)
    story, counts = Story(plot), ElasticCounts(config.elastic.return_deadline_s)
    driver = Driver(
        config, folder, 8, bind(config, 0), directory, [counts, story], validate=True,
        classes=ActorClasses(engine, LastingEnvironment, trainer),
        resume=load_resume(directory) if resume else None,
    )  # fmt: skip
    story.driver = driver
    try:
        async with asyncio.timeout(LIMIT_S):
            end = await driver.run()
    finally:
        await driver.close(finish_writing=False)
        directory.close()
        directory._lock_file.close()  # as the end of its process does
    assert story.over, end.reason
    assert not driver.cluster.workers, "workers are left"
    return story, counts


def serves(entry: Entry, slot: str) -> TypeGuard[ev.Generate]:
    return isinstance(entry, ev.Generate) and entry.worker == slot


@pytest.fixture
def asks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "ASK_AGAIN_S", 0.2)


# --- slots that come and go -----------------------------------------------------------------------------------------


async def test_slots_that_join_are_admitted_together_and_serve(tmp_path: Path) -> None:
    seen: set[str] = set()

    def plot(driver: Driver, entry: Entry) -> bool:
        if isinstance(entry, ev.Generate):
            seen.add(entry.worker)
        return len(seen) == 3

    story, counts = await play(tmp_path, plot, policy="elastic", preemptible_slots=2)
    both = {"preemptible-0", "preemptible-1"}
    admitted = [workers for phase, workers, _ in story.operations("expand") if phase == "admitted"]
    assert [set(workers) for workers in admitted] == [both]
    first = story.index(lambda e: isinstance(e, ev.Generate) and e.worker in both)
    assert first > story.index(lambda e: isinstance(e, ev.RecordOperation) and e.phase == "admitted")
    assert counts.summary()["joins"] == 2 and counts.summary()["prep_s"] is not None


async def test_a_slot_with_notice_is_drained_and_given_back_within_it(tmp_path: Path) -> None:
    told = False

    def plot(driver: Driver, entry: Entry) -> bool:
        nonlocal told
        if serves(entry, "preemptible-0") and not told:
            told = True
            driver.cluster.terminate("preemptible-0")
        return isinstance(entry, ev.SlotLost)

    story, counts = await play(tmp_path, plot, policy="elastic", preemptible_slots=1)
    (notice,) = story.all(ev.SlotNotice)
    (lost,) = story.all(ev.SlotLost)
    assert (lost.worker, lost.reason) == ("preemptible-0", "given back")
    phases = [phase for phase, _, _ in story.operations("shrink")]
    assert phases == ["began", "done"]
    at = {type(entry): now for now, entry in story.entries if isinstance(entry, ev.SlotNotice | ev.SlotLost)}
    assert at[ev.SlotLost] - at[ev.SlotNotice] < notice.seconds_left
    after = story.index(lambda e: isinstance(e, ev.SlotNotice))
    assert not any(serves(entry, "preemptible-0") for _, entry in story.entries[after:])
    assert (counts.counts["leaves"], counts.counts["kills"]) == (1, 0)


@pytest.mark.usefixtures("asks_again_soon")
async def test_a_slot_that_left_on_notice_comes_back_in_another_life(tmp_path: Path) -> None:
    told = False

    def plot(driver: Driver, entry: Entry) -> bool:
        nonlocal told
        if serves(entry, "preemptible-0") and not told:
            told = True
            driver.cluster.terminate("preemptible-0")
        return serves(entry, "preemptible-0") and driver.pipeline.fleet.workers["preemptible-0"].life == 2

    story, _ = await play(tmp_path, plot, policy="elastic", preemptible_slots=1)
    assert [joined.life for joined in story.all(ev.SlotJoined)] == [1, 2]
    assert [lost.reason for lost in story.all(ev.SlotLost)][:1] == ["given back"]


@pytest.mark.usefixtures("asks_again_soon")
async def test_a_killed_slot_costs_no_sample_and_comes_back_in_another_life(tmp_path: Path) -> None:
    killed = False

    def plot(driver: Driver, entry: Entry) -> bool:
        nonlocal killed
        if serves(entry, "preemptible-0") and not killed:
            killed = True
            os.killpg(driver.cluster.workers["preemptible-0"].process.pid, signal.SIGKILL)
        lives = {worker.life for worker in driver.pipeline.fleet.workers.values() if worker.name == "preemptible-0"}
        return serves(entry, "preemptible-0") and lives == {2}

    story, counts = await play(tmp_path, plot, policy="elastic", preemptible_slots=1)
    assert [joined.life for joined in story.all(ev.SlotJoined)] == [1, 2]
    assert not story.all(ev.WorkerLost), "the loss of the slot says it all"
    lost = {e.trajectory for e in story.all(ev.TurnGenerated) if e.finish == "lost"}
    assert lost, "a request was on its way"
    gone = story.index(lambda e: isinstance(e, ev.SlotLost))
    again = {e.trajectory for _, e in story.entries[gone:] if isinstance(e, ev.Generate)}
    assert lost <= again
    assert not [e for e in story.all(ev.EndSample) if e.outcome != ev.Outcome.TRAINED]
    assert counts.counts["kills"] == 1


async def test_an_engine_that_died_starts_again_in_the_process_of_its_slot(tmp_path: Path) -> None:
    def plot(driver: Driver, entry: Entry) -> bool:
        return serves(entry, "preemptible-0") and entry.incarnation == 3

    story, _ = await play(tmp_path, plot, DyingJoiner, policy="elastic", preemptible_slots=1)
    first, second = story.all(ev.WorkerLost)
    assert (first.worker, first.reason) == ("preemptible-0", "the engine died")
    assert second.worker == "preemptible-0" and "the engine died before" in second.reason
    assert not story.all(ev.SlotLost) and len(story.all(ev.SlotJoined)) == 1


async def test_a_joiner_that_fails_cancels_the_expansion_and_the_others_form_another_one(tmp_path: Path) -> None:
    seen: set[str] = set()
    joined: set[str] = set()

    def plot(driver: Driver, entry: Entry) -> bool:
        if isinstance(entry, ev.StartEngine):
            joined.add(entry.worker)
        if {"preemptible-0", "preemptible-1"} <= joined:
            (tmp_path / "run" / "both").touch()
        if isinstance(entry, ev.Generate):
            seen.add(entry.worker)
        return len(seen) == 3

    story, counts = await play(tmp_path, plot, FailingJoiner, policy="elastic", preemptible_slots=2)
    expand = story.operations("expand")
    (reason,) = [reason for phase, _, reason in expand if phase == "cancelled"]
    assert "preemptible-1" in reason and "its memory is full" in reason
    assert ("began", ("preemptible-0",), "regrouped") in expand
    admitted = [workers for phase, workers, _ in expand if phase == "admitted"]
    assert sorted(admitted) == [("preemptible-0",), ("preemptible-1",)], "each by itself, whoever is ready first"
    assert counts.counts["expansions_cancelled"] == 1


async def test_a_trace_begins_when_the_trainer_is_ready_and_says_how_many_slots_there_are(tmp_path: Path) -> None:
    """What it does to them then is in tests/cluster/test_local_adapter.py."""
    trace = tmp_path / "trace.json"
    trace.write_text('{"events": [[0, 1]]}')

    def plot(driver: Driver, entry: Entry) -> bool:
        return serves(entry, "preemptible-0")

    story, counts = await play(
        tmp_path, plot, policy="elastic", preemptible_slots=2, availability={"file": str(trace)}
    )  # fmt: skip
    assert story.index(lambda e: isinstance(e, ev.TrainerReady)) < story.index(lambda e: isinstance(e, ev.SlotJoined))
    assert counts.counts["joins"] == 1


async def test_slots_of_another_host_share_one_copy_of_each_version_until_it_is_retired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preemptible slots call themselves another host, and have a folder of their own."""
    named = Binding.environment

    def environment(binding: Binding) -> dict[str, str]:
        other = {HOST: "another-host"} if binding.zone == Zone.PREEMPTIBLE else {}
        return {**named(binding), **other}

    monkeypatch.setattr(Binding, "environment", environment)
    folders: list[tuple[int, Path]] = []
    kept: list[set[str]] = []

    def plot(driver: Driver, entry: Entry) -> bool:
        if isinstance(entry, ev.WeightsSynced) and entry.worker.startswith("preemptible"):
            folders.append((entry.version, Path(driver.rollout.checksums[entry.worker][1])))
            kept.append({path.name for path in folders[-1][1].parent.glob("v*")})
        return len({version for version, _ in folders}) == 4 and len(folders) == 8

    story, _ = await play(
        tmp_path, plot, ReadingEngine, trainer=WritingTrainer, policy="elastic", preemptible_slots=2
    )  # fmt: skip
    assert all(path.name == f"v{version}" and "pearl-copy-another-host" in str(path) for version, path in folders)
    copied = story.all(WeightsCopied)
    assert [c.version for c in copied] == sorted({c.version for c in copied}), "one copy of each version"
    assert {source for c in copied for source in c.bytes_from} <= {"rollout-0", "environment-0", "trainer-0"}
    assert max(len(names) for names in kept) <= 3, "old versions go"
    assert not any(path.exists() for _, path in folders), "the run is over"


async def test_a_resumed_run_goes_on_in_the_middle_of_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('{"events": [[0, 1], [100000, 0]]}')
    played = {"file": str(trace), "scale": 0.01, "notice_s": 1000.0}
    elastic: dict[str, Any] = {"policy": "elastic", "preemptible_slots": 1, "availability": played}
    reached = []

    def plot(driver: Driver, entry: Entry) -> bool:
        done = serves(entry, "preemptible-0") and driver.pipeline.steps_done > 0
        if done:
            reached.append(driver.slots.follower.seconds)  # type: ignore[union-attr]
        return done

    await play(tmp_path, plot, **elastic)
    journaled = load_resume(RunDirectory(tmp_path / "run")).replay.trace_s
    assert 0 < journaled <= reached[0]
    story, _ = await play(tmp_path, plot, resume=True, **elastic)
    first = next(now for now, entry in story.entries if isinstance(entry, ev.TrainerReady))
    lasted = (next(now for now, entry in story.entries if serves(entry, "preemptible-0")) - first) / 0.01
    assert reached[1] > lasted + journaled / 2, "it begins a moment after that event"
    assert [joined.life for joined in story.all(ev.SlotJoined)] == [1]


# --- GPUs that are lent ---------------------------------------------------------------------------------------------


async def test_training_gpus_are_lent_and_returned_again_and_again_while_training_goes_on(tmp_path: Path) -> None:
    def plot(driver: Driver, entry: Entry) -> bool:
        return isinstance(entry, ev.BatchTrained) and entry.step == 6

    story, counts = await play(tmp_path, plot, policy="elastic-borrow", overlap_slots=1)
    assert counts.counts["borrows"] >= 3 and counts.counts["returns"] >= 3
    assert counts.counts["return_deadline_misses"] == 0
    assert [i.incarnation for i in story.all(ev.ResumeEngine)] == [1] * len(story.all(ev.ResumeEngine)), "one process"
    assert not [i for i in story.all(ev.StartEngine) if i.worker == "overlap-0"], "it was started before the trainer"
    assert any(serves(entry, "overlap-0") for _, entry in story.entries)
    moved = [(m.what, m.who) for m in story.all(MemoryMoved)]
    assert moved[0] == ("release", "overlap-0") and ("offload", "trainer-0") in moved


async def test_an_engine_that_does_not_let_go_is_killed_at_the_deadline_and_lent_to_again(tmp_path: Path) -> None:
    def plot(driver: Driver, entry: Entry) -> bool:
        return serves(entry, "overlap-0") and entry.incarnation == 2

    story, counts = await play(
        tmp_path, plot, Insomniac, policy="elastic-borrow", overlap_slots=1, return_deadline_s=10.0,
        preparation_prior_s=1.0,
    )  # fmt: skip
    assert "forced" in [phase for phase, _, _ in story.operations("return")]
    (lost,) = story.all(ev.WorkerLost)
    assert lost.worker == "overlap-0" and "the deadline has passed" in lost.reason
    assert counts.counts["return_deadline_misses"] == 0, "killed in time"


# --- real engines ---------------------------------------------------------------------------------------------------


def train_again(config: RunConfig, run: Path, batches: list[ev.TrainBatch]) -> tuple[list[float], list[str]]:
    """Losses, and checksums of the weights, of a trainer that has its GPU for itself, on the batches of a run."""
    with (run / "trajectories.msgpack").open("rb") as file:
        records = [r["trajectory"] for r in msgpack.Unpacker(file) if r["trajectory"] is not None]
    trajectories = {t.id: t for t in map(trajectory_from_wire, records)}
    curve, weights, packed = [], [], run / "batch.msgpack"
    with RankProcess() as rank:
        rank.call(
            "start", config.trainer.model_dump(mode="json"), str(resolve_model(config.model.path)), config.model.dtype,
            0, 1, "127.0.0.1", free_port(), config.seed, config.pipeline.steps, config.engine.sampling.temperature,
            LIMIT_S,
        )  # fmt: skip
        for batch in batches:
            packed.write_bytes(pack_groups([[trajectories[t] for t in group] for group in batch.groups]))
            curve.append(rank.call("train_packed", batch.step, str(packed))["loss"])
            weights.append(rank.call("checksum"))
    return curve, weights


@pytest.mark.engine
@pytest.mark.slow
async def test_real_engines_join_are_taken_and_borrow_while_a_real_trainer_trains(tmp_path: Path) -> None:
    """The preemptible slot is told to go once it and the borrowed one have served. A trainer that lends nothing has the
    same losses and the same weights on the same trajectories, bit for bit."""
    overrides = [
        f"run_dir={tmp_path / 'run'}", "name=real", f"pipeline.steps={MANY}", "elastic.preemptible_slots=1",
        "elastic.policy=elastic-borrow", "elastic.availability.file=null", "environment.family=letters",
        "environment.max_turns=1", "cluster.notices.sigterm_grace_s=60",
    ]  # fmt: skip
    config = load_config(ROOT / "examples" / "elastic.yaml", overrides)
    served: set[str] = set()

    def plot(driver: Driver, entry: Entry) -> bool:
        if isinstance(entry, ev.TurnGenerated) and entry.tokens:
            served.add(entry.worker)
        if {"preemptible-0", "overlap-0"} <= served and "told" not in served:
            served.add("told")  # a second SIGTERM would end it at once
            driver.cluster.terminate("preemptible-0")
        returns = [o for o in story.all(ev.RecordOperation) if (o.kind, o.phase) == ("return", "done")]
        return bool(story.all(ev.SlotLost)) and len(returns) >= 2 and isinstance(entry, ev.SnapshotPublished)

    story, before = Story(plot), {process.pid for process in children()}
    result = await train(config, await preflight(config), Console(stderr=True), validate=True, watch=story)
    assert story.over and result.failure is None, result.failure
    counts, steps = result.summary["elastic"], result.summary["weight_version"]
    assert (counts["leaves"], counts["kills"], counts["return_deadline_misses"]) == (1, 0, 0)
    assert counts["joins"] in (1, 2), "it is asked for again some seconds after it left"
    assert counts["borrows"] >= 1 and counts["returns"] >= 2 and steps >= 2, "a step was trained after each return"
    trainer = set(result.summary["trainer_checksums"].items())
    assert {(str(e["version"]), e["checksum"]) for e in result.summary["engine_checksums"].values()} <= trainer
    released = [m.measured for m in story.all(MemoryMoved) if m.what == "release"]
    assert released and all(m["freed_bytes"] >= 0.9 * m["named_bytes"] for m in released)
    assert not [process for process in children() if process.pid not in before], "processes are left"
    curve, weights = train_again(config, tmp_path / "run", story.all(ev.TrainBatch)[:steps])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert curve == [row["loss"] for row in rows][:steps], "borrowing changed the losses"
    assert weights == [result.summary["trainer_checksums"][str(step)] for step in range(1, steps + 1)]
    assert not list(Path("/dev/shm").glob(f"pearl-{os.getpid()}-*-run")), "snapshots are left"
