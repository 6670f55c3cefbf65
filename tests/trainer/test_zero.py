"""One rank in this process, on the tiny model: against a plain reference, and what it promises about its state."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Trajectory
from pearl.models import resolve_model
from pearl.weights.snapshot import SnapshotError, read_tensors
from tests.trainer.reference import ReferenceTrainer
from tests.trainer.samples import MODEL, config, make_group, make_groups, start
from trainer import gather
from trainer.state import TrainerStateError
from trainer.zero import ZeroTrainer

Start = Callable[..., ZeroTrainer]
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FLAT = [make_group(900, [1.0, 1.0]), make_group(901, [0.0, 0.0, 0.0])]
FULL_GRPO = {"kl_coefficient": 0.1, "minibatches": 2, "importance_cap": 1.5}


@pytest.fixture
def started() -> Iterator[Start]:
    """Starts trainers; a process has one at a time, so each start closes the one before."""
    trainers: list[ZeroTrainer] = []

    def begin(trainer_config: TrainerConfig, **values: Any) -> ZeroTrainer:
        for trainer in trainers:
            trainer.close()
        trainers.append(start(trainer_config, **values))
        return trainers[-1]

    yield begin
    for trainer in trainers:
        trainer.close()


def gradients(trainer: ZeroTrainer, groups: list[list[Trajectory]]) -> dict[str, torch.Tensor]:
    """Gradients of one step at stage 0 in fp32, where the optimizer sees the parameters themselves."""
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        caught.update((n, p.grad.clone()) for n, p in trainer._engine.module.named_parameters())

    handle = trainer._engine.optimizer.register_step_pre_hook(catch)
    trainer.train_step(trainer.step + 1, groups)
    handle.remove()
    return caught


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_matches_the_reference(started: Start, temperature: float) -> None:
    settings = config(gradient_clip=0.0, grpo={"importance_cap": 1.5})
    reference = ReferenceTrainer(settings, temperature)
    reference.train_step(make_groups(1))
    trainer = started(settings, temperature=temperature)
    got = gradients(trainer, make_groups(1))
    assert got.keys() == reference.gradients.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, reference.gradients[name], atol=1e-6, rtol=1e-4, msg=name)


@ALL_STAGES
def test_curve_matches_the_reference(started: Start, stage: int) -> None:
    """KL, two updates a batch, cut importance weights, clipped gradients, weight decay."""
    settings = config(zero_stage=stage, gradient_clip=0.5, weight_decay=0.1, micro_batch_tokens=64, grpo=FULL_GRPO)
    trainer, reference = started(settings), ReferenceTrainer(settings)
    for step in range(1, 4):
        metrics = trainer.train_step(step, make_groups(step))
        expected = reference.train_step(make_groups(step))
        assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_bfloat16_follows_fp32_at_every_stage(started: Start) -> None:
    """Above all that no stage's optimizer steps by another amount: the distance from the initial model says so."""
    distances = {}
    for dtype, stage in [("float32", 2), ("bfloat16", 0), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)]:
        trainer = started(config(dtype=dtype, zero_stage=stage, grpo={"kl_coefficient": 1e-6}))
        distances[dtype, stage] = [trainer.train_step(s, make_groups(s))["kl_to_initial"] for s in (1, 2, 3)]
    expected = distances.pop(("float32", 2))
    assert expected[0] == 0.0 < expected[1]
    for got in distances.values():
        assert got == pytest.approx(expected, rel=0.05)


def test_the_cut_into_micro_batches_does_not_change_the_gradient(started: Start) -> None:
    whole = gradients(started(config(gradient_clip=0.0, micro_batch_tokens=4096)), make_groups(1))
    trainer = started(config(gradient_clip=0.0, micro_batch_tokens=64))
    cut = gradients(trainer, make_groups(1))
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_activation_checkpointing_changes_nothing(started: Start) -> None:
    for stage in (0, 3):
        plain = started(config(zero_stage=stage)).train_step(1, make_groups(1))
        trainer = started(config(zero_stage=stage, activation_checkpointing=True))
        assert trainer._engine.module.is_gradient_checkpointing
        metrics = trainer.train_step(1, make_groups(1))
        assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx((plain["loss"], plain["grad_norm"]), abs=1e-6)


def test_a_batch_without_signal_moves_nothing_but_the_counters(started: Start) -> None:
    trainer = started(config(weight_decay=0.1, schedule={"kind": "linear"}))
    trainer.train_step(1, make_groups(1))
    before = trainer.checksum()
    metrics = trainer.train_step(2, FLAT)
    assert trainer.checksum() == before
    assert (metrics["grad_norm"], metrics["loss_tokens"], metrics["updates"]) == (0.0, 0.0, 0.0)
    assert (metrics["skipped_updates"], metrics["zero_variance_groups"]) == (1.0, 2.0)
    assert trainer.step == 2 and metrics["lr"] == pytest.approx(1e-3 * 0.8)
    assert metrics["tokens_trained"] == sum(len(t.token_ids) for group in FLAT for t in group)
    trainer.train_step(3, make_groups(3))
    assert trainer.checksum() != before


