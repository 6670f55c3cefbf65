"""What deciding could gain at all in the frozen world: parts of `bench.paper_causes`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from pearl.core.policies import COMPARED, POLICIES, policy_named
from pearl.core.settings import Borrowing
from pearl.paper import published as p
from pearl.paper.beyond import Environment
from pearl.paper.jobs import RunJob, seeded
from pearl.paper.plan import Plan
from pearl.paper.statistics import estimate
from pearl.paper.testbed import Testbed
from pearl.paper.world import SEGMENTS, World, load_world

OTHER_DRAWS = range(1000, 1030)


def as_kind(testbed: Testbed, kind: type[Testbed]) -> Testbed:
    return kind(**{field.name: getattr(testbed, field.name) for field in fields(testbed)})


@dataclass(frozen=True, slots=True)
class OwnPolicy(Testbed):
    """Of a policy that is known here alone."""

    def check(self) -> None:
        policy_named(self.policy)


def most(testbed: Testbed, seeds: int) -> float:
    """Throughput where rollout GPUs are no limit: of several numbers of colocated workers, up to one for each
    trajectory that may be in flight, the best."""
    rates = []
    for workers in (16, 32, 64, 2 * testbed.batch):
        plenty = replace(testbed, policy="roll", reserved_gpus=testbed.gpus_per_worker * workers)
        rates.append(fmean(RunJob(one, 2).play()["throughput"] for one in seeded(plenty, seeds)))
    return max(rates)


def headroom(limit: float, rates: dict[str, float]) -> dict[str, float]:
    """Per cent; over ROLL the multiple."""
    row = {
        f"over {name}": round(limit / rate if name == "roll" else 100 * (limit / rate - 1), 2)
        for name, rate in rates.items()
    }
    print(f"ceiling: {row}", flush=True)
    return row


def ceiling(world: World, seeds: int, paper: dict[str, Any]) -> dict[str, Any]:
    """What any rollout could gain: throughput with GPUs that are no limit, over that of the study (`paper`), where all
    policies have the same trajectories, limits and trainer."""
    plan, found = Plan(world), {}
    series = paper["series"]
    played = series["end_to_end"]["throughput_tokens_s"]
    for model in p.MODELS:
        limit = most(replace(plan.fixed("roll", model, 4), steps=2 * plan.steps), seeds)
        for segment in range(len(SEGMENTS)):
            rate = {s: played[f"{model}/{segment}/{s}"] for s in ("roll", "rlboost+", "pearl-paper", "pearl")}
            found[f"{model}, segment {segment + 1}"] = headroom(limit, rate)
        limit = most(plan.fixed("roll", model, 4), seeds)
        for gpus in p.ABLATION_GPUS:
            testbed = plan.fixed("roll", model, gpus)
            roll = fmean(RunJob(one, 2).play()["throughput"] for one in seeded(testbed, seeds))
            gains = {s: series["ablation"][f"{model}/{gpus}/{s}"][0] for s in ("pearl-paper", "pearl")}
            found[f"{model}, {gpus} GPUs"] = headroom(
                limit, {"roll": roll, **{s: roll * (1 + gain / 100) for s, gain in gains.items()}}
            )
    for what, values, name in (("batch", p.BATCHES, "batch"), ("length", p.LENGTHS, "max_tokens")):
        for value in values:
            limit = most(plan.fixed("roll", p.SMALL, 8, **{name: value}), seeds)
            rate = {s: series["sensitivity"][f"{what}/{value}/{s}"] for s in ("rlboost+", "pearl-paper", "pearl")}
            found[f"{what} {value}"] = headroom(limit, rate)
    over = [row["over pearl-paper"] for row in found.values()]
    left = [row["over pearl"] for row in found.values()]
    found["mean"] = {"over pearl-paper": round(fmean(over), 1), "over pearl": round(fmean(left), 1)}
    return found


def staleness(world: World, seeds: int) -> dict[str, Any]:
    """The ceiling over ROLL on 4 GPUs by the staleness bound, of both."""
    found: dict[str, Any] = {}
    for model in p.MODELS:
        for steps in (1, 2, 4):
            testbed = replace(Plan(world).fixed("roll", model, 4), staleness=steps)
            roll = fmean(RunJob(one, 2).play()["throughput"] for one in seeded(testbed, seeds))
            limit = most(testbed, seeds)
            found[f"{model}, staleness {steps}"] = {
                "roll_tokens_s": round(roll), "ceiling_tokens_s": round(limit), "over roll": round(limit / roll, 2)
            }  # fmt: skip
            print(f"{model}, staleness {steps}: {found[f'{model}, staleness {steps}']}", flush=True)
    return found


def places(plan: Plan) -> dict[str, tuple[Testbed, int]]:
    """All that `pearl` is compared in, with the steps that are not counted."""
    found = {}
    for model in p.MODELS:
        for number, name in enumerate(SEGMENTS, 1):
            segment = Testbed(model=model, trace=name, hours=plan.hours, world=plan.world)
            found[f"{model}, segment {number}"] = segment, 0
        for gpus in p.ABLATION_GPUS:
            found[f"{model}, {gpus} GPUs"] = plan.fixed("roll", model, gpus), plan.skip
    for batch in p.BATCHES:
        found[f"batch {batch}"] = plan.fixed("roll", p.SMALL, 8, batch=batch), plan.skip
    for tokens in p.LENGTHS:
        found[f"length {tokens}"] = plan.fixed("roll", p.SMALL, 8, max_tokens=tokens), plan.skip
    return found


def routing(world: World, seeds: int) -> dict[str, Any]:
    """Per cent over PEARL as published, where it, `pearl` or both route every turn to the worker with its prefix, as
    our live runs do; the world's affinity is the source's."""
    plan, own = Plan(world), replace(world, affinity=1.0)
    found: dict[str, Any] = {}
    for place, (testbed, skip) in places(plan).items():
        rates = {
            (policy, where.affinity): [
                RunJob(one, skip).play()["throughput"]
                for one in seeded(replace(testbed, policy=policy, world=where), seeds)
            ]
            for policy in ("pearl-paper", "pearl")
            for where in (world, own)
        }
        published = rates["pearl-paper", world.affinity]
        found[place] = {
            name: round(fmean(100 * (a / b - 1) for a, b in zip(rates[key], published, strict=True)), 2)
            for name, key in {
                "pearl": ("pearl", world.affinity),
                "pearl-paper, own routing": ("pearl-paper", 1.0),
                "pearl, own routing": ("pearl", 1.0),
            }.items()
        }
        print(f"routing, {place}: {found[place]}", flush=True)
    rows = list(found.values())
    found["mean, from, to"] = {name: [round(x, 2) for x in estimate([row[name] for row in rows])] for name in rows[0]}
    print(found["mean, from, to"], flush=True)
    return found


def drawn(seeds: int) -> dict[str, Any]:
    """Over PEARL as published, per cent, in environments that are drawn like the study's, and are others."""
    always = replace(POLICIES["pearl"], elastic=replace(POLICIES["pearl"].elastic, intra_scale=Borrowing.ALWAYS))
    COMPARED["pearl, always borrowing"] = always
    found: dict[str, Any] = {}
    for number in OTHER_DRAWS:
        environment = Environment.draw(number, Plan(load_world()).environment_steps)
        testbed = as_kind(environment.testbed, OwnPolicy)
        kinds = {name: replace(testbed, policy=name) for name in ("pearl-paper", "pearl", "pearl, always borrowing")}
        gpus = 2 * testbed.batch * testbed.gpus_per_worker
        kinds["plenty"] = replace(testbed, policy="roll", trace="none", preemptible_gpus=0, reserved_gpus=gpus)
        rates = {
            name: [RunJob(one).play()["throughput"] for one in seeded(kind, seeds)] for name, kind in kinds.items()
        }
        published = rates.pop("pearl-paper")
        found[str(environment)] = {
            name: round(fmean(100 * (a / b - 1) for a, b in zip(theirs, published, strict=True)), 2)
            for name, theirs in rates.items()
        }
        print(f"{environment}: {found[str(environment)]}", flush=True)
    rows = list(found.values())
    means = {name: [round(each, 2) for each in estimate([row[name] for row in rows])] for name in rows[0]}
    print(means, flush=True)
    return {**found, "mean, from, to": means}
