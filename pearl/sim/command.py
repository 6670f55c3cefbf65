"""`pearl simulate`: the console side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pearl.core.policies import policy_named
from pearl.errors import UserError
from pearl.sim.plot import check, draw
from pearl.sim.scenario import Scenario, simulate
from pearl.sim.timeline import Timeline

ROWS = (
    ("steps", "steps", ""),
    ("step_s_mean", "step time", "s"),
    ("throughput_tokens_s", "throughput", "tokens/s"),
    ("makespan_s_mean", "rollout makespan, mean", "s"),
    ("turns", "turns", ""),
    ("prefix_cached_ratio", "prefix cache hits", "of prompts"),
    ("preemptible_gpu_s", "preemptible GPUs used", "GPU-s"),
    ("preemptions", "slots taken away", ""),
    ("tokens_per_usd", "tokens per dollar, a dedicated GPU at 1 an hour", ""),
    ("borrowed_gpu_s", "training GPUs borrowed", "GPU-s"),
    ("borrowings", "borrowings", ""),
    ("role_switches", "role switches", ""),
    ("mode_switches", "mode switches", ""),
    ("tokens_lost", "generated tokens lost", ""),
    ("trajectories_lost", "trajectories lost", ""),
)


def scenario_of(profile: str, gpus: int, sizes: dict[str, int | None], **options: Any) -> Scenario:
    """`profile` is MODEL@GPU; `sizes` that are given replace those that follow from `gpus`.

    Raises UserError.
    """
    model, _, gpu = profile.lower().partition("@")
    if not gpu:
        raise UserError(f"{profile!r} is not MODEL@GPU", "For instance qwen3-8b@h800")
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    scenario = Scenario.of_size(gpus, model=model, gpu=gpu, **options)
    if "training_gpus" in given or "reserved_gpus" in given:
        training = given.get("training_gpus", scenario.training_gpus)
        reserved = given.get("reserved_gpus", scenario.reserved_gpus)
        given["preemptible_gpus"] = gpus - training - reserved
    return replace(scenario, **given)


def run(scenario: Scenario, console: Console, plot: Path | None, *, validate: bool = False) -> dict[str, Any]:
    """Play, print a table to `console`, draw `plot` if given; returns the numbers."""
    if plot is not None:
        check(plot)
    timeline = Timeline()
    summary, _ = simulate(scenario, [timeline] if plot else [], validate=validate)
    console.print(_table(scenario, summary))
    if plot is not None:
        rate = f"{summary['throughput_tokens_s']:,.0f} tokens/s (simulated)"
        cluster = f"{scenario.gpus} {scenario.gpu.upper()}, {scenario.model}, {scenario.workload}"
        title = f"{scenario.policy}: {cluster}, trace {Path(scenario.trace).name}, seed {scenario.seed}: {rate}"
        draw(timeline, title, plot)
        console.print(f"drawn: {plot}", highlight=False, soft_wrap=True)
    return summary


def _table(scenario: Scenario, summary: dict[str, Any]) -> Table:
    title = f"{scenario.policy}: {policy_named(scenario.policy).about}"
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    hours = summary["simulated_s"] / 3600
    table.add_row(
        "simulated", f"{hours:.2f} h on {scenario.gpus} GPUs in {summary['wall_s']} s", f"{summary['events']:,} events"
    )
    for key, label, unit in ROWS:
        value = summary[key]
        text = "-" if value is None else f"{value:,.4g}" if isinstance(value, float) and value < 1 else f"{value:,}"
        table.add_row(label, text, unit)
    table.add_row("ended", summary["ended"], "")
    return table
