"""What a change of role costs on a live engine, and whether it changes anything else; one table.

    python -m bench.role_switch [--json] [--model tiny-random-llama] [--switches 50] [--interface lo]

Two engines in float32 with the same weights. One switches role again and again, through every transition in turn, while
the other one answers greedy requests: each answer must be the one that it gave before. Whenever the first is colocated
again it must give that answer too. Then the two serve as a prefill-decode pair, both ways round, over two turns: the
answers must be those of a colocated engine; the cached tokens say what which side computes again. Last, one releases
and resumes its memory. Exit code 1 if a token is wrong, a server restarted, or too little memory came free. Adds the
model's figures to `bench/results/role_switch.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import uuid
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from actors.rollout import RELEASED_SHARE, RolloutWorker
from bench.engine_parity import make_prompts, noisy_weights
from bench.provenance import provenance
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.core.layout import Role
from pearl.models import resolve_model
from pearl.weights.snapshot import config_hash, snapshot_directory, write_snapshot

CIRCUIT = (Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.DECODE, Role.PREFILL, Role.COLOCATED)
"""Every transition once, from colocated to colocated."""
WARM = 2 * len(CIRCUIT)
"""Switches before memory is looked at the first time: the first ones load libraries and grow pools."""
TOKENS = 24
PROMPTS = 6
START_S = 600.0
RESULTS = Path(__file__).parent / "results" / "role_switch.json"


@dataclass(slots=True)
class Findings:
    model: str
    switches: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By transition: switch and probe."""
    restarts: int = 0
    wrong_answers: int = 0
    checked_answers: int = 0
    served_meanwhile: int = 0
    rss_warm_bytes: int = 0
    rss_end_bytes: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    released: dict[str, Any] = field(default_factory=dict)
    resumed: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not (self.restarts or self.wrong_answers)

    def judge(self, answer: dict[str, Any], expected: dict[str, Any]) -> None:
        self.checked_answers += 1
        self.wrong_answers += answer["token_ids"] != expected["token_ids"]

    def as_dict(self) -> dict[str, Any]:
        medians = {
            name: {"median_s": median(all_), "max_s": max(all_), "n": len(all_)} for name, all_ in self.seconds.items()
        }
        return asdict(self) | {"seconds": medians, "good": self.good}


def request(prompt: list[int], **more: Any) -> dict[str, Any]:
    rid = uuid.uuid4().hex
    return {"rid": rid, "token_ids": prompt, "max_new_tokens": TOKENS, "temperature": 0.0, "timeout_s": START_S} | more


async def switch(worker: RolloutWorker, old: Role, new: Role, findings: Findings) -> None:
    said = await worker.switch_role(new, timeout_s=START_S)
    findings.seconds.setdefault(f"{old} -> {new}", []).append(said["seconds"])
    findings.restarts += said["way"] != "live"


async def circuits(
    worker: RolloutWorker, other: RolloutWorker, prompts: list[list[int]], answers: list[dict[str, Any]], f: Findings
) -> None:
    async def serve() -> None:
        index = 0
        while not over.is_set():
            f.judge(await other.generate(request(prompts[index % PROMPTS])), answers[index % PROMPTS])
            index += 1
        f.served_meanwhile = index

    over = asyncio.Event()
    serving = asyncio.create_task(serve())
    role = Role.COLOCATED
    for number in range(f.switches):
        new = CIRCUIT[number % len(CIRCUIT)]
        await switch(worker, role, new, f)
        role = new
        if role is Role.COLOCATED:
            which = number % PROMPTS
            f.judge(await worker.generate(request(prompts[which])), answers[which])
        if number + 1 == WARM:
            f.rss_warm_bytes = (await worker.metrics())["rss_bytes"]
    over.set()
    await serving
    await worker.switch_role(Role.COLOCATED, timeout_s=START_S)
    f.rss_end_bytes = (await worker.metrics())["rss_bytes"]


