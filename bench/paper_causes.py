"""Why cells of `pearl bench paper` disagree with the source: one quantity at a time is moved and a cell played again.

    python -m bench.paper_causes [--seeds 3] [--only PART] [--out bench/results/paper/causes.json]

Everything starts from the frozen world. Makespans are means over the same batches. A part can be played alone; the file
keeps the others. `ceiling` reads `paper.json` beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.paper_ceiling import OwnPolicy, as_kind, ceiling, drawn, routing, staleness
from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.makespan import ClosedForm
from pearl.core.policies import COMPARED
from pearl.paper import published as p
from pearl.paper.end_to_end import prefill_again_percent
from pearl.paper.jobs import BatchJob, Profiler, RunJob, seeded
from pearl.paper.layouts import MOTIVATION_TRAINING_GPUS, ratios
from pearl.paper.plan import Plan
from pearl.paper.testbed import Testbed
from pearl.paper.world import World, load_world
from pearl.sim.engine import EngineOptions
from pearl.sim.workload import Lognormal, Workload

Change = Callable[[Testbed], Testbed]


def in_world(**changes: float) -> Change:
    def change(testbed: Testbed) -> Testbed:
        assert testbed.world is not None
        return replace(testbed, world=replace(testbed.world, **changes))

    return change


def times(**factors: float) -> Change:
    """So many times as much."""

    def change(testbed: Testbed) -> Testbed:
        return in_world(**{name: factor * getattr(testbed.world, name) for name, factor in factors.items()})(testbed)

    return change


CHANGES: dict[str, Change] = {
    "as fitted": lambda t: t,
    "environment of 1 s a turn": in_world(environment_s=1.0),
    "environment of 0.3 s a turn": in_world(environment_s=0.3),
    "no T_over": in_world(turn_overhead_s=0.0),
    "a third of the trainer's utilisation": times(training_utilisation=1 / 3),
    "responses four times as long": times(response_tokens=4.0),
    "sandboxes that start and score at once": lambda t: as_kind(t, QuickSandboxes),
    "the same, and a third of the trainer's utilisation": lambda t: as_kind(
        times(training_utilisation=1 / 3)(t), QuickSandboxes
    ),
    "every turn asks for its prefix": in_world(affinity=1.0),
    "no T_over, and every turn asks for its prefix": in_world(turn_overhead_s=0.0, affinity=1.0),
    "both, and half the KV memory": lambda t: replace(in_world(turn_overhead_s=0.0, affinity=1.0)(t), kv_share=0.5),
    "half the KV memory": lambda t: replace(t, kv_share=0.5),
    "a quarter of the KV memory": lambda t: replace(t, kv_share=0.25),
    "a quarter of the KV memory, no T_over": lambda t: replace(in_world(turn_overhead_s=0.0)(t), kv_share=0.25),
    "decode workers drop their KV between turns": lambda t: replace(t, options=EngineOptions(decode_keeps_kv=False)),
}

PAIRS = (
    "as fitted", "environment of 1 s a turn", "no T_over", "every turn asks for its prefix", "half the KV memory",
    "a quarter of the KV memory", "a quarter of the KV memory, no T_over", "decode workers drop their KV between turns",
)  # fmt: skip


def makespan(testbed: Testbed, layout: str, seeds: int) -> float:
    return fmean(BatchJob(layout, one).play()["makespan_s"] for one in seeded(testbed, seeds))


def pairs(world: World, seeds: int) -> dict[str, Any]:
    """Best pairs over 8 colocated workers, Qwen3-30B-A3B."""
    found: dict[str, Any] = {}
    for name in PAIRS:
        change = CHANGES[name]
        for batch in (32, 64, 96):
            testbed = change(Testbed(model=p.LARGE, world=world, batch=batch))
            alone = makespan(testbed, "8C", seeds)
            by_ratio = {ratio: makespan(testbed, ratio, seeds) for ratio in ratios(8)}
            best = min(by_ratio, key=by_ratio.__getitem__)
            row = {"best": best, "gain": round(100 * (alone / by_ratio[best] - 1), 2), "colocated_s": round(alone, 1)}
            found.setdefault(name, {})[str(batch)] = row
            print(f"{name}, batch {batch}: {row}", flush=True)
    return found


def contention(world: World, seeds: int) -> dict[str, Any]:
    """What the motivating figures would take: rollout by GPUs and batch, Qwen3-8B."""
    found = {}
    for batch in (64, 128, 256, 512):
        testbed = Testbed(model=p.SMALL, world=world, batch=batch, training_gpus=MOTIVATION_TRAINING_GPUS)
        trainer = testbed.models().trainer
        training_s = fmean(trainer.step_s(one.lengths()) for one in seeded(testbed, seeds))
        at = {gpus: makespan(testbed, f"{gpus // 2}C", seeds) for gpus in (16, 24, 32)}
        row = {
            "over_unlimited_at_32": at[32] / makespan(testbed, f"{batch}C", seeds),
            "over_training_at_16": at[16] / training_s,
            "over_training_at_32": at[32] / training_s,
            "cut_at_24": 100 * (1 - at[24] / at[16]),
            "cut_at_32": 100 * (1 - at[32] / at[16]),
        }
        found[str(batch)] = {name: round(value, 2) for name, value in row.items()}
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    return found


def choices(world: World) -> dict[str, Any]:
    """What the closed form thinks of 4, 8 and 16 GPUs, with the bubble and without it."""
    found = {}
    for model in p.MODELS:
        for workers in (2, 4, 8):
            testbed = Testbed(model=model, world=world)
            watcher = Profiler(testbed)
            watcher.play(workers)
            for bubble in (True, False):
                engine = DecisionEngine(DecisionSettings(mixed=False, constraints=False), ClosedForm(bubble=bubble))
                profile = watcher.tracker.profile()
                layout, predicted_s = engine.best(profile, workers, testbed.batch)
                row = {"chosen": str(layout), "predicted_s": round(predicted_s, 1)}
                row["theta"] = round(profile.workload.bubble_ratio, 2)
                found[f"{model}, {workers} workers{'' if bubble else ', without bubble'}"] = row
    print(found, flush=True)
    return found


@dataclass(frozen=True, slots=True)
class QuickSandboxes(Testbed):
    """Trajectories consist of their turns alone."""

    def make_workload(self) -> Workload:
        assert self.world is not None
        return replace(self.world.workload(self.seed), open_s=Lognormal(0.1), score_s=Lognormal(0.1))


def theta(world: World, seeds: int) -> dict[str, Any]:
    """The ablation with θ = 0 in the source's equations: per cent over ROLL."""
    found: dict[str, Any] = {}
    stages = ("forced-pd", "forced-pd-borrow", "forced-pd-gated")
    for name in stages:
        COMPARED[f"{name}, θ = 0"] = replace(COMPARED[name], model=ClosedForm(bubble=False))
    policies = (*stages, *(f"{name}, θ = 0" for name in stages))
    for model in p.MODELS:
        for gpus in p.ABLATION_GPUS:
            testbed = as_kind(Plan(world).fixed("roll", model, gpus), OwnPolicy)
            found[f"{model}, {gpus} GPUs"] = over_roll(testbed, policies, seeds)
            print(f"{model}, {gpus} GPUs: {found[f'{model}, {gpus} GPUs']}", flush=True)
    return found


