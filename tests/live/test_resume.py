"""Runs that are killed and go on: the driver, a trainer rank (real engines, trainers and sandboxes)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from pearl.config.changes import changed_keys, refuse_changes
from pearl.config.load import make_config
from pearl.core.restore import Replay
from pearl.errors import UserError
from pearl.live.journal import HEADER, Journal, read_journal
from tests.live.test_command import TINY, refused
from tests.live.test_train import Run


def rows(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def assert_nothing_lost_or_repeated(run: Run, steps: int) -> None:
    replay = Replay().read(read_journal(run.folder / "journal.bin"))
    assert all(m.ended for g in replay.groups.values() for m in g.members), "a sample is lost"
    assert sorted(replay.trained) == list(range(1, steps + 1))
    numbers = [number for groups in replay.trained.values() for number in groups]
    assert len(numbers) == len(set(numbers)), "a group was trained twice"


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_driver_resumes_with_the_same_next_loss(tmp_path: Path) -> None:
    settings = ("pipeline.steps=5", "checkpoint.every_steps=2")
    first = Run(tmp_path, *settings)
    first.wait_for(lambda line: "3/5" in line)  # trained and told, not in a checkpoint
    processes = first.descendants()
    first.process.kill()
    first.process.communicate()
    psutil.wait_procs(processes, timeout=20)
    checkpoints = first.folder / "checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-4")  # as if written, and not told when the driver died
    again = Run(tmp_path, *settings, "--resume", folder=first.folder)
    summary = again.finish()
    again.assert_nothing_is_left(processes)
    assert again.process.returncode == 0, again.err
    assert summary["steps"] == 5 and summary["trajectories_completed"] == 40 and summary["trajectories_lost"] == 0
    assert_nothing_lost_or_repeated(again, 5)
    third = [row for row in rows(again) if row["step"] == 3]
    assert len(third) == 2 and third[0]["loss"] == third[1]["loss"] and third[0]["grad_norm"] == third[1]["grad_norm"]
    assert third[1]["weight_version"] > third[0]["weight_version"], "a version is never used again"


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_trainer_rank_is_replaced_from_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, "pipeline.steps=5", "checkpoint.every_steps=2", "trainer.ranks=2")
    run.wait_for(lambda line: "3/5" in line)
    rank = next(p for p in run.descendants() if "trainer-1" in p.cmdline())
    os.kill(rank.pid, signal.SIGKILL)
    processes = run.descendants()
    summary = run.finish()
    run.assert_nothing_is_left(processes)
    assert run.process.returncode == 0, run.err
    assert run.err.count("trainer-1 is gone") == 1, "the cause is told once"
    assert summary["steps"] == 5 and summary["trajectories_lost"] == 0
    assert_nothing_lost_or_repeated(run, 5)


@pytest.mark.engine
@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    settings = ("pipeline.steps=4", "checkpoint.every_steps=2")
    first = Run(tmp_path, *settings, "trainer.ranks=2")
    first.wait_for(lambda line: "3/4" in line)
    first.process.send_signal(signal.SIGINT)
    first.process.communicate(timeout=60)
    again = Run(tmp_path, *settings, "trainer.ranks=1", "--resume", folder=first.folder)
    summary = again.finish()
    assert again.process.returncode == 0, again.err
    assert summary["steps"] == 4 and summary["trajectories_lost"] == 0
    assert_nothing_lost_or_repeated(again, 4)
    third = [row["loss"] for row in rows(again) if row["step"] == 3]
    assert len(third) == 2 and third[0] == pytest.approx(third[1], rel=1e-4, abs=1e-7)


def tokens(run: Run) -> dict[tuple[int, int], list[int]]:
    """Token ids of every trained trajectory, by sample."""
    with (run.folder / "trajectories.msgpack").open("rb") as file:
        records = [r for r in msgpack.Unpacker(file) if r["outcome"] == "trained"]
    return {tuple(r["sample"]): [t for s in r["trajectory"]["segments"] for t in s["token_ids"]] for r in records}


@pytest.mark.engine
@pytest.mark.slow
def test_interrupted_and_resumed_trajectories_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Greedy, fp32, weights that stay: engine and driver die in mid-turn, and not a token differs."""
    settings = (
        "pipeline.steps=3", "checkpoint.every_steps=1", "engine.sampling.top_k=1", "trainer.learning_rate=0.0",
        "environment.family=files", "environment.max_turns=3", "pipeline.max_response_tokens=48",
        "pipeline.max_trajectory_tokens=900",
    )  # fmt: skip
    undisturbed = Run(tmp_path, *settings)
    assert undisturbed.finish()["steps"] == 3
    disturbed = Run(tmp_path, *settings)
    disturbed.wait_for(lambda line: "engine rollout-0 ready" in line)
    engine = next(p for p in disturbed.descendants() if "sglang" in " ".join(p.cmdline()))
    os.kill(engine.pid, signal.SIGKILL)
    disturbed.wait_for(lambda line: "1/3" in line)
    processes = disturbed.descendants()
    disturbed.process.kill()
    disturbed.process.communicate()
    psutil.wait_procs(processes, timeout=20)
    resumed = Run(tmp_path, *settings, "--resume", folder=disturbed.folder)
    assert resumed.finish()["steps"] == 3, resumed.err
    before, after = tokens(undisturbed), tokens(resumed)
    assert len(before) >= 20 and before == after


def test_resume_needs_a_run(tmp_path: Path) -> None:
    assert "no run at" in refused("train", str(TINY), f"run_dir={tmp_path}", "--resume")


def test_a_torn_tail_of_the_journal_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    journal = Journal(path)
    journal.write("checkpoint", step=2)
    journal.write("checkpoint", step=4)
    journal.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [r["step"] for r in read_journal(path, repair=True)] == [2]
        journal = Journal(path)
        journal.write("checkpoint", step=6)
        journal.close()
        assert [r["step"] for r in read_journal(path)] == [2, 6]
    flipped = bytearray(whole)
    flipped[len(whole) // 2 + HEADER.size + 3] ^= 1
    path.write_bytes(flipped)
    assert [r["step"] for r in read_journal(path)] == [2]


def test_only_harmless_changes_are_taken() -> None:
    def dump(**changes: Any) -> dict[str, Any]:
        return make_config(changes, "test").model_dump(mode="json")

    base = dump()
    refuse_changes(base, dump(deadlines={"generate_s": 1}, cluster={"rollout_workers": 7}, pipeline={"steps": 9}))
    for changes in ({"seed": 3}, {"pipeline": {"group_size": 8}}, {"trainer": {"learning_rate": 1.0}}):
        (key,) = changed_keys(base, dump(**changes))
        with pytest.raises(UserError, match=key.replace(".", r"\.")):
            refuse_changes(base, dump(**changes))
    falling = {"schedule": {"kind": "linear"}}
    with pytest.raises(UserError, match=r"pipeline\.steps"):
        refuse_changes(dump(trainer=falling), dump(trainer=falling, pipeline={"steps": 9}))
