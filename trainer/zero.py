"""One rank of ZeRO data-parallel GRPO training, the same code on a GPU (NCCL) and on a CPU (gloo).

Gradients: ZeRO averages over ranks, so each micro-batch's loss is (sum of token losses) x world / (loss tokens of the
whole update). Then neither the number of ranks nor the cut into micro-batches changes the gradient.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Trajectory
from pearl.weights.snapshot import Manifest, combined_checksum, config_hash, tensor_checksum, write_snapshot
from trainer.batch import has_signal, make_batch
from trainer.bundle import alone, bundle, can_share, rows_of
from trainer.checkpoint import CheckpointError, is_complete, load_checkpoint, save_checkpoint
from trainer.engine import (
    GradientNorm,
    forget_engines,
    load_model,
    reference_model,
    set_learning_rate,
    settle_optimizer,
    start_engine,
)
from trainer.fingerprint import fingerprint
from trainer.gather import gathered
from trainer.grpo import Scores, token_losses
from trainer.logprobs import TokenScorer
from trainer.metrics import StepMetrics, batch_counts
from trainer.microbatch import MicroBatch, collate
from trainer.offload import Moved, Offloader
from trainer.plan import balance, plan_ranks
from trainer.schedule import learning_rate_ratio
from trainer.state import Life, State, TrainerStateError
from trainer.world import join_world, leave_world, prepare_process

CONVERSION_SHARE = 0.9
"""Of `timeout_s`, for converting a checkpoint: rank 0 must give up before the ranks that wait for it do."""


class ZeroTrainer:
    """A DeepSpeed rank. All ranks make the same calls in the same order; every method but `version` is collective.

    An error in the arguments is raised on all ranks alike before anything is sent and leaves the trainer usable. Any
    other error (a rank died, a disk is full) makes it `broken`: it only closes, and a new one loads a checkpoint.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_directory: Path,
        snapshot_dtype: str,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        seed: int,
        total_steps: int,
        temperature: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s` bounds the wait for the other ranks, here and in every later collective.

        `temperature` is the rollouts' sampling temperature; `snapshot_dtype` is a torch dtype's name.
        """
        self.config = config
        self.step = 0
        """Last step trained, counted from 1."""
        self.version = 0
        """Last weight version exported; 0 is the initial model."""
        self.changes: dict[str, tuple[Any, Any]] = {}
        """Settings in which the loaded checkpoint differs: name to (then, now)."""
        self._directory = Path(model_directory)
        self._settings = fingerprint(config, self._directory, temperature)
        self._snapshot_dtype: torch.dtype = getattr(torch, snapshot_dtype)
        self._total_steps, self._temperature, self._timeout_s = total_steps, temperature, timeout_s
        prepare_process(config.threads)
        torch.manual_seed(seed)
        self._life = Life(rank)
        self._world = join_world(rank, world_size, master_address, master_port, timeout_s)
        try:
            model = load_model(self._directory, config)
            self.shares_prompts = config.share_prompts and can_share(model)
            self._scorer = TokenScorer(model)
            self._reference: Any = None
            if config.grpo.kl_coefficient > 0.0:
                self._reference = reference_model(self._directory, config, self._world)
                self._reference_scorer = TokenScorer(self._reference)
            self._engine = start_engine(model, config)
            self._norm = GradientNorm(self._engine, config)
            self._offloader = Offloader(self._engine, self._reference, self._world)
        except BaseException:
            leave_world(abort=True)
            raise
        self._life.state = "ready"

    # Training

    def train_step(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Train on a whole batch (each rank is given all groups and takes its share); the same metrics on every rank.

        `step` counts from 1 and must grow. A minibatch in which no token can have a gradient (all groups have zero
        variance, no KL) makes no update: gradients would be zero, and AdamW's momentum and decay are kept from moving
        the weights; `skipped_updates` counts it, and the step number and the learning-rate schedule go on regardless.

        Raises ValueError for groups that `make_batch` refuses, TrainerStateError for a step that was trained before.
        """
        self._life.require("ready", "train_step")
        if step <= self.step:
            raise TrainerStateError(f"step {step} after step {self.step}: a step is trained once")
        began = time.perf_counter()
        grpo = self.config.grpo
        batch = make_batch(groups, grpo)
        ratio = learning_rate_ratio(step, self._total_steps, self.config.schedule)
        budget, parts = self.config.micro_batch_tokens, grpo.minibatches * self._world.size
        bundles = bundle(batch.rows, budget, parts) if self.shares_prompts else alone(batch.rows)
        updates = [part for part in balance(bundles, grpo.minibatches) if has_signal(rows_of(part), grpo)]
        plans = [plan_ranks(part, self._world.size, budget) for part in updates]
        learning_rate = self.config.learning_rate * ratio
        metrics = StepMetrics(grpo, self._world)
        norms: list[float] = []
        with self._life.during("training"):
            set_learning_rate(self._engine, learning_rate)
            mine = [[collate(part, self._world.device) for part in plan[self._world.rank]] for plan in plans]
            old = self._old_logprobs(mine)
            for index, update in enumerate(updates):
                tokens = sum(row.loss_tokens for row in rows_of(update))
                norms.append(self._update(mine[index], old[index], tokens, metrics))
            measured = metrics.reduce()
            self.step = step
        return (
            measured
            | batch_counts(batch, updates, plans)
            | {
                "step": float(step),
                "lr": learning_rate,
                "grad_norm": sum(norms) / max(1, len(norms)),
                "updates": float(len(updates)),
                "skipped_updates": float(grpo.minibatches - len(updates)),
                "seconds": time.perf_counter() - began,
                "peak_rss_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            }
        )

    def _old_logprobs(self, updates: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
        """Log-probs before the first update; None where the first update's own forward gives them."""
        if len(updates) <= 1:
            return [[None] * len(parts) for parts in updates]
        with torch.no_grad():
            return [[self._score(part)[0] for part in parts] for parts in updates]

    def _score(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        return self._scorer.score(
            self._engine, part.input_ids, part.positions, part.targets, self._temperature, **part.shaped
        )

    def _update(
        self, parts: list[MicroBatch], old: list[Tensor | None], loss_tokens: int, metrics: StepMetrics
    ) -> float:
        """One optimizer update; returns the gradient's global norm before clipping."""
        for part, before in zip(parts, old, strict=True):
            current, entropy = self._score(part)
            scores = Scores(
                current=current,
                old=current.detach() if before is None else before,
                rollout=part.rollout_logprobs,
                initial=self._initial_logprobs(part),
            )
            losses = token_losses(scores, part.advantages, self.config.grpo)
            self._engine.backward(losses.sum() * (self._world.size / loss_tokens), scale_wrt_gas=False)
            newest = part.versions.max().clamp(min=self.version) if part.loss_tokens else self.version
            metrics.add(scores, losses, entropy, part.advantages, newest - part.versions)
        self._engine.step()
        return self._norm.value()

    @torch.no_grad()
    def _initial_logprobs(self, part: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return self._reference_scorer.score(
            self._reference, part.input_ids, part.positions, part.targets, self._temperature, **part.shaped
        ).logprobs

    # Weights

    def export(self, root: Path, version: int) -> Manifest | None:
        """Write the weights as snapshot `version` under `root`, in the snapshot dtype; the manifest on rank 0.

        Names are the model's own; a tied output head is written once, under its first name. Raises SnapshotError on
        rank 0 if the version exists (the others do not know, and stay usable).
        """
        self._life.require("ready", "export")
        tensors = gathered(self._engine, self._snapshot_dtype, wanted=self._world.rank == 0)
        manifest = None
        try:
            if self._world.rank == 0:
                manifest = write_snapshot(root, version, config_hash(self._directory), tensors)
        finally:
            # The other ranks gather to the end, so rank 0 must too, also after an error of its own.
            with self._life.during("ready"):
                for _ in tensors:
                    pass
        self.version = version
        return manifest

    def checksum(self) -> str:
        """Checksum of the weights as an export would write them, on every rank; equals the manifest's."""
        self._life.require("ready", "checksum")
        with self._life.during("ready"):
            return combined_checksum(
                {
                    name: tensor_checksum(tensor)
                    for name, tensor in gathered(self._engine, self._snapshot_dtype, wanted=True)
                }
            )

    # Memory

    def offload(self) -> Moved:
        """Move weights, optimizer and reference model to host memory; then only `reload` and `close` are left.

        Raises TrainerStateError, and changes nothing, if the trainer is offloaded already, or cannot come back exact
        (zero_stage 0, see `trainer.offload`).
        """
        self._life.require("ready", "offload")
        if refusal := self._offloader.refusal():
            raise TrainerStateError(f"offload: {refusal}")
        with self._life.during("ready", then="offloaded"):
            return self._offloader.offload()

    def reload(self) -> Moved:
        """Undo `offload`: the next step is bit-identical to one without. Raises TrainerStateError if there was none."""
        self._life.require("offloaded", "reload")
        with self._life.during("offloaded", then="ready"):
            return self._offloader.reload()

    # Checkpoints

    def save_checkpoint(self, directory: Path, tag: str, client_state: dict[str, Any]) -> Path:
        """Write `directory/tag`, complete or not at all, and make it the latest. See `trainer.checkpoint`."""
        self._life.require("ready", "save_checkpoint")
        state = {"step": self.step, "version": self.version, "client": client_state}
        with self._life.during("ready", FileExistsError, ValueError):
            return save_checkpoint(self._engine, self._world, Path(directory), tag, self._settings, state)

    def load_checkpoint(self, directory: Path, tag: str) -> dict[str, Any]:
        """Go back to a checkpoint; returns what the save was given. `changes` then tells which settings were others.

        From as many ranks as there are now the next step is bit-identical to what it was after the save. From another
        number the checkpoint is converted first, once (`trainer.universal`); then its loss differs by rounding.

        Raises FileNotFoundError if `directory/tag` is no complete checkpoint, CheckpointError if it does not fit
        (model, dtype, ZeRO stage) or cannot be converted; the trainer stays usable, as it was.
        """
        self._life.require("ready", "load_checkpoint")
        if not is_complete(directory, tag):
            raise FileNotFoundError(f"no complete checkpoint {Path(directory) / tag}")
        with self._life.during("ready", CheckpointError):
            loaded = load_checkpoint(
                self._engine, self._world, Path(directory), tag, self._settings, CONVERSION_SHARE * self._timeout_s
            )
            settle_optimizer(self._engine, self.config)
        self.step, self.version, self.changes = loaded.state["step"], loaded.state["version"], loaded.changes
        return loaded.state["client"]

    # Life

    @property
    def state(self) -> State:
        return self._life.state

    def close(self) -> None:
        """Free the engine and leave the group; the process can start another trainer. Twice is fine, broken too."""
        if self._life.state == "closed":
            return
        broken, self._life.state = self._life.state == "broken", "closed"
        try:
            self._engine.destroy()
        except Exception:
            # A step that broke off may have left the engine in any state; the process goes on without it.
            if not broken:
                raise
        finally:
            del self._engine, self._scorer, self._reference, self._norm, self._offloader
            forget_engines()
            gc.unfreeze()
            gc.collect()
            leave_world(abort=broken)
            self._world.empty_cache()
