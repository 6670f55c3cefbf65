"""A checkpoint of one number of ranks goes on with another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import RankProcess, form, on_all
from tests.trainer.samples import config, make_groups, start
from trainer import universal
from trainer.checkpoint import CheckpointError, latest_tag

pytestmark = pytest.mark.slow
CONFIG = {"micro_batch_tokens": 128, "weight_decay": 0.1, "grpo": {"kl_coefficient": 0.01}}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RankProcess]]:
    with RankProcess() as first, RankProcess() as second:
        yield [first, second]


def agree(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name in ("loss", "grad_norm", "kl_to_initial"):
        assert got[name] == pytest.approx(expected[name], abs=tolerance, rel=tolerance), name


@pytest.mark.parametrize(
    ("stage", "dtype", "first", "later"),
    [
        (0, "float32", 1e-6, 1e-4),
        (1, "float32", 1e-6, 1e-4),
        (2, "float32", 1e-6, 1e-4),
        (3, "float32", 1e-6, 1e-4),
        (0, "bfloat16", 1e-2, 1e-2),
        (2, "bfloat16", 1e-2, 1e-2),
        (3, "bfloat16", 1e-2, 1e-2),
    ],
)
def test_two_ranks_to_one_and_back(
    pair: list[RankProcess], stage: int, dtype: str, first: float, later: float, tmp_path: Path
) -> None:
    settings = config(zero_stage=stage, dtype=dtype, **CONFIG)
    form(pair, settings)
    for step in (1, 2):
        on_all(pair, "train", step)
    on_all(pair, "save", str(tmp_path), "two", {"epoch": 1})
    expected = [on_all(pair, "train", step)[0] for step in (3, 4)]
    on_all(pair, "stop")

    # Not a fresh trainer: its optimizer has states of its own, and was away once.
    trainer = start(settings, seed=3)
    trainer.train_step(1, make_groups(7))
    if stage:
        trainer.offload()
        trainer.reload()
    assert trainer.load_checkpoint(tmp_path, "two") == {"epoch": 1}
    assert (trainer.step, trainer.changes) == (2, {})
    for step, then in zip((3, 4), expected, strict=True):
        agree(trainer.train_step(step, make_groups(step)), then, (first, later)[step - 3])
    trainer.save_checkpoint(tmp_path, "one", {"epoch": 2})
    expected = [trainer.train_step(step, make_groups(step)) for step in (5, 6)]
    trainer.close()

    form(pair, settings, seed=4)
    assert on_all(pair, "load", str(tmp_path), "one") == [{"epoch": 2}] * 2
    for step, then in zip((5, 6), expected, strict=True):
        agree(on_all(pair, "train", step)[0], then, (first, later)[step - 5])
    on_all(pair, "stop")


def test_a_conversion_is_whole_and_made_once(
    pair: list[RankProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(zero_stage=2, **CONFIG)
    form(pair, settings)
    on_all(pair, "train", 1)
    on_all(pair, "save", str(tmp_path), "two", {})
    on_all(pair, "stop")
    shard = next((tmp_path / "two").glob("*zero_pp_rank_1*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    # What a conversion leaves that was killed.
    torn = tmp_path / ".two.converting" / universal.FOLDER / "zero"
    torn.mkdir(parents=True)

    trainer = start(settings)
    before = trainer.checksum()
    with pytest.raises(CheckpointError, match=r"converting .*two ended with 1: "):
        trainer.load_checkpoint(tmp_path, "two")
    assert (trainer.state, trainer.step, trainer.checksum()) == ("ready", 0, before)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["two"]
    assert not (tmp_path / "two" / universal.FOLDER).exists()

    shard.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_timeout_s", 0.1)
        with pytest.raises(CheckpointError, match=r"took longer than 0\.09 s"):
            trainer.load_checkpoint(tmp_path, "two")
    trainer.load_checkpoint(tmp_path, "two")
    converted = (tmp_path / "two" / universal.FOLDER).stat()
    assert latest_tag(tmp_path) == "two"
    assert not (tmp_path / "latest_universal").exists()

    def refuse(*_: object) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr(universal, "_run", refuse)
        trainer.load_checkpoint(tmp_path, "two")
    assert (tmp_path / "two" / universal.FOLDER).stat() == converted
    trainer.close()
