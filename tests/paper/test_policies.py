"""Every policy behaves as itself and as no other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from pearl.cli import app
from pearl.core import events as ev
from pearl.core.decision import DecisionEngine
from pearl.core.layout import Mode
from pearl.core.policies import COMPARED, POLICIES, POLICY_NAMES, SYSTEMS, policy_named
from pearl.core.scheduler import Scheduler
from pearl.sim.scenario import Scenario, simulate

SCENARIO = Scenario(
    training_gpus=4, reserved_gpus=6, preemptible_gpus=6, trace="moderate-volatile", workload="tools", hours=0.15,
    batch=16, group_size=8, seed=5, gpus_per_worker=1,
)  # fmt: skip


@dataclass(frozen=True)
class Behaviour:
    preemptible: bool
    borrows: str
    """"never", "always", or "gated", or "all or none" where the gate takes no part of the slots."""
    roles: str
    """"colocated", "one to one", "pairs", "either", "mixed too": what is considered."""
    model: str = ""
    """Whose predictions decide, or "" where none does."""
    learns: bool = True


EXPECTED = {
    "colocated": Behaviour(False, "never", "colocated"),
    "elastic": Behaviour(True, "never", "colocated"),
    "elastic-borrow": Behaviour(True, "always", "colocated"),
    "static-pd": Behaviour(True, "never", "one to one"),
    "pearl-paper": Behaviour(True, "all or none", "either", "closed_form"),
    "pearl": Behaviour(True, "gated", "mixed too", "drain_aware"),
    "borrow": Behaviour(False, "always", "colocated"),
    "borrow-gated": Behaviour(False, "gated", "colocated", "closed_form"),
    "fixed-pd": Behaviour(False, "never", "one to one"),
    "forced-pd": Behaviour(True, "never", "pairs", "pairs_by_closed_form"),
    "forced-pd-borrow": Behaviour(True, "always", "pairs", "pairs_by_closed_form"),
    "forced-pd-gated": Behaviour(True, "all or none", "pairs", "pairs_by_closed_form"),
    "pearl-pd": Behaviour(True, "gated", "pairs", "pairs_by_drain_aware"),
    "splitwise": Behaviour(True, "never", "pairs", "pairs_by_closed_form without bubbles", learns=False),
    "dopd": Behaviour(True, "never", "pairs", "pairs_by_closed_form without bubbles"),
    "ampd": Behaviour(True, "never", "either", "closed_form without bubbles", learns=False),
    "ppd": Behaviour(True, "never", "mixed too", "closed_form without bubbles"),
}


class Log:
    def __init__(self) -> None:
        self.decisions: list[ev.RecordDecision] = []
        self.gates: list[ev.RecordGate] = []

    def saw(self, now: float, entry: Any) -> None:
        if isinstance(entry, ev.RecordDecision):
            self.decisions.append(entry)
        elif isinstance(entry, ev.RecordGate):
            self.gates.append(entry)


def observed(name: str) -> Behaviour:
    log = Log()
    summary, simulator = simulate(replace(SCENARIO, policy=name), [log])
    assert summary["trajectories_lost"] == 0 and summary["steps"] >= 3
    assert isinstance(simulator.machine, Scheduler)
    cold = simulator.machine.elastic
    engine, tracker = cold.policy.engine, cold.tracker
    assert isinstance(engine, DecisionEngine) and tracker is not None
    whole = [entry for entry in log.decisions if entry.workers >= 2]
    layouts = [entry.decision.layout for entry in whole]
    considered = {c.layout.mode for entry in whole for c in entry.decision.candidates if c.makespan_s < float("inf")}
    if not considered:
        halves = all(abs(one.prefill - one.decode) <= 1 for one in layouts)
        roles = "one to one" if all(one.mode is Mode.DISAGGREGATED for one in layouts) and halves else "colocated"
    elif considered == {Mode.DISAGGREGATED}:
        assert all(one.mode is Mode.DISAGGREGATED for one in layouts)
        roles = "pairs"
    else:
        roles = "mixed too" if engine.settings.mixed else "either"
    borrows = "never"
    if log.gates:
        always = all(entry.decision.reason == "always" for entry in log.gates)
        parts = ("gated", "all or none")[not cold.settings.partial_borrowing]
        borrows = "always" if always else parts
        assert (summary["borrowings"] > 0) == any(entry.decision.borrow for entry in log.gates)
    model = engine.model
    bubbles = getattr(getattr(model, "model", model), "bubble", True)
    used = bool(considered) or borrows in ("gated", "all or none")
    said = f"{model.name}{'' if bubbles else ' without bubbles'}" if used else ""
    same = tracker.profile() == tracker.profile().__class__(*_prior(tracker))
    return Behaviour(summary["preemptible_gpu_s"] > 100, borrows, roles, said, learns=not same)


def _prior(tracker: Any) -> tuple[Any, Any]:
    prior = getattr(tracker, "prior", None) or tracker.known
    return prior.engine, prior.workload


def test_all_policies_are_expected_to_be_something() -> None:
    assert EXPECTED.keys() == {*POLICIES, *COMPARED}
    assert len(set(EXPECTED.values())) == len(EXPECTED), "two policies are one"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_policy_does_what_it_is_named_for(name: str) -> None:
    assert observed(name) == EXPECTED[name]


def test_every_published_system_is_a_policy_and_says_what_is_left_out() -> None:
    for name, system in SYSTEMS.items():
        assert policy_named(name) in (*POLICIES.values(), *COMPARED.values())
        assert system.left_out
    named = (
        "areal roll roll-large laminar rlboost rlboost+ rose seamlessflow bidirl rollart nemo-rl slime splitwise dopd"
    )
    assert {*named.split(), "ampd", "ppd"} == SYSTEMS.keys()


def test_the_help_of_simulate_lists_every_name() -> None:
    said = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "4000"}).output
    missing = [
        name for name in POLICY_NAMES if f" {name}," not in said and f" {name}." not in said and f" {name};" not in said
    ]
    assert not missing


def test_a_system_plays_as_its_policy() -> None:
    ours, theirs = (simulate(replace(SCENARIO, policy=name, hours=0.1))[0] for name in ("roll", "colocated"))
    assert {**ours, "policy": "", "wall_s": 0} == {**theirs, "policy": "", "wall_s": 0}
