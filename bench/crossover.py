"""What keeps workers colocated: how far each quantity must move before prefill-decode pairs are faster.

    python -m bench.crossover [--workers 8] [--batches 4] [--out bench/results/crossover.json]

From the simulator's defaults (Qwen3-8B on workers of two H800, workload `swe`, batches of 64) one quantity at a time is
moved. At each point every ratio of prefill and decode workers and colocated ones are played on the same batches; the
drain-aware model, told by a tracker that watched colocated batches, predicts the same. A number below 1 is in favour of
the best pairs: their mean makespan over that of colocated workers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from bench.makespan import TASKS_APART, Setting
from pearl.core import routing
from pearl.core.layout import Layout
from pearl.core.makespan import layout_of
from pearl.core.search import colocated, ratios
from pearl.profiles import load_profile
from pearl.sim.batch import run_batch
from pearl.sim.engine import EngineOptions
from pearl.sim.workload import PRESETS, Lognormal

Change = Callable[[Setting, float], Setting]


def engine(name: str) -> Change:
    """Multiplies a cost or size of the engine."""

    def change(setting: Setting, factor: float) -> Setting:
        of = getattr(setting.engine, name)
        return replace(setting, engine=replace(setting.engine, **{name: type(of)(of * factor)}))

    return change


def turns(name: str) -> Change:
    """Multiplies a mean of the workload."""

    def change(setting: Setting, factor: float) -> Setting:
        of: Lognormal = getattr(setting.workload, name)
        means: dict[str, Any] = {name: Lognormal(of.mean * factor, of.cv)}
        return replace(setting, workload=replace(setting.workload, **means))

    return change


def prefill(setting: Setting, factor: float) -> Setting:
    """A GPU that computes so many times slower and reads memory as fast."""
    e = setting.engine
    slower = replace(
        e, prefill_s_per_token=e.prefill_s_per_token * factor, prefill_s_per_token2=e.prefill_s_per_token2 * factor
    )
    return replace(setting, engine=slower)


KNOBS: dict[str, tuple[Change, tuple[float, ...]]] = {
    "nothing": (lambda s, x: s, (1,)),
    "prefill seconds a token, times": (prefill, (1.5, 2, 3, 4, 6)),
    "switching between prefill and decode, s a turn": (
        lambda s, x: replace(s, engine=replace(s.engine, turn_overhead_s=x)), (0.02, 0.05, 0.1, 0.2),
    ),
    "observation tokens, times": (turns("observation_tokens"), (2, 3, 4)),
    "response tokens, times": (turns("response_tokens"), (0.5, 0.25, 2)),
    "environment seconds, times": (turns("environment_s"), (0.25, 4)),
    "decode's fixed seconds, times": (engine("decode_fixed_s"), (0.5, 2)),
    "KV memory, times": (engine("kv_capacity_tokens"), (0.5, 0.25, 4)),
    "bandwidth of KV transfers, times": (engine("transfer_bytes_per_s"), (0.25, 10)),
    "trajectories of a batch": (lambda s, x: replace(s, batch=int(x)), (32, 128, 256)),
    "workers": (lambda s, x: replace(s, workers=int(x)), (3, 5, 6, 16)),
    "responses' KV goes back to prefill workers": (
        lambda s, x: replace(s, options=EngineOptions(prefill_keeps_response=bool(x))), (1,),
    ),
    "requests by which a prefix's worker may be busier": (lambda s, x: s, (0, -1)),
    "no affinity, and prefill seconds a token, times": (prefill, (2, 3, 4)),
}  # fmt: skip
NO_AFFINITY = -1
"""Of `AFFINITY_SLACK`: a turn goes to whoever has least to do, wherever its prefix is."""
SLACK: dict[str, Callable[[float], int]] = {
    "requests by which a prefix's worker may be busier": int,
    "no affinity, and prefill seconds a token, times": lambda x: NO_AFFINITY,
}
"""Changes of the routing, which the drain-aware model does not know and so does not predict."""


@dataclass(slots=True)
class PrefillShare:
    """Of all seconds in which the engines compute, as telemetry has it."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def saw(self, now: float, entry: Any) -> None:
        told = getattr(entry, "telemetry", None)
        if told is not None and told.decode_batch > 0:
            self.prefill_s += told.prefill_s
            self.decode_s += (told.decode_s - told.stall_s) / told.decode_batch


def judge(setting: Setting, batches: int, *, predict: bool) -> dict[str, Any]:
    alone = Layout(colocated=setting.workers)
    pairs = [layout_of(row) for row in ratios(setting.workers)]
    share = PrefillShare()
    run = run_batch(alone, setting.engine, setting.workload, setting.batch, options=setting.options, observers=[share])
    mean = {layout: fmean(setting.play(layout, TASKS_APART * i) for i in range(batches)) for layout in (alone, *pairs)}
    best = min(pairs, key=mean.__getitem__)
    row = {
        "colocated_s": round(mean[alone], 1),
        "best_pairs": str(best),
        "simulated": round(mean[best] / mean[alone], 3),
        "prefill_share_colocated": round(share.prefill_s / (share.prefill_s + share.decode_s), 3),
        "prompt_tokens_cached": round(run.cached_tokens / run.prompt_tokens, 3),
    }
    if predict:
        profile, model = setting.profile(), setting.drain_aware()
        seconds = model.makespans(profile, ratios(setting.workers), setting.batch)
        row["predicted"] = round(
            float(seconds.min() / model.makespans(profile, colocated(setting.workers), setting.batch)[0]), 3
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    base = Setting(0, load_profile("qwen3-8b", "h800", 2), PRESETS["swe"], arguments.workers, 64, EngineOptions())
    rows = []
    for name, (change, levels) in KNOBS.items():
        for level in levels:
            slack = SLACK[name](level) if name in SLACK else routing.AFFINITY_SLACK
            with patch.object(routing, "AFFINITY_SLACK", slack):
                row = judge(change(base, level), arguments.batches, predict=name not in SLACK)
            rows.append({"changed": name, "to": level, **row})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        command = f"python -m bench.crossover --workers {arguments.workers} --batches {arguments.batches}"
        result = {"command": command, "machine": "2 shared cores, no GPU; makespans are simulated", "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
