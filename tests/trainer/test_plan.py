"""Bundles and the plan: every row exactly once, within the budget, and a bundle is its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import TrajectoryId
from pearl.models import resolve_model
from tests.trainer.samples import MODEL
from trainer.batch import Row
from trainer.bundle import WORTH, Bundle, alone, bundle, can_share, rows_of
from trainer.engine import load_model
from trainer.logprobs import TokenScorer
from trainer.microbatch import collate
from trainer.plan import balance, pack, plan_ranks

CPU = torch.device("cpu")


def row(length: int, index: int = 0, prompt: int | None = None, group: int = 0) -> Row:
    """Rows of a group have the same tokens up to `prompt` (half of the length if None), different ones after it."""
    prompt = length // 2 if prompt is None else prompt
    mask = np.arange(length) >= prompt
    return Row(
        id=TrajectoryId(group, index, 0),
        token_ids=np.where(mask, 1000 + 100 * index, 10 * group) + np.arange(length, dtype=np.int64),
        loss_mask=mask,
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(mask, 0, -1),
        advantage=1.0,
    )


rows_of_any_length = st.lists(st.integers(2, 64), min_size=0, max_size=40).map(
    lambda lengths: [row(length, index) for index, length in enumerate(lengths)]
)
bundles_of_any_length = rows_of_any_length.map(alone)
groups_of_rows = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 20), min_size=1, max_size=8)), min_size=1, max_size=5
).map(
    lambda groups: [
        row(prompt + answer, index, prompt, number)
        for number, (prompt, answers) in enumerate(groups)
        for index, answer in enumerate(answers)
    ]
)


@given(bundles_of_any_length, st.integers(64, 256))
def test_pack_has_every_bundle_once_within_the_budget(bundles: list[Bundle], budget: int) -> None:
    packed = pack(bundles, budget)
    assert sorted(r.id for part in packed for r in rows_of(part)) == sorted(r.id for r in rows_of(bundles))
    for part in packed:
        assert 0 < len(part) * max(each.length for each in part) <= budget


@given(bundles_of_any_length, st.integers(1, 5), st.integers(64, 256))
def test_plan_has_every_bundle_once_and_equal_counts(bundles: list[Bundle], ranks: int, budget: int) -> None:
    plan = plan_ranks(bundles, ranks, budget)
    ids = [[[r.id for r in rows_of(part)] for part in rank] for rank in plan]
    assert sorted(i for rank in ids for part in rank for i in part) == sorted(r.id for r in rows_of(bundles))
    assert len({len(rank) for rank in plan}) == 1
    again = plan_ranks(list(bundles), ranks, budget)
    assert ids == [[[r.id for r in rows_of(part)] for part in rank] for rank in again]
    if len(bundles) >= ranks:
        assert all(any(rank) for rank in plan)


@given(bundles_of_any_length, st.integers(1, 5))
def test_balance_is_within_one_bundle(bundles: list[Bundle], parts: int) -> None:
    loads = [sum(each.length for each in part) for part in balance(bundles, parts)]
    assert max(loads) - min(loads) <= max((each.length for each in bundles), default=0)


def test_row_that_does_not_fit_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"g0\.3\.0 has 65 tokens.*trainer\.micro_batch_tokens = 64"):
        pack(alone([row(65, index=3)]), 64)


@given(groups_of_rows, st.integers(64, 256), st.integers(1, 5))
def test_bundles_have_every_row_once_and_share_only_what_pays(rows: list[Row], budget: int, parts: int) -> None:
    bundles = bundle(rows, budget, parts)
    assert sorted(r.id for r in rows_of(bundles)) == sorted(r.id for r in rows)
    assert len(bundles) >= min(parts, len(rows))
    for each in (each for each in bundles if len(each.rows) > 1):
        assert each.length <= min(budget, WORTH * sum(r.length for r in each.rows))
        assert len({(r.id.group, tuple(r.token_ids[: each.shared])) for r in each.rows}) == 1
        assert not any(r.loss_mask[: each.shared].any() for r in each.rows)


def test_bundle_by_hand() -> None:
    got = collate([Bundle((row(5, 0, 3), row(4, 1, 3)), 3), Bundle((row(4, 2, 2, group=1),))], CPU)
    assert got.input_ids.tolist() == [[0, 1, 2, 1003, 1004, 1103], [10, 11, 1202, 1203, 0, 0]]
    assert got.positions.tolist() == [2, 3, 2, 7, 8]
    assert got.targets.tolist() == [1003, 1004, 1103, 1202, 1203]
    assert got.shaped["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 0, 0]]
    assert got.shaped["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert got.shaped["attention_mask"][1, 0, :4, :4].int().tolist() == torch.ones(4, 4).tril().int().tolist()


@pytest.fixture(scope="module")
def scorer() -> tuple[TokenScorer, Any]:
    model = load_model(Path(resolve_model(MODEL)), TrainerConfig(dtype="float32"))
    return TokenScorer(model), model


@settings(max_examples=15, deadline=None)
@given(groups_of_rows.filter(lambda rows: len(bundle(rows, 256, 1)) < len(rows)))
def test_a_bundle_scores_as_its_rows(scorer: tuple[TokenScorer, Any], rows: list[Row]) -> None:
    def scores(bundles: list[Bundle]) -> dict[tuple[TrajectoryId, int], float]:
        part = collate(bundles, CPU)
        with torch.no_grad():
            got = scorer[0].score(scorer[1], part.input_ids, part.positions, part.targets, 1.0, **part.shaped)
        names = [(r.id, number) for r in rows_of(bundles) for number in range(r.loss_tokens)]
        return dict(zip(names, got.logprobs.tolist(), strict=True))

    assert scores(bundle(rows, 256, 1)) == pytest.approx(scores(alone(rows)), abs=1e-5)


def test_whether_a_model_can_share_is_tried() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 99,
    }

    def make(config: object, attention: str = "sdpa") -> object:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    assert can_share(make(LlamaConfig(**small)))
    assert not can_share(make(LlamaConfig(**small), "eager"))  # it would add the mask, not obey it
    assert can_share(make(Qwen2Config(**small)))
    assert not can_share(make(MistralConfig(**small, sliding_window=16)))
    assert not can_share(make(Qwen2Config(**small, use_sliding_window=True, sliding_window=16, max_window_layers=0)))


def test_a_model_that_passes_state_from_token_to_token_cannot_share() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=4)
    assert not can_share(AutoModelForCausalLM.from_config(config))
