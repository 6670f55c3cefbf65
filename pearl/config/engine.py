"""`engine:` one SGLang server per rollout worker."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0.0)
    """0 is greedy. Log-probs are recorded at this temperature, and trained on at the same one."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Values below 1 make rollout and trainer log-probs incomparable; a warning says so."""
    top_k: int = Field(-1, ge=-1)
    """-1 keeps all tokens."""
    stop: tuple[str, ...] = ()
    """Extra stop strings; the model's end tokens always stop."""


class EngineConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where torch sees it, else the CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine. On a CPU only 1."""
    max_total_tokens: int = Field(16384, ge=256)
    """Room of the KV cache, tokens. 0.5.23 on a CPU sizes nothing by itself; on a GPU it bounds the pool."""
    max_running_requests: int = Field(16, ge=1)
    """Requests that one engine decodes at once; the scheduler keeps the rest queued."""
    mem_fraction_static: float | None = Field(None, gt=0.0, lt=1.0)
    """GPU only: share of device memory for weights and KV cache. None leaves it to SGLang."""
    attention_backend: str | None = None
    """None: `torch_native` on a CPU, SGLang's own choice on a GPU."""
    stream_interval: int = Field(8, ge=1)
    """Tokens that the server collects before it sends them on. An abort loses none of them; when a server dies, at most
    this many unsent tokens per request are generated again. Higher is cheaper."""
    disable_radix_cache: bool = False
    """Switch the prefix cache off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level of the server; its log lies in `run_dir/engines/`."""
    threads: int = Field(1, ge=1)
    """OpenMP threads of a CPU engine. On a shared machine more than one is slower."""
    extra_args: tuple[str, ...] = ()
    """More command-line flags for `sglang.launch_server`, passed on as they are, last. No typed key may be repeated."""
    sampling: SamplingConfig = SamplingConfig()
