"""Actors that play all three roles and hang in one method: the worker is alive, the call never returns.

Imports next to nothing, so that a worker process is up in half a second.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

TOKENS = [1, 2, 3, 4]


class Willing:
    """Answers everything at once. `hangs` names the method that never answers."""

    hangs = ""

    async def _answer(self, method: str, reply: Any = None) -> Any:
        if method == self.hangs:
            await asyncio.Event().wait()
        return {} if reply is None else reply

    async def start(self, *_: Any) -> Any:
        self.version = 0
        return await self._answer("start", {"builds": True})

    async def stop(self, grace_s: float = 0.0) -> Any:
        return await self._answer("stop")

    # rollout

    async def generate(self, request: dict[str, Any]) -> Any:
        if self.hangs == "interrupt":  # half of a pair that is to be interrupted
            await asyncio.Event().wait()
        reply = {
            "token_ids": TOKENS, "logprobs": [-1.0] * len(TOKENS), "versions": [[self.version, len(TOKENS)]],
            "finish": "stop", "reason": "",
        }  # fmt: skip
        return await self._answer("generate", reply)

    async def sync(self, directory: str, version: int, timeout_s: float) -> Any:
        self.version = version
        return await self._answer("sync", {"checksum": ""})

    async def abort(self, timeout_s: float) -> Any:
        return await self._answer("abort")

    async def release_memory(self, timeout_s: float) -> Any:
        return await self._answer("release_memory")

    async def resume_memory(self, timeout_s: float) -> Any:
        return await self._answer("resume_memory")

    async def switch_role(self, role: str, timeout_s: float) -> Any:
        return await self._answer("switch_role", {"kv": {}})

    async def prefill(self, request: dict[str, Any]) -> Any:
        handed_on = self.hangs != "interrupt"
        reply = {"handed_on": handed_on, "finish": "length" if handed_on else "abort", "reason": "", "peer_lost": False}
        return await self._answer("prefill", reply)

    async def interrupt(self, rid: str, timeout_s: float) -> Any:
        return await self._answer("interrupt")

    # environment

    async def prepare(self) -> Any:
        return await self._answer("prepare")

    async def open(self, *_: Any) -> Any:
        return await self._answer("open", {"prompt_ids": [5] * 8, "task": "none"})

    async def reopen(self, *_: Any) -> Any:
        return await self._answer("reopen", {"difference": ""})

    async def advance(self, *_: Any) -> Any:
        return await self._answer("advance", {"observation_ids": [], "stop": "submitted", "state": ""})

    async def score(self, *_: Any) -> Any:
        return await self._answer("score", {"reward": 1.0})

    async def close(self, *_: Any) -> Any:
        return await self._answer("close")

    # trainer

    async def rendezvous(self) -> Any:
        return await self._answer("rendezvous", ["", 0])

    async def load(self, *_: Any) -> Any:
        return await self._answer("load")

    async def train(self, *_: Any) -> Any:
        return await self._answer("train")

    async def export(self, *_: Any) -> Any:
        return await self._answer("export", {"checksum": ""})

    async def save(self, *_: Any) -> Any:
        return await self._answer("save")

    async def offload(self) -> Any:
        return await self._answer("offload")

    async def reload(self) -> Any:
        return await self._answer("reload")


METHODS = [name for name in vars(Willing) if not name.startswith("_") and name != "hangs"]
HANGING: dict[str, type] = {}
for _method in METHODS:  # classes travel by their name in this module
    _name = f"HangsIn{_method.capitalize()}"
    HANGING[_method] = globals()[_name] = type(_name, (Willing,), {"hangs": _method, "__module__": __name__})


class NeverMade(Willing):
    """Its constructor does not return."""

    def __init__(self) -> None:
        threading.Event().wait()
