"""Workload profiles of the workloads that the simulator has by name: what a tracker would say of them, computed."""

from __future__ import annotations

from pearl.core.survival import CONTEXT, ENVIRONMENT, NEW, RESPONSE, SurvivorCurve
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import TurnShape, WorkloadProfile
from pearl.errors import UserError
from pearl.sim.workload import PRESETS, Workload

GROUPS = 64
"""Groups that are drawn to take the means from."""


def workloads() -> list[str]:
    return sorted(PRESETS)


def load_workload(name: str) -> Workload:
    """Raises UserError for a name that does not exist."""
    if name not in PRESETS:
        raise UserError(f"no workload {name!r}", f"There are: {', '.join(workloads())}")
    return PRESETS[name]


def workload_profile(
    workload: Workload, *, batch: int, group_size: int = 16, max_tokens: int = 32_768
) -> WorkloadProfile:
    """Of batches of `batch` trajectories. The bubble ratio is left at 0, because it hangs on the engine."""
    curve = SurvivorCurve((TurnShape(1.0, 0.0, 0.0, 0.0, 0.0),))
    for group in range(GROUPS):
        for member in range(group_size):
            _play(curve, workload, TrajectoryId(group, member, 0), max_tokens)
    turns = curve.turns()
    return WorkloadProfile(
        turns=turns,
        slowest_turns=sum(1.0 - (1.0 - turn.survivors) ** batch for turn in turns),
        new_tokens_per_turn=curve.mean(NEW),
        response_tokens_per_turn=curve.mean(RESPONSE),
        bubble_ratio=0.0,
        group_size=float(group_size),
        environment_s_per_turn=curve.mean(ENVIRONMENT),
        environment_cv=curve.spread(ENVIRONMENT, 0.0),
        response_cv=curve.spread(RESPONSE, 0.0),
    )


def _play(curve: SurvivorCurve, workload: Workload, trajectory: TrajectoryId, max_tokens: int) -> None:
    plan = workload.plan(trajectory.group, trajectory)
    context = 0
    for turn in range(plan.turns):
        room = max_tokens - context - plan.new[turn]
        if room <= 0:
            return
        if turn:
            curve.outcome(turn - 1, ended=False)
        response = min(plan.response[turn], room)
        values = {NEW: plan.new[turn], RESPONSE: response, CONTEXT: context, ENVIRONMENT: plan.seconds[turn]}
        for quantity, value in values.items():
            curve.add(turn, quantity, value)
        context += plan.new[turn] + response
        last = turn + 1 == plan.turns or context >= max_tokens
        following = 0 if last else plan.new[turn + 1]
        if last or context + following >= max_tokens:
            curve.outcome(turn, ended=True)
            return
