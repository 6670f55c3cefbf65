"""Do ZeRO 0, 1, 2 and 3 on one and two ranks train alike? The same batches, fp32, five steps; one table.

    python -m bench.zero_parity [--json] [--steps 5] [--model tiny-random-llama]

Every rank is a process of its own (gloo on a CPU, NCCL on a GPU) that trains all four stages one after the other. The
loss and the gradient norm of every step must agree with stage 0 on one rank within 1e-4, else the exit code is 1.
Writes `bench/results/zero_parity.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.models import resolve_model

TOLERANCE = 1e-4
STAGES, RANKS = (0, 1, 2, 3), (1, 2)
GROUPS, GROUP_SIZE = 4, 4
CONFIG = {"dtype": "float32", "learning_rate": 3e-3, "micro_batch_tokens": 256}
RESULT = Path(__file__).parent / "results" / "zero_parity.json"
REPOSITORY = Path(__file__).parent.parent


def make_groups(step: int) -> list[list[Trajectory]]:
    """Random tokens, two turns each, with rollout log-probs near those of a random model; a fixed seed per step."""
    rng = random.Random(step)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, 40_000) for _ in range(rng.randint(low, high)))

    def trajectory(group: int, index: int) -> Trajectory:
        segments = [Segment(SegmentKind.PROMPT, tokens(10, 40))]
        for _ in range(2):
            response = tokens(4, 20)
            logprobs = tuple(-10.8 + rng.uniform(-0.1, 0.1) for _ in response)
            segments.append(Segment(SegmentKind.RESPONSE, response, logprobs, step - 1))
            segments.append(Segment(SegmentKind.OBSERVATION, tokens(2, 10)))
        reward = float(index == 0 or rng.random() < 0.4)
        identity = TrajectoryId(GROUPS * step + group, index, 0)
        return Trajectory(identity, f"task-{group}", tuple(segments), 2, StopReason.SUBMITTED, reward)

    return [[trajectory(group, index) for index in range(GROUP_SIZE)] for group in range(GROUPS)]


def train(rank: int, ranks: int, ports: list[int], model: Path, steps: int) -> list[dict[str, Any]]:
    """Curves of all stages on this rank."""
    from trainer.zero import ZeroTrainer

    results = []
    for stage, port in zip(STAGES, ports, strict=True):
        config = TrainerConfig.model_validate(CONFIG | {"ranks": ranks, "zero_stage": stage})
        trainer = ZeroTrainer(config, model, "bfloat16", rank, ranks, "127.0.0.1", port, 0, steps, 1.0, 600.0)
        curve = [trainer.train_step(step, make_groups(step)) for step in range(1, steps + 1)]
        trainer.close()
        results.append(
            {
                "stage": stage,
                "ranks": ranks,
                "loss": [metrics["loss"] for metrics in curve],
                "grad_norm": [metrics["grad_norm"] for metrics in curve],
                "step_seconds_median": sorted(metrics["seconds"] for metrics in curve)[steps // 2],
            }
        )
    return results


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def run_ranks(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start `ranks` processes, wait, return what rank 0 measured. Raises SystemExit if one fails."""
    ports = ",".join(map(str, free_ports(len(STAGES))))
    command = [sys.executable, "-m", "bench.zero_parity", "--steps", str(arguments.steps), "--model", arguments.model]
    processes = [
        subprocess.Popen(
            [*command, "--rank", f"{rank}/{ranks}", "--ports", ports],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed; its traceback is above")
    return json.loads(outputs[0].splitlines()[-1])


def compare(results: list[dict[str, Any]]) -> float:
    """Add to each result its largest difference from the first one; return the largest of all."""
    reference = results[0]
    for result in results:
        for name in ("loss", "grad_norm"):
            pairs = zip(result[name], reference[name], strict=True)
            result[f"{name}_difference"] = max(abs(a - b) for a, b in pairs)
    return max(result[f"{name}_difference"] for result in results for name in ("loss", "grad_norm"))


def table(results: list[dict[str, Any]]) -> str:
    lines = ["stage  ranks  loss of each step" + " " * 39 + "max |dloss|  max |dnorm|  s/step (median)"]
    for r in results:
        losses = " ".join(f"{loss:+.6f}" for loss in r["loss"]).ljust(55)
        differences = f"{r['loss_difference']:11.1e}  {r['grad_norm_difference']:11.1e}"
        lines.append(f"{r['stage']:5}  {r['ranks']:5}  {losses} {differences}  {r['step_seconds_median']:15.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="tiny-random-llama")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--ports", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    if arguments.rank:
        rank, ranks = map(int, arguments.rank.split("/"))
        print(
            json.dumps(train(rank, ranks, [int(port) for port in arguments.ports.split(",")], model, arguments.steps))
        )
        return 0
    results = [result for ranks in RANKS for result in run_ranks(ranks, arguments)]
    largest = compare(results)
    report = provenance("bench.zero_parity", "torch", "deepspeed", "transformers") | {
        "model": arguments.model,
        "config": CONFIG,
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "agree": largest <= TOLERANCE,
        "results": results,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else table(results))
    return 0 if report["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