def test_kept_zero_variance_groups_count_in_the_denominator(started: Start) -> None:
    groups = [make_group(1, [0.0, 1.0]), make_group(2, [1.0, 1.0])]
    dropped = started(config()).train_step(1, groups)
    kept = started(config(grpo={"zero_variance": "keep"})).train_step(1, groups)
    assert kept["loss_tokens"] == sum(t.generated_tokens for group in groups for t in group)
    assert dropped["loss_tokens"] == sum(t.generated_tokens for t in groups[0])
    share = dropped["loss_tokens"] / kept["loss_tokens"]
    assert kept["loss"] == pytest.approx(dropped["loss"] * share, rel=1e-5)
    assert kept["grad_norm"] == pytest.approx(dropped["grad_norm"] * share, rel=1e-4)
    trainer = started(config(grpo={"zero_variance": "keep"}))
    assert trainer.train_step(1, FLAT)["skipped_updates"] == 1.0
    trainer = started(config(grpo={"zero_variance": "keep", "kl_coefficient": 0.1}))
    assert trainer.train_step(1, FLAT)["updates"] == 1.0


def test_diagnostics_of_a_batch_sampled_by_the_trained_weights(started: Start) -> None:
    """Log-probs of the rollout set to the trainer's own: no mismatch, and staleness counts from the last export."""
    trainer = started(config())
    group = make_group(5, [0.0, 1.0, 0.5], version=3)
    reference = ReferenceTrainer(config())
    exact = [_with_logprobs(trajectory, reference) for trajectory in group]
    trainer.version = 5
    metrics = trainer.train_step(1, [exact])
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["logprob_delta_max"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["importance_cap_share"] == metrics["clip_share"] == 0.0
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 2.0)
    assert metrics["entropy"] == pytest.approx(10.8, abs=0.05)  # log 49152: a random model's
    assert metrics["reward_mean"] == 0.5


def _with_logprobs(trajectory: Trajectory, reference: ReferenceTrainer) -> Trajectory:
    from dataclasses import replace

    from tests.trainer.reference import score

    with torch.no_grad():
        scores = iter([float(value) for value in score(reference.model, trajectory, 1.0)])
    segments = [
        s if s.logprobs is None else replace(s, logprobs=tuple(next(scores) for _ in s.token_ids))
        for s in trajectory.segments
    ]
    return replace(trajectory, segments=tuple(segments))


@ALL_STAGES
def test_export_is_the_model(started: Start, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and values of the parameters, tied head once; transformers loads it and gives the trained logits."""
    from transformers import AutoModelForCausalLM

    trainer = started(config(zero_stage=stage))
    trainer.train_step(1, make_groups(1))
    manifest = trainer.export(tmp_path, 1)
    assert manifest is not None
    assert manifest.checksum == trainer.checksum()
    monkeypatch.setattr(gather, "GATHER_BYTES", 1)
    assert manifest.checksum == trainer.checksum()
    tensors = dict(read_tensors(tmp_path / "v1"))
    model = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    assert "lm_head.weight" not in tensors
    untrained = model(torch.tensor([[11, 12, 13]])).logits
    model.load_state_dict(tensors, strict=False)
    logits = model(torch.tensor([[11, 12, 13]])).logits
    with torch.no_grad():
        trained = trainer._engine(input_ids=torch.tensor([[11, 12, 13]]), use_cache=False).logits
    torch.testing.assert_close(logits, trained, atol=1e-6, rtol=0)
    assert (logits - untrained).abs().max() > 1e-3


def test_an_export_that_fails_leaves_the_trainer_usable(started: Start, tmp_path: Path) -> None:
    trainer = started(config(zero_stage=3))
    trainer.export(tmp_path, 1)
    with pytest.raises(SnapshotError, match="never reused"):
        trainer.export(tmp_path, 1)
    assert trainer.version == 1
    assert trainer.train_step(1, make_groups(1))["updates"] == 1.0


def test_wrong_calls_say_so_and_change_nothing(started: Start) -> None:
    trainer = started(config())
    trainer.train_step(3, make_groups(3))
    before = trainer.checksum()
    with pytest.raises(TrainerStateError, match="step 3 after step 3"):
        trainer.train_step(3, make_groups(3))
    with pytest.raises(ValueError, match=r"micro_batch_tokens = 256"):
        trainer.train_step(4, [make_group(1, [0.0, 1.0], prompt=(300, 300))])
    assert (trainer.checksum(), trainer.step) == (before, 3)
    with pytest.raises(RuntimeError, match="close the other trainer"):
        start(config())
    trainer.close()
    trainer.close()
    with pytest.raises(TrainerStateError, match="closed"):
        trainer.checksum()


def test_ranks_listen_on_loopback_alone(started: Start) -> None:
    started(config(zero_stage=2))
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) == {"127.0.0.1"}


def test_after_a_broken_step_only_close_is_left(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = started(config())

    def die(*_: object, **__: object) -> None:
        raise ConnectionError("peer gone")

    with monkeypatch.context() as patch:
        patch.setattr(trainer._engine, "step", die)
        with pytest.raises(ConnectionError):
            trainer.train_step(1, make_groups(1))
    assert (trainer.state, trainer.step) == ("broken", 0)
    with pytest.raises(TrainerStateError, match="broken"):
        trainer.train_step(1, make_groups(1))