async def pairs(
    workers: tuple[RolloutWorker, RolloutWorker], ends: list[dict[str, Any]], prompts: list[list[int]], f: Findings
) -> None:
    """Two turns of each prompt by a pair, both ways round, against a colocated engine's."""
    alone = []
    for prompt in prompts:
        first = await workers[0].generate(request(prompt))
        second = prompt + first["token_ids"] + prompt
        alone.append((prompt, first, second, await workers[0].generate(request(second))))
    for p, d in ((0, 1), (1, 0)):
        await workers[p].switch_role(Role.PREFILL, timeout_s=START_S)
        await workers[d].switch_role(Role.DECODE, timeout_s=START_S)
        for prompt, first, second, last in alone:
            for turn, (tokens, expected) in enumerate(((prompt, first), (second, last)), 1):
                both = request(tokens, pair={"room": uuid.uuid4().int >> 66, **ends[p]["kv"]})
                prefilled, decoded = await asyncio.gather(workers[p].prefill(both), workers[d].generate(both))
                f.judge(decoded, expected)
                f.turns.append(
                    {
                        "turn": turn,
                        "prompt_tokens": len(tokens),
                        "response_before": len(first["token_ids"]) if turn == 2 else 0,
                        "prefill_cached": prefilled["cached_tokens"],
                        "decode_cached": decoded["cached_tokens"],
                        "handed_on_s": prefilled["seconds"],
                    }
                )
        for worker in workers:
            await worker.switch_role(Role.COLOCATED, timeout_s=START_S)


async def run(name: str, switches: int, interface: str) -> Findings:
    directory = resolve_model(name)
    f = Findings(name, switches)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pearl-roles-") as root:
        write_snapshot(Path(root), 1, config_hash(directory), noisy_weights(directory, seed=1))
        snapshot = str(snapshot_directory(Path(root), 1))
        engine = EngineConfig(max_total_tokens=8192).model_dump()
        model = ModelConfig(path=name, dtype="float32").model_dump()
        workers, ends = (RolloutWorker(), RolloutWorker()), []
        try:
            for index, worker in enumerate(workers):
                ends.append(
                    await worker.start(
                        engine, model, str(directory), root, f"e{index}", 0, START_S, kv_interface=interface
                    )
                )
                await worker.sync(snapshot, 1)
            prompts = make_prompts(directory, PROMPTS)
            answers = [await workers[1].generate(request(prompt)) for prompt in prompts]
            await circuits(*workers, prompts, answers, f)
            await pairs(workers, ends, prompts, f)
            f.released = await workers[0].release_memory()
            f.resumed = await workers[0].resume_memory()
            await workers[0].sync(snapshot, 1)
            f.judge(await workers[0].generate(request(prompts[0])), answers[0])
        finally:
            for worker in workers:
                await worker.stop()
    return f


def table(found: dict[str, Any]) -> str:
    lines = [f"{'transition':24}  {'n':>3}  {'median s':>8}  {'max s':>6}"]
    for name, row in found["seconds"].items():
        lines.append(f"{name:24}  {row['n']:3}  {row['median_s']:8.3f}  {row['max_s']:6.3f}")
    grown = found["rss_end_bytes"] - found["rss_warm_bytes"]
    second = [turn for turn in found["turns"] if turn["turn"] == 2]
    again = sum(min(t["response_before"], t["prompt_tokens"] - t["prefill_cached"]) for t in second)
    sent = sum(t["prompt_tokens"] - t["decode_cached"] for t in second)
    return "\n".join(
        [
            *lines,
            f"restarts {found['restarts']}; wrong answers {found['wrong_answers']} of {found['checked_answers']}, "
            f"{found['served_meanwhile']} of them by the other engine meanwhile",
            f"resident memory grew by {grown / 1e6:.1f} MB from switch {WARM} to switch {found['switches']}",
            f"second turns: of {sum(t['response_before'] for t in second)} response tokens the prefill engine computed "
            f"{again} again; KV of {sent} of {sum(t['prompt_tokens'] for t in second)} tokens travelled",
            f"released {found['released']['freed_bytes'] / 1e6:.1f} MB of {found['released']['named_bytes'] / 1e6:.1f} "
            f"MB (at least {RELEASED_SHARE:.0%}) in {found['released']['seconds']:.2f} s, "
            f"resumed in {found['resumed']['seconds']:.2f} s",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--model", default="tiny-random-llama")
    parser.add_argument("--switches", type=int, default=50)
    parser.add_argument("--interface", default="lo", help="network interface that KV travels over")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.model, arguments.switches, arguments.interface)).as_dict()
    about = provenance("bench.role_switch", "torch", "deepspeed", "transformers")
    about["versions"] |= {n: version(n) for n in ("sglang", "mooncake-transfer-engine-non-cuda")}
    report = about | {"command": "python -m bench.role_switch " + " ".join(sys.argv[1:])} | found
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept | {Path(arguments.model).name: report}, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else table(found))
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
