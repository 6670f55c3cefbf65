"""A checkpoint is whole or not there, and training goes on from it bit for bit."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.samples import config, make_groups, start
from trainer import randomness
from trainer.checkpoint import CheckpointError, latest_tag
from trainer.fingerprint import differences

SAME = ("loss", "grad_norm", "entropy", "mismatch_kl", "lr", "staleness_max", "kl_to_initial")


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "bfloat16"), (2, "float32"), (3, "float32")]
)
def test_training_goes_on_bit_for_bit_in_a_new_trainer(stage: int, dtype: str, tmp_path: Path) -> None:
    settings = config(
        zero_stage=stage, dtype=dtype, schedule={"kind": "cosine"}, grpo={"kl_coefficient": 0.01, "minibatches": 2}
    )
    first = start(settings)
    for step in (1, 2):
        first.train_step(step, make_groups(step))
    first.version = 7
    path = first.save_checkpoint(tmp_path, "step-2", {"drawn": [1, 2], "name": "x"})
    assert path == tmp_path / "step-2"
    expected = [first.train_step(step, make_groups(step)) for step in (3, 4)]
    weights = first.checksum()
    first.close()

    second = start(settings, seed=5)
    assert latest_tag(tmp_path) == "step-2"
    assert second.load_checkpoint(tmp_path, "step-2") == {"drawn": [1, 2], "name": "x"}
    assert (second.step, second.version) == (2, 7)
    got = [second.train_step(step, make_groups(step)) for step in (3, 4)]
    assert [[m[name] for name in SAME] for m in got] == [[m[name] for name in SAME] for m in expected]
    assert second.checksum() == weights
    # Back in the same trainer, as after a failed evaluation.
    second.load_checkpoint(tmp_path, "step-2")
    again = second.train_step(3, make_groups(3))
    assert [again[name] for name in SAME] == [expected[0][name] for name in SAME]
    second.close()


def test_a_torn_save_is_never_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start(config(zero_stage=2))
    trainer.save_checkpoint(tmp_path, "a", {})
    with pytest.raises(FileExistsError):
        trainer.save_checkpoint(tmp_path, "a", {})
    with pytest.raises(ValueError, match="tag"):
        trainer.save_checkpoint(tmp_path, "../b", {})
    with pytest.raises(FileNotFoundError):
        trainer.load_checkpoint(tmp_path, "b")
    state = trainer.state
    assert state == "ready"

    write = trainer._engine.save_checkpoint

    def die_after_writing(*args: object, **values: object) -> None:
        write(*args, **values)
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(trainer._engine, "save_checkpoint", die_after_writing)
        with pytest.raises(OSError, match="disk full"):
            trainer.save_checkpoint(tmp_path, "b", {})
    assert trainer.state == "broken"
    trainer.close()
    assert latest_tag(tmp_path) == "a"
    assert not (tmp_path / "b").exists()

    trainer = start(config(zero_stage=2))
    trainer.load_checkpoint(tmp_path, "a")
    trainer.save_checkpoint(tmp_path, "b", {"n": 1})
    assert latest_tag(tmp_path) == "b"
    assert trainer.load_checkpoint(tmp_path, "b") == {"n": 1}
    assert not list(tmp_path.glob("*.unfinished"))
    trainer.close()


def draw() -> list[float]:
    """A number of each generator, the second normal one of a pair too, which numpy and python keep."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), warm_up=st.integers(0, 5), between=st.integers(0, 5))
def test_random_number_generators_go_on_where_they_were(seed: int, warm_up: int, between: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(warm_up):
        draw()
    state = randomness.capture()
    expected = [draw() for _ in range(3)]
    for _ in range(between):
        draw()
    randomness.restore(state)
    assert [draw() for _ in range(3)] == expected


def test_a_checkpoint_holds_the_random_number_generators(tmp_path: Path) -> None:
    trainer = start(config(zero_stage=2), seed=3)
    draw()
    trainer.save_checkpoint(tmp_path, "a", {})
    expected = draw()
    trainer.close()
    trainer = start(config(zero_stage=2), seed=4)
    trainer.load_checkpoint(tmp_path, "a")
    assert draw() == expected
    trainer.close()


def test_a_checkpoint_of_another_kind_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    trainer = start(config(zero_stage=2))
    trainer.train_step(1, make_groups(1))
    trainer.save_checkpoint(tmp_path, "a", {})
    trainer.close()
    (tmp_path / "foreign").mkdir()
    description = json.loads((tmp_path / "a" / "pearl.json").read_text())
    description["settings"]["model"] = "other"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pearl.json").write_text(json.dumps(description))

    trainer = start(config(zero_stage=1))
    before = trainer.checksum()
    for tag, message in [
        ("a", r"trainer\.zero_stage = 2, and this trainer has 1; use 2"),
        ("model", "model = other"),
        ("foreign", "no checkpoint of this trainer"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            trainer.load_checkpoint(tmp_path, tag)
    assert (trainer.state, trainer.step, trainer.checksum()) == ("ready", 0, before)
    trainer.close()


def test_settings_changed_since_the_save_hold_and_are_named(tmp_path: Path) -> None:
    trainer = start(config(zero_stage=2, gradient_clip=0.5))
    trainer.train_step(1, make_groups(1))
    trainer.save_checkpoint(tmp_path, "a", {})
    trainer.close()
    changed = {"weight_decay": 0.3, "betas": (0.8, 0.9), "gradient_clip": 0.25, "grpo": {"clip_low": 0.1}}
    trainer = start(config(zero_stage=2, **changed), temperature=0.7)
    trainer.load_checkpoint(tmp_path, "a")
    assert trainer.changes == {
        "temperature": (1.0, 0.7),
        "trainer.betas": ([0.9, 0.95], [0.8, 0.9]),
        "trainer.weight_decay": (0.0, 0.3),
        "trainer.gradient_clip": (0.5, 0.25),
        "trainer.grpo.clip_low": (0.2, 0.1),
    }
    optimizer = trainer._engine.optimizer
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["betas"], optimizer.clip_grad) == (0.3, (0.8, 0.9), 0.25)
    trainer.close()


def test_differences_name_what_only_one_side_has() -> None:
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": 3}) == {"a": (1, None), "c": (None, 3)}


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_tag(tmp_path) is None
    (tmp_path / "latest").write_text("gone")
    assert latest_tag(tmp_path) is None
