"""The model and its DeepSpeed engine, in a configuration that builds nothing with a compiler."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pearl.config.trainer import TrainerConfig
from trainer.world import World

REDUCE_BUCKET_ELEMENTS = 50_000_000
PERSISTENT_ELEMENTS = 10_000
"""ZeRO-3 keeps parameters up to this size whole on every rank (norms, biases): to gather them would cost more."""


def load_model(directory: Path, config: TrainerConfig) -> Any:
    """Causal language model on the CPU in the training dtype, with PyTorch's own attention and without dropout.

    Dropout would make the log-probs of one weight version differ from call to call, and the policy ratio with them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, config.dtype), attn_implementation="sdpa", local_files_only=True
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def deepspeed_config(config: TrainerConfig) -> dict[str, Any]:
    """DeepSpeed's JSON. The caller owns the boundary: any number of backwards, then one step."""
    stage = config.zero_stage
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Plain fp32 without ZeRO: DeepSpeed clips there without telling the norm, so `GradientNorm` clips instead.
        "gradient_clipping": 0.0 if is_plain(config) else config.gradient_clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                # Set before every step. Not here: stage 0 in bfloat16 takes a step (with zero gradients) at start-up.
                "lr": 0.0,
                "betas": list(config.betas),
                "eps": 1e-8,
                "weight_decay": config.weight_decay,
                "torch_adam": True,
                # One pass without temporaries: a ninth of the time, and two copies of the weights less at the peak.
                "fused": True,
            },
        },
    }
    if config.dtype == "bfloat16":
        result["bf16"] = {"enabled": True}
    return result


def is_plain(config: TrainerConfig) -> bool:
    """Stage 0 in fp32: DeepSpeed adds no optimizer of its own around torch's."""
    return config.zero_stage == 0 and config.dtype == "float32"


def forget_engines() -> None:
    """Make ZeRO-3 number modules and parameters from 0 again, and let go of the models of engines before.

    It numbers them per process, and compares the numbers over ranks: a rank that has trained before would disagree
    with a new one, which raises there and waits for ever here. And a step that broke off leaves modules on its stack.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    # The counter is a default argument.
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()


def start_engine(model: Any, config: TrainerConfig) -> Any:
    """Wrap the model; collective. The garbage collector then leaves what start-up made alone (0.05 s against 1 s)."""
    import deepspeed

    forget_engines()
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(
        model=model, config=deepspeed_config(config), model_parameters=list(model.parameters())
    )
    if config.zero_stage == 0:
        # That start-up step counts in AdamW's bias correction, and made the first update half as large; forget it.
        engine.basic_optimizer.state.clear()
    gc.collect()
    gc.freeze()
    return engine


class GradientNorm:
    """Global gradient norm of the last update, before clipping, at every stage."""

    def __init__(self, engine: Any, config: TrainerConfig) -> None:
        self._engine = engine
        self._plain: Tensor | None = None
        if is_plain(config):
            limit = config.gradient_clip or float("inf")

            def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
                parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                # Summed in fp64 as ZeRO does; in fp32 it is off by 2e-5 for a tensor of three million elements.
                norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters]
                self._plain = torch.linalg.vector_norm(torch.stack(norms))
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, self._plain)

            engine.optimizer.register_step_pre_hook(clip)

    def value(self) -> float:
        norm = self._engine.get_global_grad_norm() if self._plain is None else self._plain
        return float(norm)


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def settle_optimizer(engine: Any, config: TrainerConfig) -> None:
    """Call after a checkpoint was loaded: DeepSpeed then has the optimizer's settings from there, not from `config`.

    And after a universal one all parts of ZeRO-3's weights share one step tensor in host memory: each part would count
    as a step, and a fused AdamW on a GPU would refuse it. So each parameter gets its own state on its own device.
    """
    for group in engine.optimizer.param_groups:
        group |= {"betas": tuple(config.betas), "weight_decay": config.weight_decay}
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = config.gradient_clip
    for parameter, state in engine.basic_optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value):
                state[name] = value.to(parameter.device, copy=name == "step")


def reference_model(directory: Path, config: TrainerConfig, world: World) -> Any:
    """The initial model, frozen, whole on every rank, in the training dtype (1 x the weights' bytes)."""
    return load_model(directory, config).eval().requires_grad_(False).to(world.device)
