"""Start rewards of a model on a task family: real agent loop, real sandboxes, plain `transformers` generation.

    python -m bench.baseline_reward --family files --tasks 32 --group 4

Groups whose samples all earn the same teach GRPO nothing; the share of groups with variance is what to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from envs.agent import AgentSession, open_session
from envs.chat import ChatRenderer
from envs.protocol import TaskFamily
from envs.registry import make_family
from envs.sandbox.backend import BubblewrapBackend
from pearl.config.environment import EnvironmentConfig
from pearl.models import resolve_model


@dataclass
class Played:
    """One trajectory while it is played, and what came of it."""

    group: int
    session: AgentSession
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    generated: int = 0
    stop: str | None = None
    reward: float = 0.0
    said: list[str] = field(default_factory=list)


class Generator:
    """Batched sampling at temperature 1."""

    def __init__(self, directory: Path, end_token: int, new_tokens: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self.end_token = end_token
        self.new_tokens = new_tokens

    @torch.inference_mode()
    def respond(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.end_token] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=self.new_tokens,
            eos_token_id=self.end_token,
            pad_token_id=self.end_token,
        )
        return [_until(row[longest:].tolist(), self.end_token) for row in out]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


async def play(played: list[Played], generator: Generator, chat: ChatRenderer, batch: int) -> None:
    for item in played:
        item.ids = await item.session.start()
        item.prompt_tokens = len(item.ids)
    while waiting := [item for item in played if item.stop is None]:
        waiting = sorted(waiting, key=lambda item: len(item.ids))[:batch]
        responses = generator.respond([item.ids for item in waiting])
        advances = await asyncio.gather(
            *(item.session.advance(ids) for item, ids in zip(waiting, responses, strict=True))
        )
        for item, ids, advance in zip(waiting, responses, advances, strict=True):
            item.ids += [*ids, *advance.observation_ids]
            item.generated += len(ids)
            item.said.append(chat.decode(ids))
            item.stop = None if advance.stop is None else str(advance.stop)
    for item in played:
        item.reward = (await item.session.score()).reward
        await item.session.close()


async def step_cost(backend: BubblewrapBackend, family: TaskFamily, repeat: int = 40) -> dict[str, float]:
    """Median milliseconds of `true`: as a plain process, in a sandbox, and as a step of an environment. Paired runs."""
    sandbox = await backend.create({})
    environment = family.open(0)
    await environment.reset(60)

    async def plain() -> None:
        await (await asyncio.create_subprocess_exec("/usr/bin/bash", "-c", "true")).wait()

    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "plain_command_ms": plain,
        "sandbox_command_ms": lambda: sandbox.exec("true", timeout_s=60),
        "environment_step_ms": lambda: environment.step("true", 60),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            begin = time.perf_counter()
            await way()
            taken[name].append(1e3 * (time.perf_counter() - begin))
    await environment.close()
    await sandbox.close()
    return {name: statistics.median(times) for name, times in taken.items()}


def summary(played: list[Played]) -> dict[str, Any]:
    groups: dict[int, list[float]] = defaultdict(list)
    kinds: dict[str, list[float]] = defaultdict(list)
    for item in played:
        groups[item.group].append(item.reward)
        kinds[item.session.task.kind].append(item.reward)
    rewards = [item.reward for item in played]
    return {
        "trajectories": len(played),
        "groups": len(groups),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_zero_share": rewards.count(0.0) / len(rewards),
        "reward_one_share": rewards.count(1.0) / len(rewards),
        "groups_with_variance": sum(len(set(group)) > 1 for group in groups.values()) / len(groups),
        "format_errors_per_turn": sum(i.session.format_errors for i in played) / sum(i.session.turns for i in played),
        "turns_mean": statistics.fmean(item.session.turns for item in played),
        "stops": dict(Counter(str(item.stop) for item in played)),
        "prompt_tokens_mean": statistics.fmean(item.prompt_tokens for item in played),
        "prompt_tokens_max": max(item.prompt_tokens for item in played),
        "generated_tokens_mean": statistics.fmean(item.generated for item in played),
        "trajectory_tokens_mean": statistics.fmean(len(item.ids) for item in played),
        "trajectory_tokens_max": max(len(item.ids) for item in played),
        "reward_by_kind": {kind: statistics.fmean(values) for kind, values in sorted(kinds.items())},
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    directory = resolve_model(options.model)
    chat = ChatRenderer.load(directory)
    generator = Generator(directory, chat.end_token, options.new_tokens)
    config = EnvironmentConfig(
        family=options.family, tasks=options.tasks, seed=options.seed, max_turns=options.turns, observation_tokens=64
    )
    backend = BubblewrapBackend(config.sandbox, name="baseline")
    try:
        await backend.probe()
        family = make_family(config, backend)
        played = [
            Played(task, open_session(family, task, chat, config))
            for task in range(options.tasks)
            for _ in range(options.group)
        ]
        cost = await step_cost(backend, family)
        begin = time.monotonic()
        await play(played, generator, chat, options.batch)
        seconds = time.monotonic() - begin
    finally:
        await backend.close()
    if options.show:
        for item in played[:: max(1, len(played) // options.show)]:
            print(f"--- {item.session.task.name} reward {item.reward:.2f} {item.stop}")
            print("\n~~\n".join(item.said))
    return {"family": options.family, "model": options.model, **summary(played), "seconds": seconds, **cost}


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    command = "python -m bench.baseline_reward " + " ".join(
        f"--{key.replace('_', '-')} {value}"
        for key, value in vars(options).items()
        if key not in ("json", "out", "show")
    )
    return {
        "command": command,
        "commit": commit,
        "machine": f"{platform.machine()}, CPU, 1 torch thread",
        "torch": torch.__version__,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table("figure", "value", title=f"start reward of {result['model']} on {result['family']}")
    for key, value in result.items():
        shown.add_row(key, f"{value:.3f}" if isinstance(value, float) else json.dumps(value))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--family", default="files")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print this many trajectories")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write JSON to this file, under the family's name")
    options = parser.parse_args()
    source = provenance(options)  # before: the checkout may move on while this runs
    result = {**asyncio.run(measure(options)), **source}
    if options.out:
        results = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**results, options.family: result}, indent=2, sort_keys=True) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        Console(width=140).print(table(result))


if __name__ == "__main__":
    main()
