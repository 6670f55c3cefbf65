"""Roles of a live server: SGLang's `/pd_role_switch`, taught the colocated role by our plugin, and a probe after it.

A switch keeps weights and KV pool and drops the prefix cache. It needs an idle scheduler, and one that has ended its
requests may still hold room for the late writes of a broken transfer, so its idleness is asked for, with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from actors.sglang.errors import EngineDied, EngineError, EngineTimeout, RestartNeeded
from actors.sglang.http import EngineHttp
from pearl.core.layout import Role

MODES = {Role.COLOCATED: "", Role.PREFILL: "prefill", Role.DECODE: "decode"}
"""What `/pd_role_switch` calls them."""
NO_PEER = "2.2.2.2"
"""SGLang's own name for a peer that is none: such a request transfers nothing and caches nothing."""
POLL_S = 0.05


async def switch(http: EngineHttp, old: Role, new: Role, *, timeout_s: float) -> None:
    """Switch an idle server and probe it. Raises RestartNeeded if it cannot take the role."""
    if new is not old:
        body: dict[str, Any] = {"new_role": MODES[new]}
        if new is Role.DECODE:
            body["decode_cuda_graph_memory_gb"] = 0  # the graphs were captured at the start
        try:
            await _patiently(
                lambda: http.post("/pd_role_switch", body, timeout_s=timeout_s), "not idle", "switch", timeout_s
            )
        except (EngineDied, EngineTimeout):
            raise
        except EngineError as error:
            raise RestartNeeded(str(error)) from error
    await _probe(http, new, timeout_s)


async def until_idle(http: EngineHttp, *, timeout_s: float) -> None:
    """Return once the scheduler holds nothing of any request; it empties the prefix cache, which is how one asks."""
    await _patiently(
        lambda: http.post("/flush_cache", {}, timeout_s=timeout_s), "status 400", "come to rest", timeout_s
    )


async def _probe(http: EngineHttp, role: Role, timeout_s: float) -> None:
    """One token in the new role, by the loop that will serve it."""
    body: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    if role is not Role.COLOCATED:
        body |= {"bootstrap_host": NO_PEER, "bootstrap_room": 0}
    try:
        answer = await http.post("/generate", body, timeout_s=timeout_s)
        if not answer["output_ids"]:
            raise EngineError(f"the probe came back empty: {answer['meta_info']['finish_reason']}")
    except (EngineDied, EngineTimeout):
        raise
    except (EngineError, KeyError, TypeError) as error:
        raise RestartNeeded(f"the engine does not serve as {role}: {error}") from error


async def _patiently(call: Callable[[], Any], busy: str, what: str, timeout_s: float) -> None:
    """Repeat a call as long as the engine answers `busy`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await call()
            return
        except EngineError as error:
            if busy not in str(error):
                raise
            if time.monotonic() > deadline:
                raise EngineTimeout(f"the engine did not {what} within {timeout_s:g} s: {error}") from None
        await asyncio.sleep(POLL_S)
