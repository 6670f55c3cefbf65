"""Whole runs: real engines, a real trainer, real sandboxes, on the tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from bench.chaos import run_with_kills
from envs.sandbox.folder import default_directory
from pearl.config.load import load_config
from pearl.weights.snapshot import read_manifest

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny.yaml"
RUN_S = 400

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Run:
    """One `pearl train examples/tiny.yaml --json` as a process of its own group."""

    def __init__(self, parent: Path, *overrides: str, folder: Path | None = None) -> None:
        self.folder = folder = folder or parent / f"run-{secrets.token_hex(4)}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pearl.cli", "train", str(TINY), f"run_dir={folder}", *overrides, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=ROOT,
        )

    def finish(self) -> dict[str, Any]:
        self.out, self.err = self.process.communicate(timeout=RUN_S)
        return json.loads(self.out.splitlines()[-1]) if self.out else {}

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def assert_nothing_is_left(self, processes: list[psutil.Process]) -> None:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"processes are left: {[p.cmdline() for p in alive]}"
        files = [
            *Path("/dev/shm").glob(f"pearl-{self.process.pid}-*"),
            *default_directory().glob(f"{self.folder.name}-*"),
        ]
        assert not files, f"files are left: {files}"

    def samples(self) -> list[tuple[Any, ...]]:
        records = msgpack.Unpacker((self.folder / "trajectories.msgpack").open("rb"))
        return [(*r["sample"], r["trajectory"]["task"], r["reason"]) for r in records]

    def wait_for(self, ready: Callable[[str], bool]) -> None:
        """Read the console until a line satisfies `ready`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if ready(line):
                return
        raise AssertionError("the run ended before that")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    run = Run(tmp_path_factory.mktemp("first"), "checkpoint.every_steps=2")
    run.wait_for(lambda line: "1/3" in line)
    processes = run.descendants()
    summary = run.finish()
    run.assert_nothing_is_left(processes)
    return run, summary


def test_a_run_ends_well_and_accounts_for_every_sample(first: tuple[Run, dict[str, Any]]) -> None:
    run, summary = first
    assert run.process.returncode == 0, run.err
    assert summary["engine"].startswith("sglang")
    assert summary["steps"] == summary["weight_version"] == 3
    assert summary["trajectories_completed"] == 24
    assert [summary[f"trajectories_{k}"] for k in ("lost", "failed", "stale", "unfinished")] == [0, 0, 0, 0]
    assert len(summary["reward_by_step"]) == 3
    assert 0 < summary["tokens_generated"] < summary["tokens_trained"]
    assert 0 <= summary["trainer_idle_ratio"] <= 1 and 0 <= summary["rollout_idle_ratio"] <= 1


def test_every_engine_holds_the_trainers_last_weights(first: tuple[Run, dict[str, Any]]) -> None:
    _, summary = first
    trainer = summary["trainer_checksums"]
    assert len(set(trainer.values())) == len(trainer) == 4, "each step changes the weights"
    assert {(e["version"], e["checksum"]) for e in summary["engine_checksums"].values()} == {(3, trainer["3"])}


def test_the_run_directory_is_complete(first: tuple[Run, dict[str, Any]]) -> None:
    run, summary = first
    names = {p.name for p in run.folder.iterdir()}
    assert {"config.yaml", "events.jsonl", "metrics.jsonl", "trajectories.msgpack", "summary.json"} <= names
    kinds = {json.loads(line)["kind"] for line in (run.folder / "events.jsonl").read_text().splitlines()}
    assert {"RunStarted", "Generate", "WeightsSynced", "BatchTrained", "EndSample", "FinishRun"} <= kinds
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert {p.name for p in (run.folder / "checkpoints").glob("step-*")} == {"step-2", "step-3"}
    assert json.loads((run.folder / "summary.json").read_text()) == summary
    assert read_manifest(run.folder / "weights" / "v3").checksum == summary["trainer_checksums"]["3"]


def test_log_probs_of_rollout_and_trainer_agree(first: tuple[Run, dict[str, Any]]) -> None:
    run, _ = first
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    fresh = [s for s in steps if s["staleness_max"] == 0 and s["loss_tokens"]]
    assert fresh, "the first step is trained by the weights that generated it"
    assert all(s["logprob_delta_max"] <= 1e-3 for s in fresh)


def test_one_seed_gives_the_same_samples_in_the_same_order(first: tuple[Run, dict[str, Any]], tmp_path: Path) -> None:
    again = Run(tmp_path)
    again.finish()
    assert again.process.returncode == 0, again.err
    assert again.samples() == first[0].samples()


def test_kills_lose_nothing(tmp_path: Path) -> None:
    config = load_config(TINY, [f"run_dir={tmp_path / 'run'}", "pipeline.steps=100"])
    outcome = asyncio.run(run_with_kills(config, ["engine", "worker"]))
    assert [r["what"] for r in outcome["recoveries"]] == ["engine", "worker"]
    assert 2 <= outcome["summary"]["steps"] < 100, "it ends when both are back"


def test_ctrl_c_ends_cleanly_with_a_summary(tmp_path: Path) -> None:
    run = Run(tmp_path, "pipeline.steps=1000")
    run.wait_for(lambda line: "2/1000" in line)
    processes = run.descendants()
    assert processes
    run.process.send_signal(signal.SIGINT)
    summary = run.finish()
    assert run.process.returncode == 130, run.err
    assert summary["steps"] >= 2 and "SIGINT" in summary["stopped"]
    run.assert_nothing_is_left(processes)


def test_a_run_that_fails_says_why_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "pipeline.steps=1000")
    run.wait_for(lambda line: "trainer ready" in line)
    processes = run.descendants()
    trainer = next(p for p in processes if "trainer-0" in p.cmdline())
    os.kill(trainer.pid, signal.SIGKILL)
    run.finish()
    assert run.process.returncode == 1
    assert run.err.count("trainer-0 is gone") == 1 and "Traceback" not in run.err
    run.assert_nothing_is_left(processes)
