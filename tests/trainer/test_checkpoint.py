"""A checkpoint is whole or not there, and training goes on from it bit for bit."""

from pathlib import Path

import pytest

from tests.trainer.samples import config, make_groups, start
from trainer.checkpoint import latest_tag

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
    assert trainer.state == "ready"

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


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_tag(tmp_path) is None
    (tmp_path / "latest").write_text("gone")
    assert latest_tag(tmp_path) is None
