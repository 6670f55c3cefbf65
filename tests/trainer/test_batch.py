"""Rows and the plan: every token where it belongs, every row exactly once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pearl.config.trainer import GrpoConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from tests.trainer.samples import make_group
from trainer.batch import has_signal, make_batch, make_row
from trainer.bundle import alone
from trainer.microbatch import collate

CPU = torch.device("cpu")
PROMPT = Segment(SegmentKind.PROMPT, (1, 2, 3))
ANSWER = Segment(SegmentKind.RESPONSE, (4, 5), (-0.5, -0.25), 7)
OBSERVATION = Segment(SegmentKind.OBSERVATION, (6, 7))
SECOND = Segment(SegmentKind.RESPONSE, (8,), (-1.0,), 9)


def trajectory(*parts: Segment, index: int = 0, reward: float = 0.0, group: int = 0) -> Trajectory:
    return Trajectory(TrajectoryId(group, index, 0), "task", parts, 1, StopReason.SUBMITTED, reward)


def test_row_by_hand() -> None:
    got = make_row(trajectory(PROMPT, ANSWER, OBSERVATION, SECOND, OBSERVATION), advantage=0.5)
    assert got.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert got.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert got.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, -1.0]
    assert got.versions.tolist() == [-1, -1, -1, 7, 7, -1, -1, 9]
    assert (got.loss_tokens, got.advantage) == (3, 0.5)


def test_two_responses_in_a_row_stay_two_versions_in_order() -> None:
    got = make_row(trajectory(PROMPT, ANSWER, SECOND), advantage=0.0)
    assert got.token_ids.tolist() == [1, 2, 3, 4, 5, 8]
    assert got.versions.tolist() == [-1, -1, -1, 7, 7, 9]


def test_micro_batch_by_hand() -> None:
    rows = [make_row(trajectory(PROMPT, ANSWER, OBSERVATION, SECOND), 0.5), make_row(trajectory(PROMPT, ANSWER), -2.0)]
    got = collate(alone(rows), CPU)
    assert not got.shaped
    assert got.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert got.positions.tolist() == [2, 3, 6, 10, 11]
    assert got.targets.tolist() == [4, 5, 8, 4, 5]
    assert got.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -0.5, -0.25]
    assert got.advantages.tolist() == [0.5, 0.5, 0.5, -2.0, -2.0]
    assert got.versions.tolist() == [7, 7, 9, 7, 7]


def test_what_was_not_generated_never_reaches_the_loss() -> None:
    clean = make_row(trajectory(PROMPT, ANSWER, OBSERVATION, SECOND), 0.5)
    dirty = replace(
        clean,
        rollout_logprobs=np.where(clean.loss_mask, clean.rollout_logprobs, 99.0).astype(np.float32),
        versions=np.where(clean.loss_mask, clean.versions, 99),
    )
    for name in MICRO_BATCH_FIELDS:
        assert torch.equal(getattr(collate(alone([clean]), CPU), name), getattr(collate(alone([dirty]), CPU), name))


MICRO_BATCH_FIELDS = ("input_ids", "positions", "targets", "rollout_logprobs", "advantages", "versions")


def test_micro_batch_without_rows_has_one_token_and_no_loss() -> None:
    got = collate([], CPU)
    assert got.input_ids.shape == (1, 1)
    assert got.loss_tokens == 0


def test_counts_and_dropped_groups() -> None:
    groups = [make_group(0, [0.0, 1.0]), make_group(1, [1.0, 1.0, 1.0])]
    dropped = make_batch(groups, GrpoConfig(zero_variance="drop"))
    kept = make_batch(groups, GrpoConfig(zero_variance="keep"))
    assert {r.id.group for r in dropped.rows} == {0}
    assert {r.id.group for r in kept.rows} == {0, 1}
    assert all(r.advantage == 0.0 for r in kept.rows if r.id.group == 1)
    for batch in (dropped, kept):
        assert (batch.groups, batch.zero_variance_groups, batch.trajectories) == (2, 1, 5)
        assert batch.tokens == sum(len(t.token_ids) for group in groups for t in group)
        assert batch.reward_mean == pytest.approx(4 / 5)


def test_a_row_without_generated_tokens_counts_in_the_mean_only() -> None:
    group = [trajectory(PROMPT, index=0, reward=0.0), trajectory(PROMPT, ANSWER, index=1, reward=1.0)]
    batch = make_batch([group], GrpoConfig(normalise_by_std=False))
    assert [(r.id.member, r.advantage) for r in batch.rows] == [(1, 0.5)]
    assert batch.without_tokens == 1


def test_signal() -> None:
    flat = make_batch([make_group(0, [1.0, 1.0])], GrpoConfig(zero_variance="keep")).rows
    assert not has_signal(flat, GrpoConfig())
    assert has_signal(flat, GrpoConfig(kl_coefficient=0.1))
    assert not has_signal([], GrpoConfig(kl_coefficient=0.1))
    assert has_signal(make_batch([make_group(0, [1.0, 0.0])], GrpoConfig()).rows, GrpoConfig())


NAN = Segment(SegmentKind.RESPONSE, (4,), (float("nan"),), 0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "without groups"),
        ([[trajectory(PROMPT, ANSWER)]], r"g0\.0\.0.*at least 2"),
        ([[trajectory(PROMPT, ANSWER), trajectory(PROMPT, ANSWER)]], r"g0\.0 is twice"),
        ([[trajectory(PROMPT, ANSWER), trajectory(PROMPT, ANSWER, index=1, group=1)]], "another task"),
        ([[trajectory(PROMPT, ANSWER), trajectory(PROMPT, ANSWER, index=1, reward=float("nan"))]], "reward nan"),
        ([[trajectory(PROMPT, NAN), trajectory(PROMPT, ANSWER, index=1, reward=1.0)]], r"g0\.0\.0.*not finite"),
        ([[trajectory(ANSWER), trajectory(PROMPT, ANSWER, index=1, reward=1.0)]], "begins with a generated token"),
    ],
)
def test_bad_input_names_the_trajectory(groups: list[list[Trajectory]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(groups, GrpoConfig())


def test_nothing_generated_is_no_row() -> None:
    with pytest.raises(ValueError, match="no generated token"):
        make_row(trajectory(PROMPT, OBSERVATION), 0.0)
