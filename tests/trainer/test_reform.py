"""A rank is killed in the middle of a step: the other one notices, and trains on with a new one in the same process."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import RankError, RankProcess, form, on_all
from tests.trainer.samples import config

pytestmark = pytest.mark.slow
SAME = ("loss", "grad_norm", "entropy", "mismatch_kl", "kl_to_initial")


def step(processes: list[RankProcess], number: int) -> list[list[float]]:
    return [[metrics[name] for name in SAME] for metrics in on_all(processes, "train", number)]


def kill_in_step(victim: RankProcess, survivor: RankProcess, number: int) -> None:
    """Both are in the step, the survivor in a collective; then the victim is no more."""
    victim.call("stall")
    for process in (victim, survivor):
        process.send("train", number)
    assert victim.receive() == "stalled"
    time.sleep(1.0)
    victim.kill()
    began = time.monotonic()
    with pytest.raises(RankError):
        survivor.receive()
    assert time.monotonic() - began < 10.0
    assert survivor.call("describe")["state"] == "broken"
    with pytest.raises(RankError, match=r"TrainerStateError.*broken"):
        survivor.call("train", number)
    began = time.monotonic()
    survivor.call("stop")
    assert time.monotonic() - began < 5.0
    assert survivor.call("describe")["state"] == "stopped"


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_bit_for_bit_after_either_rank_was_killed(stage: int, tmp_path: Path) -> None:
    settings: Any = config(zero_stage=stage, micro_batch_tokens=64, grpo={"kl_coefficient": 0.01, "minibatches": 2})
    with RankProcess() as a, RankProcess() as b, RankProcess() as c, RankProcess() as d:
        form([a, b], settings)
        step([a, b], 1)
        on_all([a, b], "save", str(tmp_path), "one", {})
        uninterrupted = [step([a, b], number) for number in (2, 3)]
        assert uninterrupted[0][0] == uninterrupted[0][1]

        kill_in_step(victim=b, survivor=a, number=4)
        form([a, c], settings, seed=1)
        on_all([a, c], "load", str(tmp_path), "one")
        assert step([a, c], 2) == uninterrupted[0]

        # The rank that goes now is the one at whose address all met.
        kill_in_step(victim=a, survivor=c, number=3)
        form([d, c], settings, seed=2)
        on_all([d, c], "load", str(tmp_path), "one")
        assert [step([d, c], number) for number in (2, 3)] == uninterrupted
        on_all([d, c], "stop")


def test_a_rank_alone_goes_on_from_a_checkpoint_of_two(tmp_path: Path) -> None:
    """Nobody comes instead of the one that was killed."""
    settings: Any = config(zero_stage=2, micro_batch_tokens=64)
    with RankProcess() as a, RankProcess() as b:
        form([a, b], settings)
        step([a, b], 1)
        on_all([a, b], "save", str(tmp_path), "one", {})
        expected = step([a, b], 2)[0]
        kill_in_step(victim=b, survivor=a, number=3)
        form([a], settings)
        a.call("load", str(tmp_path), "one")
        assert step([a], 2)[0] == pytest.approx(expected, abs=1e-6, rel=1e-6)
        a.call("stop")
