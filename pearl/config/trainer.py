"""`trainer:` DeepSpeed ZeRO and the GRPO objective."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class GrpoConfig(Section):
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """Lower clip: the policy ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0.0)
    """Upper clip: the policy ratio is clipped at 1 + clip_high (asymmetric, as in DAPO)."""
    importance_cap: float = Field(2.0, gt=0.0)
    """Truncated importance sampling: weight min(exp(trainer log-prob - rollout log-prob), cap) per token."""
    kl_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the k3 estimate of KL(policy || initial model). 0 keeps no reference model."""
    normalise_by_std: bool = True
    """Divide group advantages by the group's standard deviation (False: mean-centred only)."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal: `drop` leaves them out of the loss and its denominator, `keep` counts their
    tokens with advantage 0 (with KL they still matter). They count as trained either way."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates per batch. Above 1 the old log-probs are computed once before the first update."""


class ScheduleConfig(Section):
    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` fall to `min_ratio` at the run's last step."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Final learning rate as a share of the peak."""


class TrainerConfig(Section):
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks; a rank is one Dask actor (one GPU, or one CPU process)."""
    hosts: tuple[str, ...] = ()
    """Hosts that train beside this machine, as `ssh` knows them (more under `cluster.ssh`). Ranks are dealt out in
    equal runs, the first one to this machine. All must see `run_root` and the model at the same paths."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage. Offload needs stage 1, 2 or 3."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward; with bfloat16 DeepSpeed keeps fp32 master weights."""
    learning_rate: float = Field(1e-5, ge=0.0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0.0)
    """AdamW's weight decay."""
    gradient_clip: float = Field(1.0, ge=0.0)
    """Largest global gradient norm; 0 switches clipping off."""
    micro_batch_tokens: int = Field(2048, ge=64)
    """Padded tokens (sequences x longest) of one forward and backward per rank. Must hold the longest trajectory."""
    share_prompts: bool = True
    """Samples of a group are trained in one sequence behind one copy of their prompt, where that leaves at most three
    quarters of the tokens. Where the model cannot (sliding windows, linear attention), each is trained by itself."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    threads: int = Field(1, ge=1)
    """torch threads of a CPU rank."""
    schedule: ScheduleConfig = ScheduleConfig()
    grpo: GrpoConfig = GrpoConfig()

    @property
    def ranks_here(self) -> int:
        """Of this machine."""
        return self.ranks // (1 + len(self.hosts))

    def fault(self) -> str | None:
        """What cannot work, with the remedy; None if nothing is wrong."""
        if self.ranks % (1 + len(self.hosts)):
            return (
                f"trainer.ranks = {self.ranks} do not deal out evenly to this machine and {len(self.hosts)} "
                "trainer.hosts; change one of them"
            )
        return None
