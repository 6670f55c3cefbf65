"""Is the training still sound? Warnings about one step's record, as a pure function.

A threshold marks where a figure stops being what a sound run shows, not where training is certainly lost. Figures that
a record lacks are passed over, and those of the loss if no token was in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MISMATCH_KL = 0.05
"""nats a token. For small differences KL is half their mean square: here log-probs differ by 0.3 and importance weights
by a third. Rounding gives some 1e-3, a few updates of staleness some 1e-2."""
IMPORTANCE_CAP_SHARE = 0.05
"""of the loss tokens. Truncation biases the gradient by what it cuts; it is meant for the few far off."""
CLIP_SHARE = 0.3
"""of the loss tokens. PPO clips 0.1 to 0.2 in sound runs; beyond, updates of a batch are too many or too large."""
STALE_SHARE = 0.5
"""of the trajectories as old as allowed. More, and the bound, not the engines' pace, decides what is trained."""
ENTROPY = 0.02
"""nats. The likeliest token then has over 99.5 % on average, answers of a group are alike, and advantages are zero."""
TRUNCATION_RATE = 0.5
"""of the trajectories. Their rewards tell how long an answer is more than how good."""
FAILURE_RATE = 0.2
"""of the samples that ended since the last step. Groups shrink, and what fails is rarely a random choice."""
ZERO_VARIANCE_SHARE = 0.8
"""of the groups. Less than a fifth of the generated tokens then teach anything."""


@dataclass(frozen=True, slots=True)
class Warning:
    kind: str
    """The same for every step that warns of the same."""
    text: str
    """One sentence: figure, threshold, what helps."""


@dataclass(frozen=True, slots=True)
class _Limit:
    kind: str
    key: str
    limit: float
    percent: bool
    what: str
    remedy: str

    def __call__(self, record: Mapping[str, Any]) -> Warning | None:
        value = record.get(self.key)
        if value is None or not value > self.limit:
            return None
        figures = f"{value:.0%} (over {self.limit:.0%})" if self.percent else f"{value:.3g} (over {self.limit:g})"
        return Warning(self.kind, f"{self.what}: {figures}; {self.remedy}")


OF_THE_LOSS: tuple[Callable[[Mapping[str, Any]], Warning | None], ...] = (
    _Limit("mismatch", "mismatch_kl", MISMATCH_KL, False, "engine and trainer disagree on log-probs, KL in nats",
           "lower pipeline.max_staleness_steps, or use one dtype for both"),
    _Limit("importance_cap", "importance_cap_share", IMPORTANCE_CAP_SHARE, True, "importance weights cut to the cap",
           "lower pipeline.max_staleness_steps or raise trainer.grpo.importance_cap"),
    _Limit("clip", "clip_share", CLIP_SHARE, True, "tokens without gradient because of the clip",
           "lower trainer.learning_rate or trainer.grpo.minibatches"),
)  # fmt: skip
OF_THE_BATCH: tuple[Callable[[Mapping[str, Any]], Warning | None], ...] = (
    _Limit("truncation", "truncation_rate", TRUNCATION_RATE, True, "trajectories that a limit on turns or tokens ended",
           "raise environment.max_turns or pipeline.max_trajectory_tokens"),
    _Limit("failures", "failure_rate", FAILURE_RATE, True, "samples that ended as failed since the last step",
           "events.jsonl has the reasons"),
)  # fmt: skip


def warnings(record: Mapping[str, Any]) -> list[Warning]:
    """What is wrong with a step, worst first; nothing for a sound one. `record` is a line of `metrics.jsonl`."""
    found = [_not_finite(record)]
    if record.get("loss_tokens"):
        found += [rule(record) for rule in OF_THE_LOSS] + [_entropy(record)]
    found += [_zero_variance(record), _staleness(record)] + [rule(record) for rule in OF_THE_BATCH]
    return [warning for warning in found if warning is not None]


def _not_finite(record: Mapping[str, Any]) -> Warning | None:
    names = [name for name in ("loss", "grad_norm") if not math.isfinite(record.get(name, 0.0))]
    if not names:
        return None
    return Warning("not_finite", f"not finite: {', '.join(names)}; the weights are lost, go back to a checkpoint")


def _entropy(record: Mapping[str, Any]) -> Warning | None:
    value = record.get("entropy")
    if value is None or not value < ENTROPY:
        return None
    return Warning("entropy", f"entropy in nats has collapsed: {value:.3g} (under {ENTROPY:g}); the policy hardly "
                   "varies its answers, lower trainer.learning_rate or raise trainer.grpo.clip_high")  # fmt: skip


def _zero_variance(record: Mapping[str, Any]) -> Warning | None:
    groups, flat = record.get("groups"), record.get("zero_variance_groups")
    if not groups or flat is None or not flat / groups > ZERO_VARIANCE_SHARE:
        return None
    return Warning("zero_variance", f"groups whose answers all have one reward: {flat / groups:.0%} (over "
                   f"{ZERO_VARIANCE_SHARE:.0%}); the tasks are too hard or too easy, or groups too small")  # fmt: skip


def _staleness(record: Mapping[str, Any]) -> Warning | None:
    """With a bound of 0 or 1 trajectories are as old as allowed by design: one batch is rolled out, one trained."""
    counts, bound = record.get("staleness_histogram"), record.get("staleness_bound")
    if not counts or not any(counts) or not bound or bound < 2:
        return None
    share = sum(counts[bound:]) / sum(counts)
    if not share > STALE_SHARE:
        return None
    return Warning("staleness", f"trajectories as stale as allowed ({bound} versions): {share:.0%} (over "
                   f"{STALE_SHARE:.0%}); rollout waits for training, add trainer ranks or enlarge batches")  # fmt: skip
