"""NVIDIA Dynamo's offline replay and our simulator side by side: the same trajectories, costs and sizes.

    python -m venv /tmp/dynamo && /tmp/dynamo/bin/pip install ai-dynamo==1.2.1
    python -m bench.peer_dynamo --python /tmp/dynamo/bin/python [--batches 32 64 128] [--layouts 8C 2P6D 4P4D]
                                [--profile qwen3-8b@h800] [--memory 1] [--out bench/results/peer_dynamo.json]

Dynamo is not a dependency: it lives in an environment of its own, and this file runs there as a plain script. Its mock
engine (vLLM's scheduler in virtual time, in Rust) asks a callback for the time of each iteration, which answers with
our engine profile. Trajectories of the workload `swe` start all at once; the environment behind the last turn counts in
neither. Beside ours as it is there are variants that do what Dynamo does, each on top of the one before:

* `responses_forgotten`: what was generated is not found again in a prefix cache, since the replay makes up its tokens
* `whole_transfers`: a whole context crosses from prefill to decode worker, whatever is there already
* `no_affinity`: a turn goes to whoever has least to do, for Dynamo's `round_robin`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pearl.core.layout import Layout
    from pearl.core.trajectory import TrajectoryId
    from pearl.core.workload import EngineProfile
    from pearl.sim.workload import Plan

PEER = "ai-dynamo==1.2.1"
ROUTERS = ("kv_router", "round_robin")
GROUP = 16
MAX_TOKENS = 32_768
CHUNK_TOKENS = 8192
BLOCK_TOKENS = 64
"""Of a KV block there; a prefix is found in whole ones."""


def main() -> None:
    from pearl.core.layout import Layout
    from pearl.profiles import load_profile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help=f"an interpreter that has {PEER}")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--layouts", nargs="+", default=["8C", "2P6D", "4P4D"])
    parser.add_argument("--profile", default="qwen3-8b@h800")
    parser.add_argument("--memory", type=float, default=1.0, help="times the profile's KV memory")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, _, gpu = arguments.profile.partition("@")
    engine = load_profile(model, gpu, 2)
    engine = replace(engine, kv_capacity_tokens=int(engine.kv_capacity_tokens * arguments.memory))
    rows = []
    for batch in arguments.batches:
        plans = record(batch)
        for layout in map(Layout.parse, arguments.layouts):
            for router in ROUTERS:
                theirs = replay(arguments.python, engine, plans, layout, router)
                ours = {name: play(engine, plans, layout, changes) for name, changes in variants(layout, router)}
                ratio = {name: round(theirs["makespan_s"] / one["makespan_s"], 3) for name, one in ours.items()}
                row = {"batch": batch, "layout": str(layout), "router": router, "dynamo_by_pearl": ratio}
                rows.append({**row, "dynamo": theirs, "pearl": ours})
                print(json.dumps(row), theirs["makespan_s"], file=sys.stderr, flush=True)
    result = {
        "command": " ".join(["python -m bench.peer_dynamo", *sys.argv[1:]]),
        "peer": PEER,
        "machine": f"{os.cpu_count()} shared cores ({platform.machine()}), no GPU; makespans are simulated",
        "profile": f"{arguments.profile}, workers of two GPUs with {engine.kv_capacity_tokens} tokens of KV memory",
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "rows": len(rows)}))


def record(batch: int) -> list[Plan]:
    """One plan a trajectory, group by group, cut where the context is full."""
    from pearl.core.trajectory import TrajectoryId
    from pearl.sim.workload import PRESETS, Plan

    plans = []
    for group, member in (divmod(i, GROUP) for i in range(batch)):
        plan = PRESETS["swe"].plan(group, TrajectoryId(group, member, 0))
        turns, context = [], 0
        for new, response in zip(plan.new, plan.response, strict=True):
            if context + new >= MAX_TOKENS:
                break
            turns.append((new, min(response, MAX_TOKENS - context - new)))
            context += sum(turns[-1])
        news, responses = zip(*turns, strict=True)
        plans.append(Plan(news, responses, [*plan.seconds[: len(turns) - 1], 0.0], plan.reward, 0.0, 0.0))
    return plans


# --- ours -----------------------------------------------------------------------------------------


class Recorded:
    """A workload."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans

    def plan(self, task: int, trajectory: TrajectoryId) -> Plan:
        return self.plans[trajectory.group * GROUP + trajectory.member]


def variants(layout: Layout, router: str) -> list[tuple[str, frozenset[str]]]:
    """Names, and all that is changed."""
    names = ["responses_forgotten"]
    if layout.decode:
        names.append("whole_transfers")
    if router == "round_robin":
        names.append("no_affinity")
    return [("as_it_is", frozenset()), *((name, frozenset(names[: i + 1])) for i, name in enumerate(names))]


def play(engine: EngineProfile, plans: list[Plan], layout: Layout, changes: frozenset[str]) -> dict[str, Any]:
    """One batch in our simulator."""
    from unittest.mock import patch

    from pearl.core import routing
    from pearl.sim.batch import run_batch
    from pearl.sim.engine import EngineOptions
    from pearl.sim.kv import KvMemory

    keep = KvMemory.give

    def forget(self: KvMemory, trajectory: TrajectoryId, *, grown: int = 0, **more: Any) -> None:
        """`grown` and the response's first token."""
        keep(self, trajectory, grown=grown, **more)
        if grown and trajectory in self.idle:
            self.idle[trajectory] -= grown + 1
            self.idle_tokens -= grown + 1
            self.used -= grown + 1

    with contextlib.ExitStack() as patches:
        if "responses_forgotten" in changes:
            patches.enter_context(patch.object(KvMemory, "give", forget))
        if "no_affinity" in changes:
            patches.enter_context(patch.object(routing, "AFFINITY_SLACK", -1))
        options = EngineOptions(chunk_tokens=CHUNK_TOKENS, decode_keeps_kv="whole_transfers" not in changes)
        began = time.perf_counter()
        run = run_batch(
            layout, engine, Recorded(plans), len(plans), group_size=GROUP, max_tokens=MAX_TOKENS, options=options
        )
        wall_s = time.perf_counter() - began
    return measured(run.makespan_s, run.cached_tokens / run.prompt_tokens, run.generated_tokens, wall_s)


