"""What can be known to fail before any process starts: model, versions, sandboxes, devices, memory, ports.

The memory figures are rules of thumb from measurements on a CPU (see docs/configuration.md); a plan that does not fit
is refused, because a machine that runs out of memory kills processes at random.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import psutil

from actors.sglang.args import check_versions, plan_server
from actors.sglang.transfer import interface_address, missing
from envs.registry import find_factory
from envs.sandbox.factory import make_backend
from pearl.cluster.binding import Binding, bind
from pearl.cluster.local import require_listening
from pearl.cluster.providers import check_provider
from pearl.config import RunConfig
from pearl.errors import UserError
from pearl.live.machine import make_scheduler
from pearl.live.slots import availability
from pearl.models import resolve_model

GB = 1e9
ENGINE_BASE_GB = 2.4
"""Resident memory of an SGLang server's three processes without weights and KV cache."""
TRAINER_BASE_GB = 1.2
"""A rank's Python, torch, transformers and DeepSpeed."""
WORKER_GB = 0.25
"""A Dask worker process."""
TRAINER_BYTES_PER_PARAMETER = 20
"""bf16 weights and gradients (4), fp32 gradients (4), master weights (4), AdamW's moments (8); fp32 needs less."""
ACTIVATION_BYTES = 40
"""Per token, layer and hidden unit, without activation checkpointing (measured 30 to 45 with sdpa attention)."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    layers: int
    hidden: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a run can start with."""

    model_directory: Path
    bindings: dict[str, Binding]
    tasks: int
    gpus: int
    memory_gb: dict[str, float]
    """Planned resident memory by part."""
    notices: tuple[str, ...]


async def preflight(config: RunConfig) -> Preflight:
    """Check everything that a run needs. Raises UserError for the first thing that cannot work."""
    check_versions()
    find_factory(config.environment.family)
    require_listening(config.cluster.host, config.cluster.scheduler_port)
    model_directory = resolve_model(config.model.path)
    plan_server(config.engine, config.model, model_directory, port=1, seed=config.seed)
    make_scheduler(config, model_directory, tasks=1)  # its profile can be read
    availability(config)
    if config.elastic.splits:
        _check_transfer(config)
    await check_provider(config)
    gpus = _gpus(config)
    bindings = bind(config, gpus)
    memory = {} if gpus else plan_memory(config, model_size(model_directory))
    available = config.cluster.memory_limit_gb or available_memory_gb()
    if sum(memory.values()) > available:
        parts = ", ".join(f"{name} {gb:.1f}" for name, gb in memory.items())
        raise UserError(
            f"the run needs about {sum(memory.values()):.1f} GB of memory ({parts}), {available:.1f} GB are available",
            "Lower cluster.rollout_workers, elastic.preemptible_slots, elastic.overlap_slots, trainer.ranks, "
            "trainer.micro_batch_tokens or engine.max_total_tokens.",
        )
    tasks = await _check_environment(config)
    return Preflight(model_directory, bindings, tasks, gpus, memory, tuple(_notices(config)))


def plan_memory(config: RunConfig, size: ModelSize) -> dict[str, float]:
    """Planned resident memory of a CPU run, GB by part."""
    bytes_each = 2 if config.model.dtype == "bfloat16" else 4
    kv = config.engine.max_total_tokens * size.kv_bytes_per_token * bytes_each
    engine = ENGINE_BASE_GB + (size.parameters * bytes_each + kv) / GB
    t = config.trainer
    sharded = size.parameters * TRAINER_BYTES_PER_PARAMETER / (t.ranks if t.zero_stage else 1)
    reference = size.parameters * 4 if t.grpo.kl_coefficient else 0
    activations = t.micro_batch_tokens * size.layers * size.hidden * ACTIVATION_BYTES
    rank = TRAINER_BASE_GB + (sharded + reference + (0.1 if t.activation_checkpointing else 1.0) * activations) / GB
    preemptible = config.elastic.preemptible_slots if config.cluster.kind == "local" else 0
    workers = config.cluster.rollout_workers + preemptible + config.elastic.overlap_slots
    return {
        f"{workers} engine(s)": workers * engine,
        f"{t.ranks} trainer rank(s)": t.ranks * rank,
        "worker processes": (workers + config.environment.workers + 2) * WORKER_GB,
        "snapshots": 2 * size.parameters * bytes_each / GB,
    }


def model_size(directory: Path) -> ModelSize:
    """Sizes from config.json and the headers of the safetensors files (no weights are read)."""
    config = json.loads((directory / "config.json").read_text())
    parameters = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for length in entry["shape"]:
                    count *= length
                parameters += count
    layers, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
    heads = config.get("num_attention_heads") or 1
    width = config.get("head_dim") or hidden // heads
    kv = 2 * layers * (config.get("num_key_value_heads") or heads) * width
    return ModelSize(parameters, layers, hidden, kv)


def available_memory_gb() -> float:
    """Memory that is free here, or left under the control group's limit if that is less."""
    available = psutil.virtual_memory().available
    for path in CGROUP_LIMITS:
        try:
            available = min(available, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return available / GB


def _check_transfer(config: RunConfig) -> None:
    if (lacking := missing()) is not None:
        remedy = f"{lacking.remedy} Or set elastic.prefill_decode to false."
        raise UserError(f"elastic.policy = {config.elastic.policy} splits prefill from decode. {lacking.what}", remedy)
    interface_address(config.cluster.kv_interface)


def _gpus(config: RunConfig) -> int:
    """GPUs that torch sees, 0 for a run on the CPU."""
    if config.engine.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


async def _check_environment(config: RunConfig) -> int:
    """Run one sandbox and make the task family once; the number of its tasks."""
    backend = make_backend(config.environment.sandbox, name="preflight")
    try:
        await backend.probe()
        return len(find_factory(config.environment.family)(config.environment, backend).tasks)
    finally:
        await backend.close()


def _notices(config: RunConfig) -> list[str]:
    sampling, p = config.engine.sampling, config.pipeline
    notices = []
    if sampling.temperature == 0:
        notices.append("engine.sampling.temperature = 0: all samples of a group are alike, nothing can be learnt")
    if sampling.top_p < 1 or sampling.top_k > 0:
        notices.append("engine.sampling cuts the distribution (top_p, top_k): importance ratios are biased")
    slots = config.environment.workers * config.environment.sandboxes_per_worker
    if slots < p.max_concurrent_trajectories:
        notices.append(
            f"environment.workers x sandboxes_per_worker = {slots} bounds the concurrency below "
            f"pipeline.max_concurrent_trajectories = {p.max_concurrent_trajectories}"
        )
    return notices
