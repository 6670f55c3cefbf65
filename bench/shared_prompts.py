"""A training step with and without `trainer.share_prompts`, in turn, on groups of the same shape.

    python -m bench.shared_prompts [--model smollm2-135m-instruct] [--prompt 120] [--response 25] [--groups 2]
                                   [--size 8] [--threads 2] [--steps 5] [--out bench/results/shared_prompts.json]

The limit is the FLOPs of forward and backward, so the ratio cannot be above that of the tokens,
(prompt + response) x size / (prompt + response x size).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median

from bench.provenance import provenance
from bench.zero_parity import free_ports
from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.models import resolve_model
from trainer.zero import ZeroTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    for name, default in {"prompt": 120, "response": 25, "groups": 2, "size": 8, "threads": 2, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = TrainerConfig(micro_batch_tokens=2560, threads=args.threads)
    model = Path(resolve_model(args.model))
    trainer = ZeroTrainer(config, model, "bfloat16", 0, 1, "127.0.0.1", free_ports(1)[0], 0, 4 * args.steps, 1.0, 600.0)
    assert trainer.shares_prompts, f"{args.model} cannot share prompts"
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for step in range(1, 2 * args.steps + 3):
        trainer.shares_prompts = step % 2 == 0
        metrics = trainer.train_step(step, make_groups(step, args))
        if step > 2:  # the first of each warms up
            seconds[trainer.shares_prompts].append(metrics["seconds"])
    trainer.close()
    apart, together = (args.prompt + args.response) * args.size, args.prompt + args.response * args.size
    result = provenance("bench.shared_prompts", "torch", "deepspeed", "transformers") | {
        "command": " ".join(["python -m bench.shared_prompts", *sys.argv[1:]]),
        "tokens_ratio": apart / together,
        "plain_s": median(seconds[False]),
        "shared_s": median(seconds[True]),
        "ratio": median(p / s for p, s in zip(seconds[False], seconds[True], strict=True)),
        "seconds": {"plain": seconds[False], "shared": seconds[True]},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def make_groups(step: int, args: argparse.Namespace) -> list[list[Trajectory]]:
    """Random tokens behind one prompt a group; rewards differ."""
    rng = random.Random(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, 40_000) for _ in range(count))

    def group(number: int) -> list[Trajectory]:
        prompt = Segment(SegmentKind.PROMPT, tokens(args.prompt))
        return [
            Trajectory(
                TrajectoryId(args.groups * step + number, index, 0),
                "task",
                (prompt, Segment(SegmentKind.RESPONSE, tokens(args.response), (-10.8,) * args.response, 0)),
                1,
                StopReason.SUBMITTED,
                float(index % 2),
            )
            for index in range(args.size)
        ]

    return [group(number) for number in range(args.groups)]


if __name__ == "__main__":
    main()
