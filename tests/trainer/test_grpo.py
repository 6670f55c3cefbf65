"""The objective against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pearl.config.trainer import GrpoConfig
from trainer.grpo import Scores, group_advantages, importance_weights, is_clipped, k3, token_losses


def log(*values: float) -> Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def test_advantages_by_hand() -> None:
    # Mean 2, deviations -1 0 1, sample standard deviation 1.
    assert group_advantages([1.0, 2.0, 3.0], normalise_by_std=True) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert group_advantages([1.0, 2.0, 3.0, 6.0], normalise_by_std=False) == [-2.0, -1.0, 0.0, 3.0]


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.3, 0.3, 0.3], normalise_by_std=True) == [0.0, 0.0, 0.0]


def test_rewards_that_differ_by_rounding_are_not_blown_up() -> None:
    assert max(map(abs, group_advantages([0.1 + 0.2, 0.3], normalise_by_std=True))) < 1e-9


def test_one_trajectory_has_no_baseline() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages([1.0], normalise_by_std=True)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=32), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float], normalise: bool) -> None:
    advantages = group_advantages(rewards, normalise_by_std=normalise)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert advantages[best] == max(advantages)
    if normalise:
        assert max(map(abs, advantages)) <= len(rewards) ** 0.5


def test_losses_by_hand() -> None:
    config = GrpoConfig(clip_low=0.2, clip_high=0.28, importance_cap=2.0)
    scores = Scores(
        current=log(0.5, 0.5, 0.5, 0.5),
        old=log(0.5, 0.25, 0.25, 1.0),
        rollout=log(0.5, 0.25, 0.05, 1.0),
    )
    # ratios 1, 2, 2, 0.5; weights 1, 1, min(5, 2), 1
    advantages = torch.tensor([3.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    expected = [
        -3.0,  # on policy
        -1.28,  # clipped above
        4.0,  # a negative advantage is not clipped above: 2 x 2; the importance weight is cut to 2
        0.8,  # clipped below
    ]
    assert token_losses(scores, advantages, config).tolist() == pytest.approx(expected)
    ratio = torch.exp(scores.current - scores.old)
    assert is_clipped(ratio, advantages, config).tolist() == [False, True, False, True]


def test_kl_by_hand_and_its_need_for_the_initial_model() -> None:
    config = GrpoConfig(kl_coefficient=0.5)
    zero = torch.zeros(1, dtype=torch.float64)
    scores = Scores(current=log(0.5), old=log(0.5), rollout=log(0.5), initial=log(0.25))
    # k3 of log(0.25 / 0.5): 0.5 + log 2 - 1
    assert token_losses(scores, zero, config).item() == pytest.approx(0.5 * (0.5 + math.log(2) - 1))
    with pytest.raises(ValueError, match="initial"):
        token_losses(Scores(scores.current, scores.old, scores.rollout), zero, config)


def test_gradient_is_the_weighted_advantage_on_policy_and_zero_where_clipped() -> None:
    current = log(0.5, 0.5).requires_grad_()
    scores = Scores(current=current, old=log(0.5, 0.25), rollout=log(0.4, 0.25))
    token_losses(scores, torch.tensor([2.0, 1.0], dtype=torch.float64), GrpoConfig()).sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-2.0 * 0.5 / 0.4, 0.0])


def test_neither_old_nor_weight_nor_initial_carry_gradient() -> None:
    leaves = [log(0.3).requires_grad_() for _ in range(3)]
    scores = Scores(current=log(0.5).requires_grad_(), old=leaves[0], rollout=leaves[1].detach(), initial=leaves[2])
    token_losses(scores, torch.ones(1, dtype=torch.float64), GrpoConfig(kl_coefficient=1.0)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@given(st.floats(-200, 0), st.floats(-200, 0), st.floats(0.1, 10))
def test_importance_weight_never_exceeds_the_cap(old: float, rollout: float, cap: float) -> None:
    weight = importance_weights(torch.tensor([old]), torch.tensor([rollout]), cap).item()
    assert 0.0 <= weight <= cap * (1 + 1e-6)
    if old - rollout < math.log(cap) - 1e-3:
        assert weight == pytest.approx(math.exp(old - rollout), rel=1e-4)


@given(st.floats(-20, 20))
def test_k3_is_never_negative(x: float) -> None:
    assert k3(torch.tensor(x, dtype=torch.float64)).item() >= 0.0
    assert k3(torch.tensor(0.0)).item() == 0.0
