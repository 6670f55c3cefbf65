"""Scores of chosen tokens against log_softmax over all logits."""

from typing import Any

import pytest
import torch

from tests.trainer import reference
from trainer.logprobs import BLOCK, TokenScorer, logprobs_from_logits


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_blocks_match_log_softmax_and_its_gradient(temperature: float) -> None:
    torch.manual_seed(0)
    tokens = BLOCK * 2 + 3
    logits = (4 * torch.randn(tokens, 500)).requires_grad_()
    targets, slopes = torch.randint(0, 500, (tokens,)), torch.randn(tokens)
    got = logprobs_from_logits(logits, targets, temperature)
    (got.logprobs * slopes).sum().backward()
    gradient, logits.grad = logits.grad, None
    table = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    expected = table.gather(-1, targets[:, None]).squeeze(-1)
    (expected * slopes).sum().backward()
    torch.testing.assert_close(got.logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.entropy, -(table.exp() * table).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-6, rtol=1e-5)
    assert not got.entropy.requires_grad


def test_bfloat16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(5, 49152).to(torch.bfloat16)
    targets = torch.arange(5)
    got = logprobs_from_logits(logits, targets, 1.0)
    expected = torch.log_softmax(logits.double(), dim=-1)[torch.arange(5), targets]
    assert got.logprobs.dtype == torch.float32
    torch.testing.assert_close(got.logprobs.double(), expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference.load()


def test_chosen_positions_match_the_whole_model(model: Any) -> None:
    """Right-padded rows without an attention mask against each row alone."""
    torch.manual_seed(1)
    rows = [torch.randint(10, 40_000, (length,)) for length in (17, 9, 13)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = [(0, 3), (0, 15), (1, 0), (1, 7), (2, 11)]
    positions = torch.tensor([row * 17 + place for row, place in places])
    targets = torch.stack([rows[row][place + 1] for row, place in places])
    got = TokenScorer(model).score(model, padded, positions, targets, 0.8).logprobs
    tables = [torch.log_softmax(model(row[None]).logits[0] / 0.8, dim=-1) for row in rows]
    expected = torch.stack([tables[row][place, rows[row][place + 1]] for row, place in places])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_outside_a_score_the_model_is_as_before(model: Any) -> None:
    scorer = TokenScorer(model)
    tokens, one = torch.tensor([[11, 12, 13]]), torch.tensor([1])
    scorer.score(model, tokens, one, one, 1.0)
    assert model(tokens).logits.shape[:2] == (1, 3)
    with pytest.raises(IndexError):
        scorer.score(model, tokens, torch.tensor([99]), one, 1.0)
    assert model(tokens).logits.shape[:2] == (1, 3)


def test_no_loss_tokens_give_zero_gradients_for_all_parameters(model: Any) -> None:
    model.zero_grad()
    none = torch.zeros(0, dtype=torch.int64)
    TokenScorer(model).score(model, torch.zeros(1, 1, dtype=torch.int64), none, none, 1.0).logprobs.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_a_model_without_a_head_is_refused() -> None:
    class Headless(torch.nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(ValueError, match="Headless"):
        TokenScorer(Headless())
