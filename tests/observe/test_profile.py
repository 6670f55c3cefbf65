"""What a run leaves in `profile.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.observe.profile import ProfileObserver, live_prior
from pearl.profiles import read_profile

SHAPE = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def test_the_prior_knows_sizes_from_the_configuration(model: Path) -> None:
    config = make_config({"engine": {"max_total_tokens": 8192, "max_running_requests": 5}}, "test")
    prior = live_prior(config, model)
    assert prior.engine.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert prior.engine.kv_capacity_tokens == 8192
    assert prior.engine.max_running_requests == 5
    assert prior.workload.group_size == config.pipeline.group_size


def test_what_was_observed_is_in_the_file(model: Path, tmp_path: Path) -> None:
    config = make_config({}, "test")
    observer = ProfileObserver(tmp_path / "profile.yaml", live_prior(config, model))
    telemetry = TurnTelemetry(100, 0, prefill_s=0.5, decode_s=3.0, stall_s=1.0, decode_batch=4, decode_kv_tokens=500)
    for member in range(200):
        trajectory = TrajectoryId(0, member, 0)
        event = ev.TurnGenerated(trajectory, "rollout-0", 1, 21, 0, FinishReason.STOP, telemetry=telemetry)
        observer.saw(float(member), event)
    observer.close()
    engine = read_profile(tmp_path / "profile.yaml").engine
    step = engine.decode_fixed_s + 4 * engine.decode_s_per_sequence + 500 * engine.decode_s_per_kv_token
    assert step == pytest.approx(2.0 / 20, rel=0.02)
    prefill = engine.prefill_fixed_s + 100 * engine.prefill_s_per_token + 5000 * engine.prefill_s_per_token2
    assert prefill == pytest.approx(0.5, rel=0.02)
