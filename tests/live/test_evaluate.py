"""`pearl eval`: figures from what was played, and one real play of two models on the same held-out tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import torch
import yaml

from envs.sandbox.folder import default_directory
from pearl.config import RunConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId, trajectory_to_wire
from pearl.live.evaluate import InTurn, TaskSet, prepare
from pearl.live.frozen import Subject
from pearl.live.play import Play, report, sentences
from pearl.observe.interval import bootstrap
from pearl.weights.snapshot import config_hash, write_snapshot
from tests.live.test_command import TINY, refused

ROOT = Path(__file__).resolve().parents[2]


def trajectory(task: int, member: int, reward: float) -> Trajectory:
    parts = (Segment(SegmentKind.PROMPT, (1, task)), Segment(SegmentKind.RESPONSE, (7,), (-0.5,), 0))
    return Trajectory(TrajectoryId(task, member, 0), f"t{task}", parts, 1, StopReason.SUBMITTED, reward)


def play(name: str, rewards: list[list[float]], run: Path | None = None) -> Play:
    groups = [[trajectory(task, i, r) for i, r in enumerate(row)] for task, row in enumerate(rewards)]
    return Play.of(Subject(name, Path("model"), run=run), groups, samples=2, checksum="c")


def test_an_interval_is_seeded_holds_the_mean_and_narrows_with_more_values() -> None:
    few, many = bootstrap([0.0, 1.0] * 8, 3), bootstrap([0.0, 1.0] * 200, 3)
    assert few == bootstrap([0.0, 1.0] * 8, 3)
    assert few.low < few.mean == 0.5 < few.high
    # The normal approximation: 1.96 standard errors to each side.
    assert (many.high - many.low) / 2 == pytest.approx(1.96 * 0.5 / 400**0.5, rel=0.1)


def test_the_difference_is_taken_task_by_task() -> None:
    hard_and_easy = [[0.1, 0.1], [0.9, 0.9]] * 10
    better = [[reward + 0.1 for reward in row] for row in hard_and_easy]
    figures = report([play("after", better), play("before", hard_and_easy)], 0)
    assert figures["difference"]["reward"] == pytest.approx({"mean": 0.1, "low": 0.1, "high": 0.1})
    reward = figures["models"][0]["reward"]
    assert reward["high"] - reward["low"] > 0.2
    assert figures["models"][0]["pass_at_1"]["mean"] == 0.5 and figures["models"][1]["pass_at_1"]["mean"] == 0


def test_a_failed_sample_counts_as_nothing_earned() -> None:
    figures = report([play("m", [[1.0], [1.0, 1.0], []])], 0)
    assert figures["models"][0]["reward_by_task"] == [0.5, 1.0, 0.0]


def test_tasks_that_the_run_trained_on_are_left_out(tmp_path: Path) -> None:
    records = [{"sample": [0, 0], "trajectory": t and trajectory_to_wire(t)} for t in (trajectory(1, 0, 1.0), None)]
    (tmp_path / "trajectories.msgpack").write_bytes(b"".join(map(msgpack.packb, records)))
    figures = report([play("run", [[0.2, 0.2], [1.0, 1.0], [0.4, 0.4]], tmp_path)], 0)
    assert (figures["tasks"], figures["met_in_training"], figures["tasks_counted"]) == (3, 1, 2)
    assert figures["models"][0]["reward"]["mean"] == pytest.approx(0.3)


def test_held_out_tasks_follow_the_trained_ones_or_are_of_another_seed() -> None:
    config = RunConfig.model_validate({"environment": {"tasks": 20, "seed": 3}})
    same, other = prepare(config, 5, 1, None, None), prepare(config, 5, 1, 0.0, 9)
    assert (same.environment.seed, same.environment.tasks) == (3, 25)
    assert (other.environment.seed, other.environment.tasks, other.engine.sampling.temperature) == (9, 5, 0.0)
    cursor = InTurn(TaskSet(20, 2, 1))
    assert [cursor.draw() for _ in range(4)] == [20, 21, 20, 21]


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "Give --config" in refused("eval", "tiny-random-llama")
    (tmp_path / "config.yaml").write_text("name: gone\n")
    assert "kept no weights" in refused("eval", str(tmp_path))


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run of examples/tiny.yaml whose weights (version 5) are the model's own, doubled."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        doubled = [(name, 2 * parameter) for name, parameter in model.named_parameters()]
    folder = tmp_path / "run"
    write_snapshot(folder / "weights", 5, config_hash(tiny_model), doubled)
    config: dict[str, Any] = {**yaml.safe_load(TINY.read_text()), "run_root": str(tmp_path / "runs")}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_is_played_against_its_model_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pearl.cli", "eval", str(run), "--against", "tiny-random-llama", "--json"]
    process = subprocess.Popen(
        [*command, "--tasks", "4", "--samples", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None and process.stdout is not None
    processes: list[psutil.Process] = []
    told = []
    for line in process.stderr:
        told.append(line)
        if "playing tiny-random-llama" in line:
            processes = psutil.Process(process.pid).children(recursive=True)
    summary = json.loads(process.stdout.read().splitlines()[-1])
    assert process.wait(60) == 0, "".join(told)
    trained, base = summary["models"]
    assert (trained["version"], base["version"]) == (5, None) and trained["checksum"] != base["checksum"]
    assert (summary["first_task"], summary["tasks"], summary["failed_samples"]) == (16, 4, [])
    assert all(0 < model["generated_tokens"] <= 4 * 2 * 24 for model in summary["models"])
    gap = trained["reward"]["mean"] - base["reward"]["mean"]
    assert summary["difference"]["reward"]["mean"] == pytest.approx(gap, abs=1e-5)
    assert "difference" in sentences(summary)[-1]
    alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert len(processes) > 3 and not alive
    assert not list(Path("/dev/shm").glob(f"pearl-{process.pid}-*"))
    assert not list(default_directory().glob(f"{Path(summary['run_dir']).name}-*"))
