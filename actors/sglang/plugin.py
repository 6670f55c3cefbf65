"""What PEARL adds to SGLang from inside, through SGLang's own entry point for plugins (`sglang.srt.plugins`).

SGLang switches a live server between prefill and decode. Here it learns the third role, colocated, which it calls
`null` inside and which `/pd_role_switch` names by an empty `new_role`; to hand KV on from host memory; to let its
bootstrap server listen on the KV interface; to give host memory back (see `memory`); and, on a CPU, to decode a batch
at once (see `decode`). All of it patches internals, so it is pinned to the version that was run, and looks for every
name it needs; where one is missing nothing is patched, and a change of role costs a restart. Other servers in the same
environment stay as they are.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points, version
from typing import Any

from actors.sglang.listen import KV_HOST

GROUP, NAME = "sglang.srt.plugins", "pearl"
PINNED = ("0.5.23",)
"""Versions whose internals were run with these patches."""
SWITCH = "PEARL_ENGINE"
"""Set to 1 in the environment of PEARL's engines."""
SCHEDULER_NAMES = ("init_disaggregation", "is_fully_idle", "_sync_disaggregation_mode_to_subcomponents")


def available() -> str:
    """Why colocated is not a live role here, empty if it is; imports nothing of SGLang."""
    if not any(entry.name == NAME for entry in entry_points(group=GROUP)):
        return f"the entry point {GROUP}:{NAME} is not registered (run `pip install -e .` again)"
    if (found := version("sglang")) not in PINNED:
        return f"PEARL's plugin is pinned to sglang {', '.join(PINNED)}; this is {found}"
    return ""


def install() -> None:
    """Called by SGLang in every process of an engine. An exception here is logged, and the server starts without."""
    if os.environ.get(SWITCH) != "1" or (reason := available()):
        if os.environ.get(SWITCH) == "1":
            raise RuntimeError(reason)
        return
    from actors.sglang import cpu, decode, memory

    memory.install(cpu.wanted())
    if cpu.wanted():
        decode.install()
    if host := os.environ.get(KV_HOST):
        if cpu.wanted():
            _hand_on_host_memory()
        _listen_on(host)
        _colocated_role()


def _hand_on_host_memory() -> None:
    """Prefill would pin host tensors and record a CUDA event; without this mark it takes the plain path."""
    from sglang.srt.disaggregation.mooncake import conn

    assert conn.MooncakeKVSender.supports_host_tensor_indices in (True, False)
    conn.MooncakeKVSender.supports_host_tensor_indices = False


def _listen_on(host: str) -> None:
    """The API stays on loopback, the bootstrap server goes to the KV interface."""
    from sglang.srt.disaggregation.common import conn

    serve, manage = conn.CommonKVBootstrapServer.__init__, conn.CommonKVManager.register_to_bootstrap

    def init(self: Any, host_: str = "", port: int = 0, **more: Any) -> None:
        more.pop("host", None)
        serve(self, host=host, port=port, **more)

    def register(self: Any) -> None:
        self.bootstrap_host = host
        manage(self)

    conn.CommonKVBootstrapServer.__init__ = init
    conn.CommonKVManager.register_to_bootstrap = register


def _colocated_role() -> None:
    from sglang.srt.disaggregation import role_switch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.io_struct import PdRoleSwitchReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    from sglang.srt.runtime_context import get_context

    absent = [name for name in SCHEDULER_NAMES if not hasattr(Scheduler, name)]
    if absent or not hasattr(role_switch, "teardown_disaggregation"):
        raise RuntimeError(f"sglang lacks {absent or 'teardown_disaggregation'}")
    between, tell = role_switch.handle_pd_role_switch, TokenizerControlMixin.pd_role_switch
    colocated = DisaggregationMode.NULL.value

    def handle(scheduler: Any, request: Any) -> Any:
        """In the scheduler: to or from colocated ourselves, else SGLang's own switch."""
        old, new = scheduler.disaggregation_mode.value, request.new_role or colocated

        def answer(success: bool, message: str, safe: bool = False) -> Any:
            return PdRoleSwitchReqOutput(
                success=success, message=message, old_role=old, new_role=new, safe_to_restore=safe
            )

        if colocated not in (old, new):
            return between(scheduler, request)
        if scheduler._pd_role_switch_unhealthy or scheduler._pd_role_switch_in_progress:
            return answer(False, "the engine is unhealthy, or in the middle of a switch")
        if new == old:
            return answer(True, "already in target role")
        if not scheduler.is_fully_idle():
            return answer(False, "instance is not idle; drain all requests before switching", safe=True)
        if request.prepare_only:
            return answer(True, "ready", safe=True)
        scheduler._pd_role_switch_in_progress = True
        try:
            role_switch.teardown_disaggregation(scheduler)
            get_context().override("role_switch.flip", disaggregation_mode=new)
            scheduler.init_disaggregation()
            scheduler._sync_disaggregation_mode_to_subcomponents()
            scheduler._event_loop_should_restart = True
            return answer(True, "ok")
        except Exception as error:
            scheduler._pd_role_switch_unhealthy = True
            return answer(False, f"the switch failed, a restart is required: {error!r}")
        finally:
            scheduler._pd_role_switch_in_progress = False

    async def pd_role_switch(self: Any, request: Any, http: Any = None) -> Any:
        """In the tokenizer manager, which keeps a role of its own."""
        if request.new_role:
            return await tell(self, request, http)
        self.auto_create_handle_loop()
        answers = await self.pd_role_switch_communicator(request)
        success = bool(answers) and all(answer.success for answer in answers)
        if success:
            self.record_config_updates("tokenizer.pd_role_switch", disaggregation_mode=colocated)
            self.disaggregation_mode = DisaggregationMode.NULL
        return PdRoleSwitchReqOutput(
            success=success,
            message="; ".join(answer.message for answer in answers),
            old_role=answers[0].old_role if answers else "",
            new_role=colocated,
            safe_to_restore=all(answer.safe_to_restore for answer in answers),
        )

    role_switch.handle_pd_role_switch = handle
    TokenizerControlMixin.pd_role_switch = pd_role_switch
