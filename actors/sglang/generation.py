"""One generate request, and what came of it so far.

A `Generation` grows as the engine's replies stream in, so that whatever ends it (a stop token, an abort, the death of
the server) leaves every token that arrived, with its log-prob and the weight version that produced it.

Log-probs are natural logarithms of softmax(logits / temperature) over the whole vocabulary, *before* top-p and top-k
filter it; a greedy request (temperature 0) has them at temperature 1. A trainer that divides logits by the same
temperature recomputes them exactly (up to rounding) as long as top_p = 1 and top_k = -1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.sglang.meter import Decoded
from pearl.core.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Pair:
    """What the two halves of one request agree on: the prefill engine's KvEndpoint, and a room of their own."""

    room: int
    """Anew for each request, below 2^63."""
    host: str
    port: int
    tensor_parallel: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    rid: str
    """The caller's name for this request; no two pending ones may share it."""
    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Stop strings besides the model's end tokens. The tokens that complete one are kept."""
    timeout_s: float = 600.0
    """From the call to the last token; what is there by then is returned as aborted."""
    seed: int | None = None
    """Honoured only by a server with `--enable-deterministic-inference`; ignored elsewhere."""
    pair: Pair | None = None
    """Of a request that one engine prefills and another one decodes; both get the same request."""
    version: int | None = None
    """Weights that must serve it: the first token of a pair's answer is the prefill engine's. None: any."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> GenerateRequest:
        """Raises ValueError that names the field and its value."""
        unknown = set(wire) - set(cls.__dataclass_fields__)
        missing = {"rid", "token_ids", "max_new_tokens"} - set(wire)
        if unknown or missing:
            raise ValueError(f"generate request: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}")
        pair = wire.get("pair")
        request = cls(**{**wire, "stop": tuple(wire.get("stop") or ()), "pair": Pair(**pair) if pair else None})
        problems = (
            (not request.token_ids, f"token_ids is empty (rid {request.rid!r})"),
            (not all(isinstance(token, int) for token in request.token_ids), "token_ids holds what is no integer"),
            (not all(isinstance(text, str) and text for text in request.stop), f"stop = {request.stop} has no strings"),
            (request.max_new_tokens < 1, f"max_new_tokens = {request.max_new_tokens} is below 1"),
            (not 0 <= request.temperature < math.inf, f"temperature = {request.temperature} is not a number from 0 up"),
            (not 0 < request.top_p <= 1, f"top_p = {request.top_p} is not in (0, 1]"),
            (request.top_k < 1 and request.top_k != -1, f"top_k = {request.top_k} is neither -1 nor above 0"),
            (not request.timeout_s > 0, f"timeout_s = {request.timeout_s} is not above 0"),
        )
        for wrong, what in problems:
            if wrong:
                raise ValueError(f"generate request: {what}")
        return request

    def body(self, server_rid: str) -> dict[str, Any]:
        """Body of SGLang's `/generate`."""
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.stop:
            sampling["stop"] = list(self.stop)
        if self.seed is not None:
            sampling["sampling_seed"] = self.seed
        body = {
            "rid": server_rid,
            "input_ids": self.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
        if pair := self.pair:
            body |= {"bootstrap_host": pair.host, "bootstrap_port": pair.port, "bootstrap_room": pair.room}
        return body


@dataclass(slots=True)
class Generation:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (weight version, number of tokens), in order; the counts add up to the number of tokens."""
    finish: FinishReason | None = None
    """None while it goes on."""
    reason: str = ""
    """What a reader wants to know beyond `finish`: the matched stop, the error, the last log lines."""
    first_token_s: float | None = None
    first_tokens: int = 0
    """How many came at once with the first."""
    seconds: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    queue_s: float = -1.0
    prefill: tuple[float, float] | None = None
    """When the engine began and ended to compute the prompt, by its own clock; None where it does not say."""
    decoded: Decoded = field(default_factory=Decoded)
    paired: bool = False
    """One half of a pair's request: what the engine reports as its own error is a KV transfer that broke."""
    peer_lost: bool = False
    """Lost, because the other half is gone or did not hand its KV on; this engine is well."""
    began: float = field(default_factory=time.monotonic)

    def feed(self, reply: Mapping[str, Any]) -> None:
        """Take one streamed reply in. Raises ValueError if it does not fit what came before."""
        if error := reply.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            self._refused(error.get("code") if isinstance(error, dict) else None, str(message))
            return
        meta = reply["meta_info"]
        tokens = list(reply["output_ids"])
        logprobs = meta.get("output_token_logprobs") or []
        ended = meta["finish_reason"]
        if ended is not None:
            # A request that is aborted while it waits in the queue repeats tokens that were sent before.
            tokens = tokens[: max(0, meta["completion_tokens"] - len(self.token_ids))]
        logprobs = logprobs[: len(tokens)]
        if [entry[1] for entry in logprobs] != tokens:
            raise ValueError("the engine's log-probs are not those of its tokens")
        if tokens and self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.began
            self.first_tokens = len(tokens)
        self.token_ids += tokens
        self.logprobs += [float(entry[0]) for entry in logprobs]
        self.cached_tokens = meta.get("cached_tokens", self.cached_tokens)
        self.queue_s = meta.get("queue_time", self.queue_s)
        began, done = meta.get("forward_entry_time"), meta.get("prefill_finished_time")
        if began and done and done > began:
            self.prefill = (began, done)
        self._count(int(meta["weight_version"]), len(tokens))
        if ended is not None:
            # Only the last reply knows exactly where a version ended.
            spans = meta.get("weight_versions")
            if spans and self.token_ids:
                self.versions = []
                for span in spans:
                    self._count(int(span["version"]), span["end"] - span["start"])
            if ended["type"] == "abort" and (ended.get("status_code") or 0) >= 400:
                self._refused(ended["status_code"], str(ended.get("message") or ""))
            else:
                self.end(*_finish(ended))

    def _refused(self, status: Any, message: str) -> None:
        """The engine gave the request up: it cannot be served, or, of a pair, its KV did not arrive."""
        if self.paired and isinstance(status, int) and status >= 500:
            self.lose_peer(message)
        else:
            self.end(FinishReason.FAILED, message)

    def lose_peer(self, reason: str) -> None:
        """No token counts that was decoded without its whole prompt."""
        self.token_ids, self.logprobs, self.versions, self.peer_lost = [], [], [], True
        self.end(FinishReason.LOST, reason)

    def end(self, finish: FinishReason, reason: str) -> None:
        self.finish, self.reason = finish, reason
        self.seconds = time.monotonic() - self.began

    def to_wire(self) -> dict[str, Any]:
        """Plain dict for an actor call; `finish` must be set."""
        return {
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "versions": [list(run) for run in self.versions],
            "finish": str(self.finish),
            "reason": self.reason,
            "first_token_s": self.first_token_s,
            "first_tokens": self.first_tokens,
            "seconds": self.seconds,
            "cached_tokens": self.cached_tokens,
            "queue_s": self.queue_s,
            "prefill_s": self.decoded.prefill_s,
            "prefill_share": self.decoded.prefill_share,
            "decode_batch": self.decoded.batch,
            "decode_kv_tokens": self.decoded.kv_tokens,
            "stall_s": self.decoded.stall_s,
            "peer_lost": self.peer_lost,
        }

    def _count(self, version: int, tokens: int) -> None:
        if tokens <= 0:
            return
        if self.versions and self.versions[-1][0] == version:
            tokens += self.versions.pop()[1]
        self.versions.append((version, tokens))


def _finish(reason: Mapping[str, Any]) -> tuple[FinishReason, str]:
    kind, message = reason["type"], str(reason.get("message") or "")
    if kind == "length":
        return FinishReason.LENGTH, ""
    if kind == "stop":
        return FinishReason.STOP, f"matched {reason.get('matched')!r}"
    return FinishReason.ABORT, message
