"""Generated tokens/s through the whole stack ÷ the same engines driven by a plain HTTP client, paired.

    python -m bench.stack_overhead [--pairs 3] [--workers 1] [--model smollm2-135m-instruct] [--json]

The stack: Pipeline machine, driver, Dask calls, rollout actors, streaming, real environments in sandboxes; only the
trainer is replaced by one that answers at once, because here it would share the engines' cores. The plain client then
sends the very same requests (prompts, lengths, log-probs on) to the very same servers, without streaming, with the same
number in flight. The limit: the engines' own rate; the stack may cost at most a tenth of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.pipeline_turns import NoTrainer
from pearl.cli import quiet_libraries
from pearl.cluster.binding import bind
from pearl.config import RunConfig
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.live.actors import ActorClasses
from pearl.live.driver import Driver
from pearl.live.run_directory import RunDirectory
from pearl.models import resolve_model
from pearl.weights.snapshot import config_hash, write_snapshot


class Exporter(NoTrainer):
    """Publishes the model's own weights, unchanged, as every version."""

    async def start(self, trainer: Any, model_directory: str, *_: Any) -> dict[str, Any]:
        self.directory = Path(model_directory)
        return {}

    async def export(self, root: str, version: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        weights = load_file(self.directory / "model.safetensors")
        manifest = write_snapshot(Path(root), version, config_hash(self.directory), weights.items())
        return {"checksum": manifest.checksum}


@dataclass(slots=True)
class Request:
    worker: str
    token_ids: list[int]
    tokens: int = 0


class Recorder:
    """Observer: every request with what came of it, and the window in which they ran."""

    def __init__(self) -> None:
        self.open: dict[Any, Request] = {}
        self.done: list[Request] = []
        self.began = self.ended_at = 0.0
        self.driver: Driver | None = None

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        if isinstance(entry, ev.Generate):
            assert self.driver is not None
            self.began = self.began or now
            tokens = list(self.driver.live[entry.trajectory].token_ids)
            self.open[entry.trajectory] = Request(entry.worker, tokens)
        elif isinstance(entry, ev.TurnGenerated):
            request = self.open.pop(entry.trajectory)
            request.tokens = entry.tokens
            self.done.append(request)
            self.ended_at = now

    def stepped(self, *_: Any) -> None:
        pass

    def ended(self, *_: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        print(text)


async def plain(requests: list[Request], ports: dict[str, int], in_flight: int) -> float:
    """Seconds for the same requests, sent by a client that does nothing else."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(request: Request, gate: asyncio.Semaphore) -> None:
            body = {
                "input_ids": request.token_ids,
                "sampling_params": {"max_new_tokens": request.tokens, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
            }
            async with gate, session.post(f"http://127.0.0.1:{ports[request.worker]}/generate", json=body) as reply:
                answer = await reply.json()
                assert len(answer["output_ids"]) == request.tokens

        for port in ports.values():
            async with session.post(f"http://127.0.0.1:{port}/flush_cache") as reply:
                assert reply.status == 200
        gates = {worker: asyncio.Semaphore(in_flight) for worker in ports}
        began = time.monotonic()
        await asyncio.gather(*(one(r, gates[r.worker]) for r in requests if r.tokens))
        return time.monotonic() - began


async def pair(config: RunConfig) -> dict[str, float]:
    """One run of the stack and its replay."""
    recorder = Recorder()
    directory = RunDirectory.create(config)
    model = resolve_model(config.model.path)
    classes = ActorClasses(trainer=Exporter)
    driver = Driver(config, model, config.environment.tasks, bind(config, 0), directory, [recorder], classes=classes)
    recorder.driver = driver
    try:
        end = await driver.run()
        assert not end.failed, end.reason
        ports = {worker: info["port"] for worker, info in driver.rollout.info.items()}
        tokens = sum(r.tokens for r in recorder.done)
        stack_s = recorder.ended_at - recorder.began
        plain_s = await plain(recorder.done, ports, config.engine.max_running_requests)
    finally:
        await driver.close(finish_writing=False)
        directory.close()
    return {
        "tokens": tokens,
        "stack_tokens_per_s": tokens / stack_s,
        "plain_tokens_per_s": tokens / plain_s,
        "ratio": plain_s / stack_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    rows = []
    for number in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            tree: dict[str, Any] = {
                "run_dir": f"{folder}/run",
                "seed": number,
                "model": {"path": args.model, "context_tokens": 1024},
                "cluster": {"rollout_workers": args.workers},
                "engine": {"max_running_requests": 8, "max_total_tokens": 8192, "device": "cpu"},
                # One batch, all of it admitted at once: nothing waits for a trainer.
                "pipeline": {
                    "steps": 1, "groups_per_batch": 12, "group_size": 8, "max_response_tokens": 64,
                    "max_trajectory_tokens": 512, "max_concurrent_trajectories": 16 * args.workers,
                },
                "environment": {"family": "letters", "max_turns": 1, "tasks": 64},
            }  # fmt: skip
            row = asyncio.run(pair(make_config(tree, "bench")))
        rows.append(row)
        if not args.json:
            print(
                f"pair {number}: {row['tokens']:>6} tokens, stack {row['stack_tokens_per_s']:7.1f} tok/s, "
                f"plain {row['plain_tokens_per_s']:7.1f} tok/s, ratio {row['ratio']:.3f}",
                flush=True,
            )
    ratio = statistics.median(row["ratio"] for row in rows)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    if args.json:
        print(json.dumps({"model": args.model, "commit": commit, "median_ratio": ratio, "pairs": rows}))
    else:
        print(f"median ratio {ratio:.3f} (target 0.9)")


if __name__ == "__main__":
    main()
