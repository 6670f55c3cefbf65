"""Does an engine compute what transformers computes? After a weight update, in float32, on the same tokens; one table.

    python -m bench.engine_parity [--json] [--model tiny-random-llama] [--prompts 20] [--tokens 128]

A snapshot of the model's weights with noise added (so that the update is a real one) is loaded into a running engine
and into transformers. Greedy: every token must be the argmax of transformers' logits for the same prefix; where its
logit lies within 1e-4 of the argmax's, it is a tie. Log-probs, greedy and sampled at two temperatures, must agree
within 1e-3 with log_softmax(logits / temperature). Exit code 1 otherwise. Writes a JSON file to `bench/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from actors.rollout import RolloutWorker
from bench.provenance import provenance
from pearl.config.engine import EngineConfig
from pearl.config.model import ModelConfig
from pearl.models import resolve_model
from pearl.weights.snapshot import config_hash, read_tensors, snapshot_directory, write_snapshot

TIE = 1e-4
"""Logits closer than this have no order that rounding keeps."""
LOGPROB_TOLERANCE = 1e-3
TEMPERATURES = (0.0, 1.0, 0.7)
RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Comparison:
    """Of all responses at one temperature with transformers' forward over the same tokens."""

    temperature: float
    responses: int = 0
    tokens: int = 0
    ties: int = 0
    divergences: int = 0
    logprob_difference: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.divergences == 0 and self.logprob_difference <= LOGPROB_TOLERANCE

    def add(self, model: Any, prompt: list[int], response: list[int], logprobs: list[float]) -> None:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.tensor(response).unsqueeze(1)
        gaps = logits.max(dim=1).values - logits.gather(1, chosen).squeeze(1)
        self.responses += 1
        self.tokens += len(response)
        if self.temperature == 0:
            self.ties += int(((gaps > 0) & (gaps <= TIE)).sum())
            self.divergences += int((gaps > TIE).sum())
        expected = torch.log_softmax(logits / (self.temperature or 1.0), dim=1).gather(1, chosen).squeeze(1)
        self.logprob_difference = max(self.logprob_difference, float((expected - torch.tensor(logprobs)).abs().max()))


def noisy_weights(model_directory: Path, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's float32 weights with one percent of their spread added as noise."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    for file in sorted(model_directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            weight = tensor.float()
            noise = torch.randn(weight.shape, generator=generator) * weight.std()
            yield name, weight + 0.01 * noise


def reference_model(model_directory: Path, snapshot: Path) -> Any:
    """transformers' model in float32 with the weights of a snapshot."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    rest = model.load_state_dict({name: t.clone() for name, t in read_tensors(snapshot)}, strict=False)
    if rest.unexpected_keys or set(rest.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"the snapshot does not fit the model: {rest}")
    model.tie_weights()
    return model.eval()


async def compare(
    worker: RolloutWorker, model: Any, prompts: list[list[int]], tokens: int, temperature: float
) -> Comparison:
    """Generate from all prompts at once, then judge every response."""
    requests = [
        {
            "rid": f"parity-{temperature}-{index}",
            "token_ids": prompt,
            "max_new_tokens": tokens,
            "temperature": temperature,
            "timeout_s": 3600.0,
        }
        for index, prompt in enumerate(prompts)
    ]
    results = await asyncio.gather(*(worker.generate(request) for request in requests))
    comparison = Comparison(temperature)
    for prompt, result in zip(prompts, results, strict=True):
        if result["finish"] not in ("stop", "length"):
            raise RuntimeError(f"a request ended as {result['finish']}: {result['reason']}")
        comparison.add(model, prompt, result["token_ids"], result["logprobs"])
    return comparison


def make_prompts(model_directory: Path, count: int) -> list[list[int]]:
    """Random tokens, 8 to 64 of them, from a fixed seed."""
    vocabulary = json.loads((model_directory / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    return [[rng.randrange(20, vocabulary) for _ in range(rng.randint(8, 64))] for _ in range(count)]


async def run(name: str, prompts: int, tokens: int) -> list[Comparison]:
    directory = resolve_model(name)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pearl-parity-") as root:
        hash_ = config_hash(directory)
        manifest = write_snapshot(Path(root), 1, hash_, noisy_weights(directory, seed=1))
        snapshot = snapshot_directory(Path(root), 1)
        worker = RolloutWorker()
        engine = EngineConfig().model_dump()
        model = ModelConfig(path=name, dtype="float32").model_dump()
        await worker.start(engine, model, str(directory), root, "parity", 0)
        try:
            synced = await worker.sync(str(snapshot), 1)
            if synced["checksum"] != manifest.checksum:
                raise RuntimeError("the engine's weights are not the snapshot's")
            reference = reference_model(directory, snapshot)
            questions = make_prompts(directory, prompts)
            return [await compare(worker, reference, questions, tokens, t) for t in TEMPERATURES]
        finally:
            await worker.stop()


def table(comparisons: list[Comparison]) -> str:
    lines = ["temperature  responses  tokens  ties  divergences  max |logprob difference|"]
    for c in comparisons:
        judged = f"{c.ties:4}  {c.divergences:11}" if c.temperature == 0 else "   -            -"
        lines.append(f"{c.temperature:11}  {c.responses:9}  {c.tokens:6}  {judged}  {c.logprob_difference:24.2e}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument("--model", default="tiny-random-llama")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    comparisons = asyncio.run(run(arguments.model, arguments.prompts, arguments.tokens))
    about = provenance("bench.engine_parity", "torch", "deepspeed", "transformers")
    about["versions"]["sglang"] = version("sglang")
    report = about | {
        "command": "python -m bench.engine_parity " + " ".join(sys.argv[1:]),
        "model": arguments.model,
        "prompts": arguments.prompts,
        "max_new_tokens": arguments.tokens,
        "tie": TIE,
        "logprob_tolerance": LOGPROB_TOLERANCE,
        "agree": all(c.agrees for c in comparisons),
        "results": [asdict(c) for c in comparisons],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"engine_parity_{Path(arguments.model).name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else table(comparisons))
    return 0 if report["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
