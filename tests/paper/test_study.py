"""The study on a workload and sizes that are small enough for a test."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pearl.cli import app
from pearl.paper import published as p
from pearl.paper.cell import Cell
from pearl.paper.plan import Plan
from pearl.paper.report import markdown, summary, table
from pearl.paper.runner import Kept, key_of, play_all
from pearl.paper.study import Studies
from pearl.paper.world import SEGMENTS, World, frozen, load_world, segment

WORLD = World(3, 400, 80, 0.5, 0.5, 0.01, 0.2)
TINY = Plan(
    WORLD, seeds=1, batch_seeds=2, hours=0.12, steps=2, skip=1, gpus=(4, 8), batches=(32, 64), lengths=(8192, 32_768),
    pairs_batches=(32, 48, 64, 96), ratios=((10, False),), environments=1, environment_steps=1, environment_seeds=1,
)  # fmt: skip
FIELDS: dict[str, Any] = {
    "figure": str, "name": str, "model": str, "published": (int, float, type(None)), "ours": (int, float),
    "lo": (int, float), "hi": (int, float), "unit": str, "held_out": bool, "agrees_sign": (bool, type(None)),
    "agrees_rank": (bool, type(None)), "within_5_points": (bool, type(None)), "note": str,
    "pearl": (int, float, type(None)), "pearl_lo": (int, float, type(None)), "pearl_hi": (int, float, type(None)),
}  # fmt: skip


@pytest.fixture(scope="module")
def studies() -> Studies:
    made = Studies.of(TINY)
    assert made.play(Kept(None), 1, math.inf, lambda done, of: None)
    return made


def test_the_result_has_its_schema(studies: Studies) -> None:
    result = json.loads(json.dumps(studies.result()))
    assert result.keys() == {"seeds", "summary", "aims", "cells", "series"}
    for cell in result["cells"]:
        assert cell.keys() == FIELDS.keys()
        for name, kind in FIELDS.items():
            assert isinstance(cell[name], kind), (cell["name"], name)
        assert cell["lo"] <= cell["ours"] <= cell["hi"]
        assert math.isfinite(cell["ours"])
    assert {row["reached"] for row in result["aims"]} <= {True, False}


def test_every_figure_of_the_source_has_its_cells(studies: Studies) -> None:
    cells = studies.cells()
    figures = {cell.figure for cell in cells}
    assert figures >= {"Section 3.1", "Section 3.3", "Figure 5", "Figure 7", "Figure 8", "Table 2", "Table 3", "Beyond"}
    assert len({(cell.figure, cell.name, cell.model) for cell in cells}) == len(cells)
    fitted = {cell.name for cell in cells if not cell.held_out and cell.note == "fitted"}
    assert len(fitted) == 5
    assert len(markdown(cells).splitlines()) == 2 + len(cells) + len(figures)
    assert table(cells, 80).row_count == len(cells) + len(figures)


def test_figures_are_drawn(studies: Studies, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pearl.paper import figures

    figures.draw(studies, studies.result(), tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == 8
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def cell(**changes: Any) -> Cell:
    return replace(Cell("F", "n", p.SMALL, 5.0, 6.0, 5.0, 7.0, agrees_sign=True, within_5_points=True), **changes)


def test_the_summary_counts_held_out_cells_only() -> None:
    cells = [cell(), cell(agrees_sign=False, within_5_points=False), cell(held_out=False, agrees_sign=False)]
    found = summary([*cells, cell(published=None, agrees_sign=False)])
    assert (found["cells"], found["held_out"]) == (4, 2)
    assert found["agrees_sign"] == {"yes": 1, "of": 2, "not": [f"F: n, {p.SMALL}"]}
    assert found["agrees_rank"]["of"] == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_study_goes_on_where_it_was(tmp_path: Path, processes: int) -> None:
    jobs = [job for several in Studies.of(TINY).pairs.jobs.values() for job in several][:4]
    file = tmp_path / "jobs.jsonl"
    assert play_all(jobs, Kept(file), processes, 0.0, lambda done, of: None) is None
    kept = Kept(file)
    known = len(kept.numbers)
    assert kept.numbers.keys() < set(map(key_of, jobs)) and known >= 1
    said: list[tuple[int, int]] = []
    played = play_all(jobs, kept, processes, math.inf, lambda done, of: said.append((done, of)))
    assert said == [(done, 4) for done in range(known, 5)]
    assert played is not None and played[jobs[3]] == jobs[3].play()


def test_numbers_of_other_sources_are_not_taken_over(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps({"source": "another"}) + "\n" + json.dumps({"job": "a", "numbers": {}}) + "\n")
    assert Kept(file).numbers == {}


def test_the_frozen_world_names_what_it_was_fitted_to() -> None:
    assert load_world() == World(**frozen()["world"])
    assert set(frozen()["fitted"]) == {
        "prefill_token_share", "prefill_time_share", "unlimited_rollout_s", "training_s", "rollout_share",
    }  # fmt: skip


def test_the_segments_are_the_sources_in_mean() -> None:
    for name, mean in zip(SEGMENTS, p.MEAN_ROLLOUT_GPUS, strict=True):
        assert json.loads(segment(name).read_text())["mean_rollout_gpus"] == pytest.approx(mean, abs=0.1)


def test_the_command_stops_at_its_limit_and_says_so(tmp_path: Path) -> None:
    said = CliRunner().invoke(
        app, ["bench", "paper", "--quick", "--out", str(tmp_path), "--processes", "1", "--limit", "1"]
    )
    assert said.exit_code == 1 and "goes on from here" in said.output
    assert (tmp_path / "jobs.jsonl").is_file()
