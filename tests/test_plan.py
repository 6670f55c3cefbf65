"""`pearl plan`, and the profiles behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pearl.cli import app
from pearl.core.layout import Layout
from pearl.core.workload import Profile
from pearl.errors import UserError
from pearl.plan import make_plan, sentences
from pearl.profiles import gpus, load_architecture, load_profile, models, read_profile, write_profile
from pearl.sim.workload_profile import load_workload, workload_profile, workloads


def profile() -> Profile:
    return Profile(load_profile("qwen3-8b", "h100"), workload_profile(load_workload("tools"), batch=64))


def test_every_shipped_profile_loads_or_says_that_it_does_not_fit() -> None:
    for model in models():
        for gpu in gpus():
            for group in (1, 2, 4):
                engine = load_profile(model, gpu, group)
                assert engine.kv_capacity_tokens > 0
                assert 0 < engine.prefill_s_per_token < 1e-3


def test_architecture_gives_bytes_per_token() -> None:
    assert load_profile("qwen3-8b", "h800").kv_bytes_per_token == 147_456
    assert load_profile("qwen3-30b-a3b", "h800").kv_bytes_per_token == 98_304


def test_attention_is_as_wide_as_its_heads_not_as_the_model() -> None:
    assert load_architecture("qwen3-8b").attention_width == 4096
    assert load_architecture("qwen3-30b-a3b").attention_width == 4096 == 2 * load_architecture("qwen3-30b-a3b").hidden


def test_two_gpus_are_faster_than_one_and_less_than_twice_as_fast() -> None:
    one, two = (load_profile("qwen3-8b", "h100", group) for group in (1, 2))
    assert one.prefill_s_per_token / 2 < two.prefill_s_per_token < one.prefill_s_per_token
    assert one.decode_fixed_s / 2 < two.decode_fixed_s < one.decode_fixed_s
    assert two.kv_capacity_tokens > 2 * one.kv_capacity_tokens


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("qwen9", "h100"), "qwen3-8b"), (("qwen3-8b", "h900"), "h800"), (("qwen3-8b", "h100", 3), "1, 2, 4 or 8")],
)
def test_an_unknown_name_is_answered_with_those_that_exist(arguments: tuple, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_profile(*arguments)


def test_a_profile_survives_being_written_and_read(tmp_path: Path) -> None:
    written = profile()
    write_profile(tmp_path / "profile.yaml", written)
    assert read_profile(tmp_path / "profile.yaml") == written


@pytest.mark.parametrize("text", ["", "engine: {}", "[1, 2", "engine: {}\nworkload: {turns: []}", "a: b"])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"broken\.yaml"):
        read_profile(path)
    with pytest.raises(UserError, match=r"missing\.yaml"):
        read_profile(tmp_path / "missing.yaml")


def test_a_workload_s_profile_is_what_its_plans_are() -> None:
    for name in workloads():
        work = workload_profile(load_workload(name), batch=64)
        survivors = [turn.survivors for turn in work.turns]
        assert survivors[0] == 1.0
        assert survivors == sorted(survivors, reverse=True)
        assert work.slowest_turns <= len(work.turns)
        assert work.turns[0].context_tokens < 1
        assert max(turn.context_tokens + turn.new_tokens for turn in work.turns) <= 32_768


def test_the_plan_chooses_what_its_table_has_as_the_fastest_feasible_layout() -> None:
    plan = make_plan(model="qwen3-8b", gpu="a100", tensor_parallel=1, gpus=8, batch=96, workload="tools", profile=None)
    feasible = [row for row in plan.rows if not row.infeasible]
    assert plan.decision.predicted_s <= min(row.drain_aware_s for row in feasible) * 1.02
    assert plan.decision.layout in [row.layout for row in plan.rows]
    assert any("choice" in line for line in sentences(plan))


def test_a_profile_file_takes_the_place_of_model_and_workload(tmp_path: Path) -> None:
    known = profile()
    slow = replace(known, engine=replace(known.engine, decode_fixed_s=1.0))
    write_profile(tmp_path / "profile.yaml", slow)
    plan = make_plan(
        model="qwen3-8b", gpu="h100", tensor_parallel=1, gpus=4, batch=16, workload="swe",
        profile=tmp_path / "profile.yaml",
    )  # fmt: skip
    assert plan.decision.predicted_s > 500


@pytest.mark.parametrize(
    "arguments",
    [["--batch", "0"], ["--gpus", "1"], ["--gpu", "nope"], ["--workload", "nope"], ["--tensor-parallel", "3"]],
)
def test_bad_input_is_one_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, UserError)


def test_the_command_prints_a_table_and_json() -> None:
    result = CliRunner().invoke(app, ["plan", "--gpus", "8", "--batch", "32"])
    assert result.exit_code == 0, result.output
    assert "4C" in result.output
    assert "choice:" in result.output
    result = CliRunner().invoke(app, ["plan", "--gpus", "2000", "--batch", "4096", "--json"])
    read = json.loads(result.output)
    assert Layout.parse(read["choice"]).workers == 1000
    assert {"layout", "drain_aware_s", "closed_form_s", "infeasible"} <= set(read["layouts"][0])
