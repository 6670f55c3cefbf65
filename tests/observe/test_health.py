"""A sound step warns of nothing; each threshold warns of its own kind, and the console says it once."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pearl.core.events import Outcome
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.observe import health
from pearl.observe.console import RunConsole
from pearl.observe.metrics import Metrics

SOUND: dict[str, Any] = {
    "step": 3, "loss": 0.01, "grad_norm": 0.4, "loss_tokens": 900.0, "mismatch_kl": 1e-3, "importance_cap_share": 0.0,
    "clip_share": 0.05, "entropy": 0.7, "groups": 10.0, "zero_variance_groups": 5.0, "truncation_rate": 0.2,
    "failure_rate": 0.0, "staleness_histogram": [6, 2], "staleness_bound": 1,
    "reward": 0.5, "tokens_per_s": 90.0, "seconds_since_last": 2.0, "trainer_idle_ratio": 0.1,
    "rollout_idle_ratio": 0.1, "staleness_mean": 0.25, "queue": 0,
}  # fmt: skip
ILL: dict[str, dict[str, Any]] = {
    "not_finite": {"loss": math.nan},
    "mismatch": {"mismatch_kl": 0.2},
    "importance_cap": {"importance_cap_share": 0.2},
    "clip": {"clip_share": 0.5},
    "entropy": {"entropy": 0.001},
    "zero_variance": {"zero_variance_groups": 9.0},
    "staleness": {"staleness_histogram": [1, 0, 7], "staleness_bound": 2},
    "truncation": {"truncation_rate": 0.9},
    "failures": {"failure_rate": 0.5},
}


def kinds(record: dict[str, Any]) -> list[str]:
    return [warning.kind for warning in health.warnings(record)]


def test_a_sound_step_and_an_empty_record_warn_of_nothing() -> None:
    assert health.warnings(SOUND) == []
    assert health.warnings({}) == []


@pytest.mark.parametrize("kind", ILL)
def test_each_threshold_warns_of_its_own_kind(kind: str) -> None:
    assert kinds(SOUND | ILL[kind]) == [kind]


def test_all_at_once_with_the_worst_first() -> None:
    record = dict(SOUND)
    for change in ILL.values():
        record |= change
    assert sorted(kinds(record)) == sorted(ILL)
    assert kinds(record)[0] == "not_finite"
    for warning in health.warnings(record):
        assert "\n" not in warning.text
        assert ";" in warning.text  # figure; what helps


def test_a_step_without_loss_tokens_says_nothing_of_the_loss() -> None:
    record = SOUND | {"loss_tokens": 0.0, "loss": 0.0, "grad_norm": 0.0, "entropy": 0.0, "mismatch_kl": 0.0}
    assert health.warnings(record) == []


def test_with_a_bound_of_zero_nothing_is_stale() -> None:
    assert kinds(SOUND | {"staleness_histogram": [8], "staleness_bound": 0}) == []
    assert kinds(SOUND | {"staleness_histogram": [0, 8], "staleness_bound": 1}) == []


def test_a_step_without_trajectories_is_not_stale() -> None:
    assert kinds(SOUND | {"staleness_histogram": [0], "staleness_bound": 2}) == []


FIGURE = st.one_of(st.none(), st.floats())


@given(
    st.fixed_dictionaries(
        {},
        optional={name: FIGURE for name in SOUND if not name.startswith("staleness_")}
        | {
            "staleness_histogram": st.lists(st.integers(0, 50), max_size=6),
            "staleness_bound": st.integers(0, 5),
        },
    )
)
def test_any_record_gives_each_kind_at_most_once(record: dict[str, Any]) -> None:
    found = kinds({name: value for name, value in record.items() if value is not None})
    assert len(found) == len(set(found))
    assert set(found) <= set(ILL)


@given(st.sampled_from(["mismatch_kl", "importance_cap_share", "clip_share", "truncation_rate", "failure_rate"]),
       st.floats(0.0, 1.0), st.floats(0.0, 1.0))  # fmt: skip
def test_a_worse_figure_never_warns_less(name: str, one: float, other: float) -> None:
    better, worse = sorted((one, other))
    assert len(kinds(SOUND | {name: better})) <= len(kinds(SOUND | {name: worse}))


def test_the_console_warns_once_per_kind_and_run() -> None:
    output = io.StringIO()
    pipeline: Any = SimpleNamespace(settings=SimpleNamespace(steps=9))
    screen = RunConsole(Console(file=output, width=200), pipeline)
    for step in (1, 2, 3):
        screen.step_line(SOUND | ILL["clip"] | {"step": step})
    screen.step_line(SOUND | ILL["clip"] | ILL["truncation"] | {"step": 4})
    lines = [line for line in output.getvalue().splitlines() if line.startswith("warning")]
    assert [line.split(":")[0] for line in lines] == ["warning, step 1", "warning, step 4"]


def trajectory(member: int, version: int, stop: StopReason) -> Trajectory:
    segments = (Segment(SegmentKind.PROMPT, (1, 2)), Segment(SegmentKind.RESPONSE, (3,), (-1.0,), version))
    return Trajectory(TrajectoryId(0, member, 0), "task", segments, 1, stop, 0.5)


def test_the_record_has_what_the_warnings_need(tmp_path: Path) -> None:
    ended = dict.fromkeys(Outcome, 0)
    pipeline: Any = SimpleNamespace(
        settings=SimpleNamespace(max_staleness_steps=2), lineage=SimpleNamespace(step_of={0: 0, 1: 1, 2: 2}),
        queue=[], waiting=[], attempts={}, version=2, ended=ended,
    )  # fmt: skip
    records: list[dict[str, Any]] = []
    metrics = Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", pipeline, records.append)
    stops = (StopReason.SUBMITTED, StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.SUBMITTED)
    batch = [trajectory(i, version, stop) for i, (version, stop) in enumerate(zip((2, 2, 0, 1), stops, strict=True))]
    ended[Outcome.TRAINED], ended[Outcome.FAILED] = 4, 1
    metrics.stepped(1.0, {"step": 3.0}, batch)
    ended[Outcome.TRAINED] = 8
    metrics.stepped(2.0, {"step": 4.0}, batch)
    metrics.close()
    first, second = records
    assert (first["staleness_histogram"], first["staleness_bound"]) == ([2, 1, 1], 2)
    assert (first["truncation_rate"], first["failure_rate"]) == (0.5, 0.2)
    assert (second["staleness_histogram"], second["failure_rate"]) == ([0, 2, 1, 1], 0.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]) == first
