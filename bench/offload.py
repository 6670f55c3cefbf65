"""How long does a trainer take to leave its device and come back, and how many bytes is that? One table.

    python -m bench.offload [--json] [--model smollm2-135m-instruct] [--stages 1,2,3] [--cycles 5]

One rank a stage, each in a process of its own, bf16. After one training step the trainer is offloaded and reloaded
`--cycles` times; then it trains a second step, whose loss must equal that of a run without cycles, else the exit code
is 1. On a CPU the same calls run but no byte leaves: there the seconds are those of the calls and of copies within host
memory, and the bytes those of the states. Writes `bench/results/offload.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from bench.zero_parity import free_ports
from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.models import resolve_model

CONFIG = {"dtype": "bfloat16", "learning_rate": 1e-5, "micro_batch_tokens": 512}
RESULT = Path(__file__).parent / "results" / "offload.json"
REPOSITORY = Path(__file__).parent.parent


def make_groups(step: int) -> list[list[Trajectory]]:
    """One group of four short answers; a fixed seed per step."""
    rng = random.Random(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, 40_000) for _ in range(count))

    def trajectory(index: int) -> Trajectory:
        answer = Segment(SegmentKind.RESPONSE, tokens(24), tuple(-10.8 for _ in range(24)), step - 1)
        segments = (Segment(SegmentKind.PROMPT, tokens(40)), answer)
        return Trajectory(TrajectoryId(step, index, 0), "task", segments, 1, StopReason.SUBMITTED, float(index % 2))

    return [[trajectory(index) for index in range(4)]]


def measure(stage: int, model: Path, cycles: int, port: int) -> dict[str, Any]:
    """This process's trainer: the cycles, and the loss of the step after them."""
    from trainer.zero import ZeroTrainer

    config = TrainerConfig.model_validate(CONFIG | {"zero_stage": stage})
    trainer = ZeroTrainer(config, model, "bfloat16", 0, 1, "127.0.0.1", port, 0, 2, 1.0, 600.0)
    trainer.train_step(1, make_groups(1))
    moves = [(trainer.offload(), trainer.reload()) for _ in range(cycles)]
    loss = trainer.train_step(2, make_groups(2))["loss"]
    trainer.close()
    return {"stage": stage, "loss": loss, "cycles": [{"offload": asdict(a), "reload": asdict(b)} for a, b in moves]}


def run(stage: int, cycles: int, port: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "bench.offload", "--one", f"{stage},{cycles},{port}", "--model", arguments.model]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"stage {stage} failed; its traceback is above")
    return json.loads(done.stdout.splitlines()[-1])


def summary(result: dict[str, Any], plain_loss: float) -> dict[str, Any]:
    """Medians over the cycles, the first apart: it allocates the host buffers."""
    cycles = result["cycles"]

    def seconds(kind: str) -> float:
        return statistics.median(cycle[kind]["seconds"] for cycle in cycles[1:])

    away = cycles[-1]["offload"]
    return {
        "stage": result["stage"],
        "offload_first_s": cycles[0]["offload"]["seconds"],
        "offload_s": seconds("offload"),
        "reload_s": seconds("reload"),
        "state_bytes": away["state_bytes"],
        "device_bytes_freed": away["device_bytes_before"] - away["device_bytes_after"],
        "device_bytes_left": away["device_bytes_after"],
        "loss_is_identical": result["loss"] == plain_loss,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["stage  first offload s  offload s  reload s  states MB  freed MB  left MB  next loss"]
    for r in rows:
        freed, left = r["device_bytes_freed"] / 1e6, r["device_bytes_left"] / 1e6
        lines.append(
            f"{r['stage']:5}  {r['offload_first_s']:15.3f}  {r['offload_s']:9.3f}  {r['reload_s']:8.3f}  "
            f"{r['state_bytes'] / 1e6:9.0f}  {freed:8.0f}  {left:7.0f}  "
            + ("identical" if r["loss_is_identical"] else "DIFFERS")
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--stages", default="1,2,3", help="ZeRO stages, separated by commas")
    parser.add_argument("--cycles", type=int, default=5, help="at least 2")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    if arguments.one:
        stage, cycles, port = map(int, arguments.one.split(","))
        print(json.dumps(measure(stage, model, cycles, port)))
        return 0
    if arguments.cycles < 2:
        parser.error("--cycles must be 2 or more: the first one is reported apart")
    stages = [int(stage) for stage in arguments.stages.split(",")]
    rows = []
    for stage in stages:
        ports = free_ports(2)
        plain = run(stage, 0, ports[0], arguments)
        rows.append(summary(run(stage, arguments.cycles, ports[1], arguments), plain["loss"]))
    report = provenance("bench.offload", "torch", "deepspeed", "transformers") | {
        "command": "python -m bench.offload " + " ".join(sys.argv[1:]),
        "model": arguments.model,
        "config": CONFIG,
        "cycles": arguments.cycles,
        "load_average": os.getloadavg()[0],
        "results": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else table(rows))
    return 0 if all(row["loss_is_identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
