"""TRL's GRPO trainer and PEARL side by side: same model, prompts, group size, lengths, precision and machine.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0
    python -m bench.peer_trl --python /tmp/trl/bin/python [--pairs 2] [--steps 5] [--config examples/learn.yaml]
                             [--threads 2] [--out bench/results/peer_trl.json]

TRL is not a dependency: it lives in an environment of its own, and this file runs there as a plain script. A pair is
one run of each, in turn. PEARL plays its sandboxed tasks; TRL gets the prompts that PEARL played, token for token, in
their order, and a reward that costs nothing. The learning rate is 0 and groups without variance are kept, so both do
all their work and the answers stay as long on both sides. Both are measured from the end of step 1 to the end of step
`--steps`, so that starting up does not count; PEARL goes on for two steps more, so that its rollout is as far ahead at
the end of the window as at its beginning. The limit: the FLOPs of forward and backward over prompts and responses, and
of decoding, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEMPERATURE = 1.0
ALIKE = ("trainer.learning_rate=0", "trainer.grpo.zero_variance=keep")
"""Overrides for PEARL, so that neither side is spared anything."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--config", type=Path, default=Path("examples/learn.yaml"))
    parser.add_argument("--threads", type=int, default=2, help="TRL's threads; PEARL's are the configuration's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.pairs):
            ours, job = run_pearl(args, number, Path(folder))
            theirs = run_trl(args, job, Path(folder))
            pair = {"pearl": ours, "trl": theirs}
            pair["ratio"] = {k: round(ours[k] / theirs[k], 3) for k in ("samples_per_s", "generated_tokens_per_s")}
            pairs.append(pair)
            print(json.dumps(pair), file=sys.stderr)
    result = {
        "command": " ".join(["python -m bench.peer_trl", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "job": {k: v for k, v in job.items() if k != "prompts"},
        "pairs": pairs,
        "samples_per_s_ratio": statistics.fmean(p["ratio"]["samples_per_s"] for p in pairs),
        "generated_tokens_per_s_ratio": statistics.fmean(p["ratio"]["generated_tokens_per_s"] for p in pairs),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "pairs"}))


def run_pearl(args: argparse.Namespace, seed: int, folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """One `pearl train`; its rates, and the job that it was, for the peer."""
    import msgpack

    from envs.chat import ChatRenderer
    from pearl.config.load import load_config
    from pearl.models import resolve_model

    run = folder / f"pearl-{seed}"
    overrides = [f"run_dir={run}", f"pipeline.steps={args.steps + 2}", f"seed={seed}", *ALIKE]
    command = [sys.executable, "-m", "pearl.cli", "train", str(args.config), *overrides, "--json"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = load_config(args.config, overrides)
    directory = resolve_model(config.model.path)
    chat = ChatRenderer.load(directory)
    with (run / "trajectories.msgpack").open("rb") as file:
        trained = [r["trajectory"] for r in msgpack.Unpacker(file) if r["trajectory"]]
    by_group = {t["id"][0]: t["segments"][0]["token_ids"] for t in trained}
    size = config.pipeline.groups_per_batch * config.pipeline.group_size
    job = {
        "model": str(config.model.path),
        "directory": str(directory),
        "dtype": config.trainer.dtype,
        "steps": args.steps,
        "batch": size,
        "group": config.pipeline.group_size,
        "max_response_tokens": config.pipeline.max_response_tokens,
        "learning_rate": config.trainer.learning_rate,
        "threads": args.threads,
        "prompts": [chat.decode(ids) for _, ids in sorted(by_group.items())],
    }
    later = records[1 : args.steps]
    seconds = sum(r["seconds_since_last"] for r in later)
    responses = sum(r["response_tokens"] * r["trajectories"] for r in later)
    return rates(size * len(later), responses, seconds), job


def run_trl(args: argparse.Namespace, job: dict[str, Any], folder: Path) -> dict[str, float]:
    (folder / "job.json").write_text(json.dumps(job))
    command = [args.python, str(Path(__file__).resolve()), "--trl", str(folder / "job.json")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": str(job["threads"])}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=folder)
    return json.loads(output.stdout.splitlines()[-1])


def rates(samples: float, tokens: float, seconds: float) -> dict[str, float]:
    return {
        "samples_per_s": samples / seconds,
        "generated_tokens_per_s": tokens / seconds,
        "response_tokens_mean": tokens / samples,
        "seconds": seconds,
    }


def trl_main(path: str) -> None:
    """Runs in TRL's environment: nothing of PEARL is imported. Its rates as the last line."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    lengths: list[int] = []
    ends: list[tuple[float, int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(len(ids) % 2) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.monotonic(), len(lengths)))

    settings = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": job["dtype"]},
        gradient_checkpointing=False,
        per_device_train_batch_size=job["batch"],
        num_generations=job["group"],
        max_completion_length=job["max_response_tokens"],
        temperature=TEMPERATURE,
        learning_rate=job["learning_rate"],
        max_steps=job["steps"],
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=job["directory"],
        args=settings,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
        callbacks=[Clock()],
    )
    trainer.train()
    (began, before), (ended, after) = ends[0], ends[-1]
    print(json.dumps(rates(after - before, sum(lengths[before:after]), ended - began)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        trl_main(sys.argv[2])
    else:
        main()
