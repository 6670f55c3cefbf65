"""How long each method of the scheduler's plugin takes."""

from __future__ import annotations

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from pearl.cluster.plugin import ElasticityPlugin

METHODS = ("add_worker", "remove_worker", "notice", "members", "check_silence")


class PluginTimes:
    """Seconds that each call of the plugin's methods took."""

    def __init__(self, plugin: ElasticityPlugin) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for name in METHODS:
            setattr(plugin, name, self._timed(name, getattr(plugin, name)))
        plugin.scheduler.handlers |= {"pearl_notice": plugin.notice, "pearl_members": plugin.members}
        plugin._watch.callback = plugin.check_silence

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[name].append(time.perf_counter() - began)

        @functools.wraps(method)
        async def timed_coroutine(*arguments: Any) -> None:
            began = time.perf_counter()
            await method(*arguments)
            self.seconds[name].append(time.perf_counter() - began)

        return timed_coroutine if inspect.iscoroutinefunction(method) else timed
