"""From the typed configuration to the flags and the environment of one SGLang server; refuses what cannot work."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from actors.sglang import plugin, transfer
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.errors import UserError

Device = Literal["cpu", "cuda"]

SGLANG_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
"""Weight updates inside a session came with 0.5.21. Only the last one has been run; later ones are refused because the
engine relies on the names of endpoints and reply fields."""
TORCH_MIN, TORCH_END = (2, 13), (2, 15)
"""2.13 has been run (CPU); SGLang 0.5.22 and 0.5.23 name 2.14.1 in their metadata."""

LOADER = "actors.sglang.loader.load_snapshot"
"""Dotted name under which SGLang finds our weight loader; also the `load_format` of an update."""
NO_VERSION = -1
"""Weight version of an engine that was never synced: its weights come from the model directory."""

TYPED_FLAGS = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--context-length": "model.context_tokens",
    "--device": "engine.device",
    "--tp-size": "engine.tensor_parallel",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--max-total-tokens": "engine.max_total_tokens",
    "--max-running-requests": "engine.max_running_requests",
    "--mem-fraction-static": "engine.mem_fraction_static",
    "--attention-backend": "engine.attention_backend",
    "--disable-radix-cache": "engine.disable_radix_cache",
    "--log-level": "engine.log_level",
    "--stream-interval": "engine.stream_interval",
    "--random-seed": "seed",
}
"""Flags that a key of the configuration sets."""
OWN_FLAGS = (
    "--host",
    "--port",
    "--custom-weight-loader",
    "--weight-version",
    "--incremental-streaming-output",
    "--enable-metrics",
    "--skip-tokenizer-init",
    "--tokenizer-worker-num",
    "--disaggregation-mode",
    "--disaggregation-bootstrap-port",
    "--disaggregation-transfer-backend",
    "--disaggregation-decode-extra-slots",
    "--disaggregation-decode-enable-radix-cache",
    "--disaggregation-decode-retraction-backup",
    "--enable-pd-role-switch",
    "--lifeline-fd",
    "--scratch",
)
"""Flags that PEARL sets itself, or that would break what it relies on."""


def resolve_device(engine: EngineConfig) -> Device:
    """`engine.device`, with `auto` answered by what torch sees. UserError if CUDA is asked for and missing."""
    if engine.device == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if engine.device == "cuda" and not available:
        raise UserError(
            "engine.device = cuda, but torch sees no CUDA device here",
            "Set engine.device to cpu or auto, or run where a GPU and its driver are visible.",
        )
    return "cuda" if available else "cpu"


def check_versions() -> None:
    """UserError if sglang or torch is missing or of a version that is not supported. Imports neither."""
    sglang = _version("sglang")
    supported = f"{SGLANG_VERSIONS[0]} to {SGLANG_VERSIONS[-1]}"
    install = f"pip install --no-deps sglang=={SGLANG_VERSIONS[-1]}"
    if sglang is None:
        raise UserError(
            "sglang is not installed",
            f"On a CPU run `make install` or `{install}`; on a GPU install `pearl-rl[gpu]`.",
        )
    if sglang not in SGLANG_VERSIONS:
        raise UserError(f"sglang {sglang} is not supported; PEARL works with {supported}", f"Run `{install}`.")
    torch = _version("torch")
    wanted = "{}.{} or newer, below {}.{}".format(*TORCH_MIN, *TORCH_END)
    if torch is None or not TORCH_MIN <= _major_minor(torch) < TORCH_END:
        raise UserError(
            f"torch {torch or 'is missing'}: sglang {sglang} needs torch {wanted}",
            "Run `pip install torch==2.13.0` on a CPU, or install `pearl-rl[gpu]` on a GPU.",
        )


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """All that is decided before an engine starts: its device, flags and environment variables."""

    device: Device
    flags: tuple[str, ...]
    environment: dict[str, str]


def plan_server(
    engine: EngineConfig,
    model: ModelConfig,
    model_directory: Path,
    *,
    port: int,
    seed: int,
    kv: transfer.KvEndpoint | None = None,
) -> ServerPlan:
    """The command line of one server, which can take any role if `kv` says where its KV travels, else is colocated.

    Raises UserError for whatever could not work, before anything starts.
    """
    check_versions()
    if kv is not None:
        _check_transfer(engine)
    device = resolve_device(engine)
    if device == "cpu" and engine.tensor_parallel > 1:
        raise UserError(
            f"engine.tensor_parallel = {engine.tensor_parallel} on a CPU",
            "Set it to 1; several workers on one machine give more throughput.",
        )
    _check_context(model, model_directory)
    _check_extra(engine.extra_args)
    flags = [
        "--model-path", str(model_directory),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--device", device,
        "--dtype", model.dtype,
        "--context-length", str(model.context_tokens),
        "--tp-size", str(engine.tensor_parallel),
        "--max-total-tokens", str(engine.max_total_tokens),
        "--max-running-requests", str(engine.max_running_requests),
        "--random-seed", str(seed),
        "--stream-interval", str(engine.stream_interval),
        "--incremental-streaming-output",
        "--custom-weight-loader", LOADER,
        f"--weight-version={NO_VERSION}",
        "--enable-metrics",
        "--sleep-on-idle",
        "--log-level", engine.log_level,
        "--log-level-http", "warning",
    ]  # fmt: skip
    attention = engine.attention_backend or ("torch_native" if device == "cpu" else None)
    if attention:
        flags += ["--attention-backend", attention]
    if engine.disable_radix_cache:
        flags.append("--disable-radix-cache")
    if device == "cpu":
        flags.append("--skip-server-warmup")
    else:
        flags.append("--enable-memory-saver")
        if engine.mem_fraction_static is not None:
            flags += ["--mem-fraction-static", str(engine.mem_fraction_static)]
    if kv is not None:
        flags += transfer.flags(kv, device, engine.max_running_requests)
    flags += engine.extra_args
    environment = _environment(engine, device) | (transfer.environment(kv) if kv else {})
    return ServerPlan(device, tuple(flags), environment)


def _check_transfer(engine: EngineConfig) -> None:
    if (lacking := transfer.missing()) is not None:
        raise lacking
    if engine.disable_radix_cache:
        raise UserError(
            "engine.disable_radix_cache with prefill-decode serving: roles keep their prefixes by it",
            "Leave it off, or serve colocated.",
        )


def _environment(engine: EngineConfig, device: Device) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        plugin.SWITCH: "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        # An engine is on one host, and so are its ranks.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Log-probs of the distribution at the request's temperature, which is what the trainer recomputes.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # A plain /health answers at once and also while paused; /health_generate still generates a token.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if device == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(engine.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return environment


def _check_context(model: ModelConfig, model_directory: Path) -> None:
    config = json.loads((model_directory / "config.json").read_text())
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and model.context_tokens > longest:
        raise UserError(
            f"model.context_tokens = {model.context_tokens} is above the {longest} positions of the model",
            f"Lower it to {longest} or less.",
        )


def _check_extra(extra: tuple[str, ...]) -> None:
    for argument in extra:
        if not argument.startswith("--"):
            continue
        flag = argument.split("=", 1)[0].replace("_", "-")
        # argparse takes an unambiguous beginning of a flag for the flag, so a beginning counts as a repetition too.
        for typed, key in TYPED_FLAGS.items():
            if typed.startswith(flag):
                raise UserError(f"engine.extra_args repeats {argument!r}, which {key} sets", f"Set {key} instead.")
        for own in OWN_FLAGS:
            if own.startswith(flag):
                raise UserError(
                    f"engine.extra_args sets {argument!r}, which PEARL decides itself", "Remove it from the list."
                )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)
