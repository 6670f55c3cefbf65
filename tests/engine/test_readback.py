"""Where tensors of a snapshot are looked for in a model, without a server."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from actors.sglang import loader
from actors.sglang.errors import WeightLoadError
from actors.sglang.loader import Order, encode_order, read_report
from actors.sglang.readback import place
from actors.sglang.update import merge
from pearl.weights.snapshot import Manifest, snapshot_directory, write_snapshot


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 8)
        self.gate_up_proj = nn.Linear(4, 6, bias=False)
        self.norm = nn.Linear(4, 1, bias=False)


class Model(nn.Module):
    """With SGLang's names: fused projections, a padded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 4)
        self.layer = Layer()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        with torch.no_grad():
            self.embed_tokens.weight[:10] = given["embed_tokens.weight"]
            for kind in ("weight", "bias"):
                parts = [given[f"layer.{part}_proj.{kind}"] for part in "qkv"]
                getattr(self.layer.qkv_proj, kind).copy_(torch.cat(parts))
            parts = [given["layer.gate_proj.weight"], given["layer.up_proj.weight"]]
            self.layer.gate_up_proj.weight.copy_(torch.cat(parts))
            self.layer.norm.weight.copy_(given["layer.norm.weight"])


def weights() -> dict[str, torch.Tensor]:
    made = {"embed_tokens.weight": torch.randn(10, 4), "layer.norm.weight": torch.randn(1, 4)}
    for part, rows in (("q", 4), ("k", 2), ("v", 2)):
        made[f"layer.{part}_proj.weight"] = torch.randn(rows, 4)
        made[f"layer.{part}_proj.bias"] = torch.randn(rows)
    for part in ("gate", "up"):
        made[f"layer.{part}_proj.weight"] = torch.randn(3, 4)
    return made


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_rank", lambda: (0, 1))


def load(root: Path, tensors: dict[str, torch.Tensor], model: nn.Module) -> tuple[loader.Report, Manifest]:
    manifest = write_snapshot(root, 1, "hash", tensors.items())
    order = Order(str(snapshot_directory(root, 1)), 1, "hash", str(root / "report"))
    loader.load_snapshot(model, pickle.loads(base64.b64decode(encode_order(order))))
    report = read_report(order, 0)
    assert report is not None
    return report, manifest


def test_fused_and_padded_tensors_read_back(tmp_path: Path, one_rank: None) -> None:
    report, manifest = load(tmp_path, weights(), Model())
    assert report.error == ""
    assert report.checksum == manifest.checksum
    assert (report.verified, report.unverified) == (len(manifest.tensors), [])


def test_load_that_changes_a_bit_is_noticed(tmp_path: Path, one_rank: None) -> None:
    class Wrong(Model):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            with torch.no_grad():
                self.layer.qkv_proj.weight[5] += 1e-6

    report, _ = load(tmp_path, weights(), Wrong())
    assert "layer.k_proj.weight reads back otherwise" in report.error
    assert report.touched


def test_exception_in_the_model_is_reported_not_raised(tmp_path: Path, one_rank: None) -> None:
    class Broken(Model):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            raise RuntimeError("no room")

    report, _ = load(tmp_path, weights(), Broken())
    assert report.error == "RuntimeError: no room"


def test_unknown_layout_is_unverified_never_verified(tmp_path: Path, one_rank: None) -> None:
    class Experts(Model):
        def __init__(self) -> None:
            super().__init__()
            self.w13 = nn.Parameter(torch.zeros(4, 4))

    tensors = weights() | {"experts.0.gate_proj.weight": torch.randn(3, 4)}
    report, manifest = load(tmp_path, tensors, Experts())
    assert report.error == ""
    assert report.unverified == ["experts.0.gate_proj.weight"]
    assert report.verified == len(manifest.tensors) - 1
    assert report.checksum != manifest.checksum


def test_tied_head_is_the_embedding() -> None:
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(64, 4)
    model.config = type("Config", (), {"tie_word_embeddings": True})()
    assert place(model, Manifest(1, "h", ())).missing == ["model.embed_tokens.weight"]


def test_merge_takes_the_worst_rank() -> None:
    one = loader.Report(3, 0, verified=5, checksum="c", load_s=1.0)
    two = loader.Report(3, 1, verified=4, unverified=["x"], checksum="c", load_s=2.0)
    merged = merge([one, two], 3)
    assert (merged.verified, merged.unverified, merged.load_s) == (4, ("x",), 2.0)
    with pytest.raises(WeightLoadError, match="no report"):
        merge([one, None], 3)
