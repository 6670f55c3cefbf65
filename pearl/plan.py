"""`pearl plan`: the predicted makespan of every layout of some workers, the choice, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pearl.core.decision import Decision, DecisionEngine, DecisionSettings
from pearl.core.drain import DrainAware
from pearl.core.feasible import Constraints
from pearl.core.layout import Layout, Mode
from pearl.core.makespan import ClosedForm, layout_array, layout_of
from pearl.core.search import colocated, mixtures, ratios
from pearl.core.workload import Profile
from pearl.errors import UserError
from pearl.profiles import load_profile, read_profile
from pearl.sim.workload_profile import load_workload, workload_profile

ROWS = 20
MIXED_ROWS = 3
"""Of them mixed layouts: there are many, and they differ little."""
EVERY_LAYOUT = 128
"""Workers up to which every layout is computed; of more, those that the search looks at."""


@dataclass(frozen=True, slots=True)
class Row:
    layout: Layout
    drain_aware_s: float
    closed_form_s: float
    infeasible: str
    """The constraint that it breaks, or nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    profile: Profile
    workers: int
    batch: int
    rows: tuple[Row, ...]
    """Best first, as the drain-aware model has it."""
    decision: Decision
    closed_form: Decision
    next_worker_s: float
    """Seconds that one more worker would save."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "batch": self.batch,
            "choice": str(self.decision.layout),
            "predicted_s": round(self.decision.predicted_s, 3),
            "reasons": list(self.decision.reasons),
            "closed_form_choice": str(self.closed_form.layout),
            "closed_form_s": round(self.closed_form.predicted_s, 3),
            "next_worker_saves_s": round(self.next_worker_s, 3),
            "layouts": [
                {
                    "layout": str(row.layout),
                    "drain_aware_s": round(row.drain_aware_s, 3),
                    "closed_form_s": round(row.closed_form_s, 3),
                    "infeasible": row.infeasible,
                }
                for row in self.rows
            ],
        }


def make_plan(
    *, model: str, gpu: str, tensor_parallel: int, gpus: int, batch: int, workload: str, profile: Path | None
) -> Plan:
    """Raises UserError for what does not exist or does not fit. A `profile` file takes the place of model and GPU."""
    if batch < 1:
        raise UserError(f"a batch of {batch} trajectories", "Take 1 or more")
    if tensor_parallel < 1 or gpus < tensor_parallel:
        raise UserError(f"{gpus} GPUs make no worker of {tensor_parallel}", f"Take {max(1, tensor_parallel)} or more")
    workers = gpus // tensor_parallel
    if profile is not None:
        known = read_profile(profile)
    else:
        known = Profile(
            load_profile(model, gpu, tensor_parallel), workload_profile(load_workload(workload), batch=batch)
        )
        theta = DrainAware().bubble_ratio(known, Layout(colocated=workers), batch)
        known = replace(known, workload=replace(known.workload, bubble_ratio=theta))
    return _plan(known, workers, batch)


def _plan(profile: Profile, workers: int, batch: int) -> Plan:
    ours, source = DrainAware(), ClosedForm()
    engine = DecisionEngine(DecisionSettings(), ours)
    decision = engine.decide(profile, workers, batch)
    if workers <= EVERY_LAYOUT:
        layouts = np.concatenate([colocated(workers), ratios(workers), mixtures(workers)])
    else:
        layouts = layout_array(candidate.layout for candidate in decision.candidates)
    seconds, closed = (found.makespans(profile, layouts, batch) for found in (ours, source))
    constraints = Constraints.of(profile, layouts, batch)
    feasible = constraints.feasible
    order = sorted(range(len(layouts)), key=lambda i: (not feasible[i], seconds[i]))
    mixed = [i for i in order if layout_of(layouts[i]).mode is Mode.MIXED]
    pure = [i for i in order if i not in set(mixed)]
    shown = sorted({*pure[: ROWS - MIXED_ROWS], *mixed[:MIXED_ROWS]}, key=order.index)
    rows = tuple(Row(layout_of(layouts[i]), float(seconds[i]), float(closed[i]), constraints.reason(i)) for i in shown)
    closed_decision = DecisionEngine(DecisionSettings(mixed=False), source).decide(profile, workers, batch)
    return Plan(profile, workers, batch, rows, decision, closed_decision, engine.marginal_gain(profile, workers, batch))


def show(plan: Plan, console: Console) -> None:
    work, engine = plan.profile.workload, plan.profile.engine
    lines = [
        f"{plan.batch} trajectories on {plan.workers} workers; {work.slowest_turns:.1f} turns at most, "
        f"{work.new_tokens_per_turn:.0f} new and {work.response_tokens_per_turn:.0f} generated tokens a turn, "
        f"{work.environment_s_per_turn:.2g} s in the environment",
        f"a trajectory grows to {work.final_context_tokens:,.0f} tokens, a worker holds {engine.kv_capacity_tokens:,}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    table = Table("layout", "predicted s", "closed form s", "feasible", box=None, header_style="bold")
    for name in ("predicted s", "closed form s"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in plan.rows:
        chosen = row.layout == plan.decision.layout
        table.add_row(
            str(row.layout),
            f"{row.drain_aware_s:.1f}",
            f"{row.closed_form_s:.1f}",
            row.infeasible or "yes",
            style="green" if chosen else "dim" if row.infeasible else None,
        )
    console.print(table)
    for line in sentences(plan):
        console.print(line, highlight=False, soft_wrap=True)


def sentences(plan: Plan) -> list[str]:
    """The choice in plain words."""
    chosen, seconds = plan.decision.layout, plan.decision.predicted_s
    lines = [f"choice: {chosen} ({_meaning(chosen)}): {'; '.join(plan.decision.reasons)}"]
    others = [row for row in plan.rows if row.layout.mode is not chosen.mode and not row.infeasible]
    if others:
        other = min(others, key=lambda row: row.drain_aware_s)
        more = other.drain_aware_s / seconds - 1.0
        lines.append(f"best without that mode: {other.layout}, {other.drain_aware_s:.1f} s, {more:+.1%}")
    lines.append(f"the source's closed form chooses {plan.closed_form.layout}, {plan.closed_form.predicted_s:.1f} s")
    lines.append(f"one more worker would save {plan.next_worker_s:.1f} s ({plan.next_worker_s / seconds:.1%})")
    return lines


def _meaning(layout: Layout) -> str:
    if layout.mode is Mode.COLOCATED:
        return "every worker prefills and decodes"
    pairs = f"{layout.prefill} prefill and {layout.decode} decode workers"
    return pairs if layout.mode is Mode.DISAGGREGATED else f"{layout.colocated} colocated workers beside {pairs}"
