"""Tokens per dollar with as many preemptible GPUs as are worth it, against all of them and none.

    python -m bench.autoscale [--seeds 3] [--hours 2] [--out bench/results/autoscale.json]

The source's testbed (16 training and 4 reserved GPUs, up to 12 preemptible ones) on three segments of a public trace,
simulated; policies `elastic`, which borrows no training GPUs, and `pearl`. A dedicated GPU costs 1 an hour. What a
preemptible one costs changes nothing for `all` and `none` but the bill, so these are played once. Ratios are paired
by seed, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.provenance import provenance
from pearl.core.autoscaler import Objective
from pearl.observe.interval import bootstrap
from pearl.paper.testbed import Testbed
from pearl.paper.world import SEGMENTS
from pearl.sim.scenario import simulate

POLICIES = ("elastic", "pearl")
PRICES = (0.2, 0.35, 0.9)
"""Of a preemptible GPU hour."""


def play(scenario: Testbed) -> dict[str, Any]:
    summary, _ = simulate(scenario)
    tokens = summary["generated_tokens"] + summary["trained_tokens"]
    return {"tokens": tokens, "seconds": summary["simulated_s"], "preemptible_gpu_s": summary["preemptible_gpu_s"]}


def tokens_per_usd(scenario: Testbed, run: dict[str, Any]) -> float:
    return run["tokens"] / scenario.usd(run["seconds"], run["preemptible_gpu_s"])


def compare(segment: str, policy: str, seeds: int, hours: float) -> list[dict[str, Any]]:
    testbeds = [Testbed(policy=policy, trace=segment, seed=seed, hours=hours) for seed in range(seeds)]
    everything = [play(testbed) for testbed in testbeds]
    nothing = [play(replace(testbed, preemptible_gpus=0, trace="none")) for testbed in testbeds]
    rows = []
    for price in PRICES:
        priced = [replace(testbed, preemptible_usd_per_gpu_hour=price) for testbed in testbeds]
        scaled = [play(replace(testbed, autoscale=Objective.TOKENS_PER_USD)) for testbed in priced]
        row: dict[str, Any] = {"segment": segment, "policy": policy, "price": price}
        row["gpu_hours"] = round(fmean(run["preemptible_gpu_s"] for run in scaled) / 3600, 2)
        row["gpu_hours_of_all"] = round(fmean(run["preemptible_gpu_s"] for run in everything) / 3600, 2)
        row["tokens_over_all"] = round(
            fmean(s["tokens"] / a["tokens"] for s, a in zip(scaled, everything, strict=True)), 4
        )
        for name, runs in (("all", everything), ("none", nothing)):
            ratios = [
                tokens_per_usd(testbed, run) / tokens_per_usd(testbed, other)
                for testbed, run, other in zip(priced, scaled, runs, strict=True)
            ]
            found = bootstrap(ratios, seed=0)
            row[f"tokens_per_usd_over_{name}"] = round(found.mean, 4)
            row[f"interval_over_{name}"] = [round(x, 4) for x in (found.low, found.high)]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = [
        row
        for segment in SEGMENTS
        for policy in POLICIES
        for row in compare(segment, policy, arguments.seeds, arguments.hours)
    ]
    result = {**provenance("bench.autoscale"), "wall_s": round(time.monotonic() - began, 1), "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
