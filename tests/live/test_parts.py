"""The driver's parts without actors: waits, tokens, utilisation, the log, run directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.events import Outcome
from pearl.core.trajectory import FinishReason, SampleId, SegmentKind, StopReason, TrajectoryId, trajectory_from_wire
from pearl.errors import UserError
from pearl.live import run_directory
from pearl.live.preflight import model_size, plan_memory
from pearl.live.run_directory import RunDirectory, sweep_shared_memory
from pearl.live.tokens import LiveTrajectory
from pearl.live.waits import WaitTable
from pearl.models import resolve_model
from pearl.observe.event_log import EventLog
from pearl.observe.utilisation import Utilisation

ID = TrajectoryId(0, 0, 0)


def test_a_wait_names_waiter_awaited_and_deadline() -> None:
    waits = WaitTable()
    with waits.open("g0.0.0", "rollout-1#1.generate", 60), waits.open("driver", "trainer-0#1.train", -5):
        first, second = waits.oldest()
        assert first == "g0.0.0 waits for rollout-1#1.generate since 0 s (60 s left)"
        assert "5 s overdue" in second
        assert waits.any_in_time()
    assert waits.oldest() == [] and not waits.any_in_time()


def test_a_turn_that_was_interrupted_is_one_response_in_segments() -> None:
    live = LiveTrajectory(ID, "t")
    live.add_context(SegmentKind.PROMPT, [1, 2])
    live.add_response([3], [-0.1], [(0, 1)])
    live.add_response([], [], [])
    live.add_response([4, 5, 6], [-0.2, -0.3, -0.4], [(0, 1), (1, 2)])
    assert live.response_ids == [3, 4, 5, 6]
    live.add_context(SegmentKind.OBSERVATION, [7])
    assert live.response_ids == [] and live.token_ids == [1, 2, 3, 4, 5, 6, 7]
    done = live.finish(1, StopReason.SUBMITTED, 1.0)
    assert done.token_ids == live.token_ids and done.versions == (0, 0, 1) and done.generated_tokens == 4


def test_tokens_without_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs"):
        LiveTrajectory(ID, "t").add_response([1, 2], [-0.1], [(0, 2)])


def test_idle_ratios_follow_from_the_stream_alone() -> None:
    use = Utilisation()
    use.saw(0.0, ev.RunStarted(("a", "b"), ()))
    use.saw(10.0, ev.Generate(ID, "a", 1, 0, 8))
    use.saw(12.0, ev.TurnGenerated(ID, "a", 1, 8, 0, FinishReason.STOP))
    use.saw(12.0, ev.TrainBatch(1, ()))
    use.saw(15.0, ev.BatchTrained(1))
    use.saw(20.0, ev.StopRequested(""))
    assert use.window_s == 10.0
    assert use.trainer_idle_ratio == pytest.approx(0.7)
    assert use.rollout_idle_ratio == pytest.approx(1 - (2 + 0) / 2 / 10)


def test_the_log_keeps_events_and_ended_samples(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", tmp_path / "trajectories.msgpack")
    log.saw(1.0, ev.Generate(ID, "a", 1, 0, 8))
    live = LiveTrajectory(ID, "t")
    live.add_response([3], [-0.1], [(2, 1)])
    done = live.finish(1, StopReason.SUBMITTED, 0.5)
    log.ended(2.0, ev.EndSample(SampleId(0, 0), ID, Outcome.TRAINED, "step 1"), done)
    log.ended(2.0, ev.EndSample(SampleId(0, 1), None, Outcome.FAILED, "broken"), None)
    log.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {
        "time": 0, "kind": "Generate", "trajectory": "g0.0.0", "worker": "a", "incarnation": 1, "version": 0,
        "max_new_tokens": 8, "prefill_worker": "", "prefill_incarnation": 0,
    }  # fmt: skip
    first, second = msgpack.Unpacker((tmp_path / "trajectories.msgpack").open("rb"))
    assert trajectory_from_wire(first["trajectory"]) == done
    assert (second["outcome"], second["trajectory"]) == ("failed", None)


def test_a_run_directory_is_never_shared(tmp_path: Path) -> None:
    config = make_config({"run_dir": str(tmp_path / "run")}, "test")
    directory = RunDirectory.create(config)
    try:
        with pytest.raises(UserError, match="is not empty"):
            RunDirectory.create(config)
    finally:
        directory.close()
    assert not directory.snapshots.exists()


def test_an_unwritable_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make_config({"run_dir": str(tmp_path / "file" / "run")}, "test")
    with pytest.raises(UserError, match=r"run_dir = .* cannot be written"):
        RunDirectory.create(config)


def test_snapshots_of_a_killed_driver_are_swept_and_those_of_a_living_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    script = (
        "import pathlib, sys, pearl.live.run_directory as d; d.SHARED_MEMORY = pathlib.Path(sys.argv[1]); "
        "f = d._snapshot_folder(pathlib.Path('x')); f.mkdir(); print(f)"
    )
    dead = Path(
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    mine = run_directory._snapshot_folder(Path("y"))
    mine.mkdir()
    other = tmp_path / "pearl-not-ours"
    other.mkdir()
    assert dead.is_dir()
    sweep_shared_memory()
    assert not dead.exists() and mine.exists() and other.exists()


def test_the_memory_plan_grows_with_what_is_asked_for() -> None:
    size = model_size(resolve_model("smollm2-135m-instruct"))
    assert size.parameters == 134_515_008 and size.layers == 30
    small = plan_memory(make_config({}, "test"), size)
    more = plan_memory(make_config({"cluster": {"rollout_workers": 4}}, "test"), size)
    assert sum(more.values()) - sum(small.values()) > 2 * 2.4
