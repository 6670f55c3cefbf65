"""Traces of available GPUs: read, made up, and turned into slots that come and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core import events as ev
from pearl.core.layout import Zone
from pearl.errors import UserError
from pearl.sim.availability import ABUNDANCE, GENERATED, generate, mean_gpus, read
from pearl.sim.cluster import make_cluster


def test_a_segment_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "segment.json"
    path.write_text(json.dumps({"name": "x", "events": [[0.0, 12], [480.0, 6], [720.0, 10]]}))
    assert read(path, 12, 2) == [(0.0, 12), (480.0, 6), (720.0, 10)]
    assert read(path, 12, 2, start_s=500) == [(0.0, 6), (220.0, 10)]


def test_nodes_that_are_added_and_removed_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n120000,add,d\n")
    assert read(path, 12, 2) == [(0.0, 4), (60.0, 2), (120.0, 6)]


def test_counts_with_a_date_are_sorted_and_scaled_to_the_most_there_are_to_be(tmp_path: Path) -> None:
    path = tmp_path / "gcloud.txt"
    path.write_text("2021-12-10, 13:09:45, 40\n2021-12-10, 13:07:45, 80\n2021-12-10, 13:08:45, 80\n")
    assert read(path, 12, 2) == [(0.0, 12), (120.0, 6)]


@pytest.mark.parametrize("text", ["", "a,b\n", "0,add,a\n1,eats,b\n", '{"events": 5}', "2021-13-45, 1, 2\n"])
def test_what_is_no_trace_is_refused_with_the_formats(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(UserError, match="JSON with `events"):
        read(path, 12, 2)


def test_a_missing_trace_names_the_generated_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scarce-volatile"):
        read(tmp_path / "no", 12, 2)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_trace_has_the_mean_of_its_name_and_is_the_same_for_a_seed(name: str) -> None:
    traces = [generate(name, 12, 2, 7200, seed) for seed in range(60)]
    assert traces[7] == generate(name, 12, 2, 7200, 7) != traces[8]
    mean = sum(mean_gpus(trace, 7200) for trace in traces) / len(traces)
    assert mean == pytest.approx(12 * ABUNDANCE[name.split("-")[0]], abs=0.8)
    changes = sum(len(trace) - 1 for trace in traces) / len(traces)
    assert 1 <= changes <= 4 if name.endswith("calm") else 9 <= changes <= 20


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    notice_s=st.sampled_from([None, 0.0, 30.0, 500.0]),
    seed=st.integers(0, 99),
)
def test_slots_follow_the_trace_life_by_life(counts: list[int], notice_s: float | None, seed: int) -> None:
    availability = [(100.0 * i, 2 * n) for i, n in enumerate(counts)]
    cluster = make_cluster(
        training_gpus=4, reserved_gpus=2, availability=availability, notice_s=notice_s, seed=seed
    )  # fmt: skip
    present: dict[str, int] = {}
    noticed: dict[str, tuple[float, int]] = {}
    lives: dict[str, int] = {}
    for time_s, event in cluster.changes:
        match event:
            case ev.SlotJoined():
                name = event.slot.name
                assert name not in present and event.slot.zone is Zone.PREEMPTIBLE
                assert event.life == lives.get(name, 0) + 1
                present[name] = lives[name] = event.life
            case ev.SlotNotice():
                assert present[event.worker] == event.life
                noticed[event.worker] = (time_s + event.seconds_left, event.life)
            case ev.SlotLost():
                assert present.pop(event.worker) == event.life
                if notice_s is not None:
                    left_s, life = noticed[event.worker]
                    assert left_s == pytest.approx(time_s) and life == event.life
    assert len(present) == counts[-1]
    assert [slot.zone for slot in cluster.slots] == [Zone.RESERVED, Zone.OVERLAP, Zone.OVERLAP]
    assert cluster.slots[-1].trainer_ranks == (2, 3)