def length(world: World, seeds: int) -> dict[str, Any]:
    """By the limit of tokens, Qwen3-8B on 8 GPUs, per cent: PEARL's throughput over that at the least limit, and over
    RLBoost+'s."""
    found: dict[str, Any] = {}
    for name in (
        "as fitted", "environment of 0.3 s a turn", "a third of the trainer's utilisation",
        "responses four times as long", "a quarter of the KV memory", "sandboxes that start and score at once",
        "the same, and a third of the trainer's utilisation",
    ):  # fmt: skip
        rates: dict[tuple[str, int], float] = {}
        for policy in ("rlboost+", "pearl-paper"):
            for tokens in (8192, 16_384, 32_768):
                testbed = CHANGES[name](Plan(world).fixed(policy, p.SMALL, 8, max_tokens=tokens))
                rates[policy, tokens] = fmean(RunJob(one, 2).play()["throughput"] for one in seeded(testbed, seeds))
        for tokens in (8192, 16_384, 32_768):
            ours, theirs = rates["pearl-paper", tokens], rates["rlboost+", tokens]
            row = {
                "over_8192": 100 * (ours / rates["pearl-paper", 8192] - 1),
                "over_rlboost": 100 * (ours / theirs - 1),
            }
            found.setdefault(name, {})[str(tokens)] = {what: round(value, 1) for what, value in row.items()}
        print(f"length, {name}: {found[name]}", flush=True)
    return found


