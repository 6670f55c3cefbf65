"""Where each tensor of a snapshot lies in a loaded model, so that it can be read back after a load.

SGLang fuses query, key and value of an attention into one `qkv_proj`, and gate and up of an MLP into one
`gate_up_proj`, rows one after the other; it pads vocabularies. That covers dense models built like Llama, Qwen2 and
Qwen3 on one GPU. What does not fit this picture is *unknown*, and reported as such, never as verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pearl.weights.snapshot import Manifest, TensorEntry

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")
"""Their rows are padded to a multiple of 64."""


@dataclass(slots=True)
class Placement:
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name in the snapshot: the part of the model's memory that holds it."""
    unknown: list[str] = field(default_factory=list)
    """Names in the snapshot whose place in the model is not known."""
    mismatched: list[str] = field(default_factory=list)
    """Known places of another shape or dtype, as readable remarks."""
    missing: list[str] = field(default_factory=list)
    """Parameters of the model that no tensor of the snapshot covers."""


def place(model: Any, manifest: Manifest) -> Placement:
    """Find every tensor of `manifest` in `model` (a module with SGLang's parameter names)."""
    parameters: dict[str, torch.Tensor] = {name: p.data for name, p in model.named_parameters()}
    entries = {entry.name: entry for entry in manifest.tensors}
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    placement, covered = Placement(), set()
    for entry in manifest.tensors:
        name = entry.name
        if tied and name == "lm_head.weight" and name not in parameters:
            name = "model.embed_tokens.weight"
        if name in parameters:
            view = parameters[name]
            if name.endswith(PADDED):
                view = view[: entry.shape[0]]
            covered.add(name)
        else:
            fused = _fused(entry, entries)
            if fused is None or fused[0] not in parameters:
                placement.unknown.append(entry.name)
                continue
            name, offset, total = fused
            if parameters[name].shape[0] != total:
                placement.mismatched.append(f"{name} has {parameters[name].shape[0]} rows, the snapshot {total}")
                continue
            view = parameters[name][offset : offset + entry.shape[0]]
            covered.add(name)
        dtype = str(view.dtype).removeprefix("torch.")
        if (tuple(view.shape), dtype) != (entry.shape, entry.dtype):
            placement.mismatched.append(
                f"{entry.name} is {entry.dtype} {list(entry.shape)}, in the engine {dtype} {list(view.shape)}"
            )
            continue
        placement.views[entry.name] = view
    if tied:
        covered.add("lm_head.weight")
    placement.missing = sorted(set(parameters) - covered)
    return placement


def _fused(entry: TensorEntry, entries: dict[str, TensorEntry]) -> tuple[str, int, int] | None:
    """Fused parameter, first row and rows in all of one part, from its siblings' shapes; None if it is no such part."""
    owner, _, kind = entry.name.rpartition(".")
    prefix, _, module = owner.rpartition(".")
    for fused, parts in FUSED.items():
        if module in parts:
            siblings = [entries.get(f"{prefix}.{part}.{kind}") for part in parts]
            rows = [sibling.shape[0] for sibling in siblings if sibling is not None]
            if len(rows) < len(parts):
                return None
            return f"{prefix}.{fused}.{kind}", sum(rows[: parts.index(module)]), sum(rows)
    return None