def measured(makespan_s: float, reused: float, generated_tokens: int, wall_s: float) -> dict[str, Any]:
    return {
        "makespan_s": round(makespan_s, 2),
        "prompt_tokens_reused": round(reused, 3),
        "generated_tokens": generated_tokens,
        "wall_s": round(wall_s, 2),
        "generated_tokens_per_wall_s": round(generated_tokens / wall_s),
    }


# --- theirs ---------------------------------------------------------------------------------------


def replay(python: str, engine: EngineProfile, plans: list[Plan], layout: Layout, router: str) -> dict[str, Any]:
    """The same in Dynamo's environment."""
    with tempfile.TemporaryDirectory() as folder:
        trace, job = Path(folder) / "trace.jsonl", Path(folder) / "job.json"
        trace.write_text("\n".join(json.dumps(row) for row in requests(plans)) + "\n")
        workers = {"prefill": layout.prefill, "decode": layout.decode, "colocated": layout.colocated}
        job.write_text(
            json.dumps({"engine": asdict(engine), "trace": str(trace), "router": router, "workers": workers})
        )
        command = [python, str(Path(__file__).resolve()), "--dynamo", str(job)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"DYN_LOG": "error"}
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=folder)
    told = json.loads(output.stdout.splitlines()[-1])
    turns = sum(plan.turns for plan in plans)
    assert told["completed_requests"] == turns, f"{told['completed_requests']} of {turns} requests were served"
    return measured(
        told["duration_ms"] / 1e3, told["prefix_cache_reused_ratio"], told["total_output_tokens"],
        told["wall_time_ms"] / 1e3,
    )  # fmt: skip


def requests(plans: list[Plan]) -> list[dict[str, Any]]:
    """A Mooncake trace: a session a trajectory. Equal block ids are equal tokens, so the whole blocks of a group's
    prompt have the group's, and all others the trajectory's."""
    rows: list[dict[str, Any]] = []
    for number, plan in enumerate(plans):
        shared = plan.new[0] // BLOCK_TOKENS
        context, delay_ms = 0, 0.0
        for turn in range(plan.turns):
            context += plan.new[turn]
            blocks = range(-(-context // BLOCK_TOKENS))
            ids = [1000 * (number // GROUP if b < shared else len(plans) + number) + b for b in blocks]
            when = {"delay": delay_ms} if turn else {"timestamp": 0.0}
            sizes = {"input_length": context, "output_length": plan.response[turn], "hash_ids": ids}
            rows.append({"session_id": str(number), **sizes, **when})
            context += plan.response[turn]
            delay_ms = 1e3 * plan.seconds[turn]
    return rows


class Costs:
    """What Dynamo asks for, in ms; lengths are means over the batch."""

    def __init__(self, engine: dict[str, float]) -> None:
        self.engine = engine

    def predict_prefill(self, batch: int, new: int, before: int) -> float:
        e = self.engine
        each = e["prefill_s_per_token"] * new + e["prefill_s_per_token2"] * new * (new / 2 + before)
        return 1e3 * (e["prefill_fixed_s"] + batch * each)

    def predict_decode(self, batch: int, context: int, tokens: int) -> float:
        e = self.engine
        each = e["decode_s_per_sequence"] + e["decode_s_per_kv_token"] * context
        experts = e["expert_fixed_s"] * (1 - (1 - e["expert_share"]) ** batch)
        return 1e3 * (e["decode_fixed_s"] + batch * each + experts)


def dynamo_main(path: str) -> None:
    """Runs in Dynamo's environment: nothing of PEARL is imported. Its report as the last line."""
    from dynamo._core import MockEngineArgs
    from dynamo._internal import aic
    from dynamo.replay.api import run_trace_replay

    job = json.loads(Path(path).read_text())
    engine, workers = job["engine"], job["workers"]
    aic.create_session = lambda *_, **__: Costs(engine)
    common = {
        "block_size": BLOCK_TOKENS, "num_gpu_blocks": engine["kv_capacity_tokens"] // BLOCK_TOKENS,
        "max_num_seqs": engine["max_running_requests"], "max_num_batched_tokens": CHUNK_TOKENS,
        "aic_backend": "vllm", "aic_system": "ours", "aic_model_path": "ours", "aic_tp_size": 1,
    }  # fmt: skip
    shape: dict[str, Any]
    if workers["colocated"]:
        shape = {"num_workers": workers["colocated"], "extra_engine_args": MockEngineArgs(**common)}
    else:
        pair = {
            **common,
            "kv_bytes_per_token": int(engine["kv_bytes_per_token"]),
            "kv_transfer_bandwidth": engine["transfer_bytes_per_s"] / 1e9,
        }
        shape = {f"num_{half}_workers": workers[half] for half in ("prefill", "decode")}
        shape |= {f"{half}_engine_args": MockEngineArgs(worker_type=half, **pair) for half in ("prefill", "decode")}
    report = run_trace_replay(job["trace"], router_mode=job["router"], trace_block_size=BLOCK_TOKENS, **shape)
    print(json.dumps(report))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--dynamo"]:
        dynamo_main(sys.argv[2])
    else:
        main()