def again(world: World) -> dict[str, Any]:
    """Prefilling an interrupted request again, per cent of a trajectory's decoding, with more or fewer sequences beside
    it and a shorter context."""
    found: dict[str, Any] = {}
    for model in p.MODELS:
        engine = Plan(world).fixed("roll", model, 4).models().engine
        for beside in (0, 7, 15, 31):
            crowd = replace(
                engine,
                decode_fixed_s=engine.decode_fixed_s
                + beside * engine.decode_s_per_sequence
                + beside * engine.decode_s_per_kv_token * mean_context(world)
                + engine.expert_fixed_s * ((1 - engine.expert_share) - (1 - engine.expert_share) ** (beside + 1)),
            )
            found[f"{model}, {beside} beside it"] = round(prefill_again_percent(world, crowd), 2)
        shorter = replace(world, turns=world.turns / 2)
        found[f"{model}, half as many turns"] = round(prefill_again_percent(shorter, engine), 2)
    print(found, flush=True)
    return found


def mean_context(world: World) -> float:
    return world.turns / 2 * (world.observation_tokens + world.response_tokens)


def over_roll(testbed: Testbed, policies: Sequence[str], seeds: int) -> dict[str, float]:
    """Per cent over ROLL in whole runs."""
    rates = {
        policy: fmean(RunJob(one, 2).play()["throughput"] for one in seeded(replace(testbed, policy=policy), seeds))
        for policy in ("roll", *policies)
    }
    return {policy: round(100 * (rates[policy] / rates["roll"] - 1), 1) for policy in policies}


def four_gpus(world: World, seeds: int) -> dict[str, Any]:
    """One prefill and one decode worker against two colocated ones."""
    found: dict[str, Any] = {}
    for name in (
        "as fitted", "no T_over", "every turn asks for its prefix", "half the KV memory",
        "no T_over, and every turn asks for its prefix", "both, and half the KV memory",
    ):  # fmt: skip
        for model in p.MODELS:
            row = over_roll(CHANGES[name](Plan(world).fixed("roll", model, 4)), ("forced-pd",), seeds)
            found.setdefault(name, {})[model] = row["forced-pd"]
        print(f"4 GPUs, {name}: {found[name]}", flush=True)
    return found


def eight_gpus(world: World, seeds: int) -> dict[str, Any]:
    """Pairs at the ratio of the source's equations, one to one, and with borrowing at the drain-aware model's."""
    found = {}
    for model in p.MODELS:
        policies = ("forced-pd", "fixed-pd", "borrow", "pearl-pd", "pearl")
        found[model] = over_roll(Plan(world).fixed("roll", model, 8), policies, seeds)
        print(f"8 GPUs, {model}: {found[model]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path, default=Path("bench/results/paper/causes.json"))
    arguments = parser.parse_args()
    world, seeds = load_world(), arguments.seeds
    paper = arguments.out.with_name("paper.json")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "pairs": lambda: pairs(world, seeds),
        "contention": lambda: contention(world, seeds),
        "choices": lambda: choices(world),
        "again": lambda: again(world),
        "theta": lambda: theta(world, seeds),
        "four_gpus": lambda: four_gpus(world, seeds),
        "eight_gpus": lambda: eight_gpus(world, seeds),
        "length": lambda: length(world, seeds),
        "staleness": lambda: staleness(world, seeds),
        "routing": lambda: routing(world, seeds),
        "drawn": lambda: drawn(seeds),
        "ceiling": lambda: ceiling(world, seeds, json.loads(paper.read_text())),
    }
    if arguments.only not in (None, *parts):
        parser.error(f"--only takes one of {', '.join(parts)}")
    result = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    result |= {
        "command": "python -m bench.paper_causes --only PART --seeds (as each part says)",
        "machine": "2 shared cores, no GPU; simulated",
    }
    for name, part in parts.items():
        if arguments.only in (None, name):
            result[name] = {"seeds": seeds, **part()}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
