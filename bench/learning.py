"""Does a run learn? Reward per step on several seeds, a control that cannot learn, and held-out tasks before and after.

    python -m bench.learning [--config examples/learn.yaml] [--seeds 0 1 2] [--steps 30] [--control-steps 20]

Each seed is one `pearl train` and one `pearl eval RUN --against MODEL`, as a user types them. The control is the first
seed with learning rate 0, on as many tasks as the two windows of 10 steps hold, so that both have the same ones, and in
groups twice as large: tasks differ much more than 0.05 in how easy they are. Writes <out>/<name>.json after every run
(`--add` goes on with what is missing there), <out>/<name>.png at the end. Training tasks alone decide about settings:
the held-out tasks are played once per seed, when its training is over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack
import torch

from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.models import resolve_model

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 10
"""Steps at each end whose mean rewards are compared."""
GAIN, STILL = 0.3, 0.05
"""What a seed must gain at least, and what the control may move at most."""


def pearl(*arguments: str) -> dict[str, Any]:
    """Last line of a command's output; its console goes to ours."""
    command = [sys.executable, "-m", "pearl.cli", *arguments, "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def train(options: argparse.Namespace, seed: int, steps: int, *overrides: str) -> dict[str, Any]:
    summary = pearl(
        "train", str(options.config), f"seed={seed}", f"pipeline.steps={steps}", f"run_root={options.runs}", *overrides
    )
    rewards = summary["reward_by_step"]
    first, last = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
    return {
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "trajectories": summary["trajectories_completed"],
        "first": first,
        "last": last,
        "gain": last - first,
        "reward_by_step": rewards,
        "said": said(Path(summary["run_dir"])),
        "commit": commit(),
        "weight_checksums": len(set(summary["trainer_checksums"].values())),
        "run_dir": summary["run_dir"],
    }


def control(options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    p = config.pipeline
    same, larger = f"environment.tasks={WINDOW * p.groups_per_batch}", f"pipeline.group_size={2 * p.group_size}"
    room = f"engine.max_running_requests={2 * config.engine.max_running_requests}"
    still = "trainer.learning_rate=0"
    return train(options, options.seeds[0], options.control_steps, still, same, larger, room)


def said(run: Path, count: int = 4) -> dict[str, list[str]]:
    """The first responses of a run and its last ones, with their rewards: what was learnt, in words."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(load_config(run / "config.yaml").model.path))
    with (run / "trajectories.msgpack").open("rb") as file:
        played = [record["trajectory"] for record in msgpack.Unpacker(file) if record["trajectory"]]

    def text(trajectory: dict[str, Any]) -> str:
        ids = [t for s in trajectory["segments"] if s["kind"] == "response" for t in s["token_ids"]]
        return f"{trajectory['task']} {trajectory['reward']:.2f} {tokenizer.decode(ids)!r}"

    return {"first": [text(t) for t in played[:count]], "last": [text(t) for t in played[-count:]]}


def held_out(run: str, model: str, tasks: int) -> dict[str, Any]:
    figures = pearl("eval", run, "--against", model, "--tasks", str(tasks))
    after, before = figures["models"]
    kept = ("first_task", "tasks", "met_in_training", "tasks_counted", "environment_seed", "temperature", "difference")
    short = ("reward", "pass_at_1")
    return {
        **{name: figures[name] for name in kept},
        "before": {name: before[name] for name in short},
        "after": {name: after[name] for name in short},
    }


def verdict(result: dict[str, Any]) -> dict[str, bool | None]:
    """What can be said so far; None of what was not run."""
    seeds, control = result["seeds"], result["control"]
    played = [seed["held_out"] for seed in seeds if seed.get("held_out")]
    return {
        f"every seed gains at least {GAIN}": bool(seeds) and all(seed["gain"] >= GAIN for seed in seeds),
        f"the control moves by less than {STILL}": abs(control["gain"]) < STILL if control else None,
        "held-out reward rises on every seed": len(played) == len(seeds) > 0
        and all(play["difference"]["reward"]["low"] > 0 for play in played),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1))
    for number, seed in enumerate(result["seeds"]):
        steps = range(1, len(seed["reward_by_step"]) + 1)
        left.plot(steps, seed["reward_by_step"], color=f"C{number}", label=f"seed {seed['seed']}")
    if control := result["control"]:
        steps = range(1, len(control["reward_by_step"]) + 1)
        left.plot(steps, control["reward_by_step"], color="0.5", label="control: learning rate 0")
    left.set(xlabel="optimizer step", ylabel="mean reward of the batch", ylim=(-0.02, 1.05))
    left.set_title(f"{result['model']} on {result['family']}, training tasks")
    left.legend(frameon=False)
    played = [seed for seed in result["seeds"] if seed.get("held_out")]
    for number, seed in enumerate(played):
        for offset, when, fill in ((-0.12, "before", "white"), (0.12, "after", f"C{number}")):
            reward = seed["held_out"][when]["reward"]
            error = [[reward["mean"] - reward["low"]], [reward["high"] - reward["mean"]]]
            right.errorbar(
                number + offset, reward["mean"], yerr=error, fmt="o", color=f"C{number}", mfc=fill, capsize=3
            )
    right.set_xticks(range(len(played)), [f"seed {seed['seed']}" for seed in played])
    right.set(xlim=(-0.6, max(len(played), 1) - 0.4), ylim=(-0.02, 1.05), ylabel="mean reward, 95 % interval")
    right.set_title("held-out tasks: before (open), after")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return result.stdout.strip()


def new_result(options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    seeds = " ".join(map(str, options.seeds))
    return {
        "model": config.model.path,
        "family": config.environment.family,
        "learning_rate": config.trainer.learning_rate,
        "command": f"python -m bench.learning --config {options.config} --seeds {seeds} --steps {options.steps} "
        f"--control-steps {options.control_steps} --tasks {options.tasks}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, shared with other work",
        "torch": torch.__version__,
        "seeds": [],
        "control": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/learn.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--control-steps", type=int, default=20, help="0 leaves the control out")
    parser.add_argument("--tasks", type=int, default=48, help="held-out tasks; 0 plays none")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where run directories go")
    parser.add_argument("--out", type=Path, default=Path("bench/results/learning"))
    parser.add_argument("--add", action="store_true", help="keep what the JSON has, run what is missing")
    parser.add_argument("--redraw", action="store_true", help="only draw the plot again from the JSON")
    options = parser.parse_args()
    config = load_config(options.config)
    file = options.out / f"{config.name}.json"
    if options.redraw:
        plot(json.loads(file.read_text()), file.with_suffix(".png"))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    result = json.loads(file.read_text()) if options.add and file.exists() else new_result(options, config)

    def save() -> None:
        result["verdict"] = verdict(result)
        file.write_text(json.dumps(result, indent=1) + "\n")

    for seed in options.seeds:
        one = next((one for one in result["seeds"] if one["seed"] == seed), None)
        if one is None:
            one = train(options, seed, options.steps)
            result["seeds"].append(one)
            save()
        if options.tasks and "held_out" not in one:
            one["held_out"] = held_out(one["run_dir"], config.model.path, options.tasks)
            save()
    if options.control_steps and result["control"] is None:
        result["control"] = control(options, config)
        save()
    for one in [*result["seeds"], *([result["control"]] if result["control"] else [])]:
        one.pop("run_dir", None)  # a place on this machine
    save()
    plot(result, file.with_suffix(".png"))
    print(json.dumps(result["verdict"], indent=1))


if __name__ == "__main__":
    main()
