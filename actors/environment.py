"""EnvironmentWorker: the actor that holds sandboxes and plays the environment's side of trajectories.

Methods are coroutines with plain arguments and results. Errors: InfrastructureError for faults of the machine (and for
a trajectory that this worker does not know), UserError for bad input; whatever an agent does ends as a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.agent import AgentSession, open_session
from envs.chat import ChatRenderer
from envs.errors import InfrastructureError
from envs.protocol import TaskFamily
from envs.registry import make_family
from envs.sandbox.factory import make_backend
from envs.sandbox.folder import sweep as sweep_folders
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig

Key = tuple[int, ...]


@dataclass(eq=False)
class _Open:
    """An open trajectory, and the lock that makes calls for it wait for each other."""

    agent: AgentSession
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentWorker:
    """Many trajectories at once, each in its own sandbox. Calls for one trajectory wait for each other."""

    def __init__(self) -> None:
        self._config = EnvironmentConfig()
        self._backend: SandboxBackend | None = None
        self._family: TaskFamily | None = None
        self._chat: ChatRenderer | None = None
        self._sessions: dict[Key, _Open] = {}

    async def start(self, environment: dict[str, Any], model_directory: str, run_dir: str, name: str) -> dict[str, Any]:
        """Load the tokenizer, sweep what dead workers left, run one sandbox. Raises UserError with the remedy.

        Sandboxes lie on the worker's own disk, not in `run_dir`, which may be a network file system.
        """
        await self.stop()
        self._config = EnvironmentConfig.model_validate(environment)
        self._chat = await asyncio.to_thread(ChatRenderer.load, model_directory)
        self._backend = make_backend(self._config.sandbox, name=f"{Path(run_dir).name}-{name}")
        try:
            swept = await self._backend.sweep()
            await self._backend.probe()
            self._family = make_family(self._config, self._backend)
        except BaseException:
            await self.stop()
            raise
        builds = hasattr(self._family, "prepare")
        return {"directory": str(self._backend.directory or ""), "swept": swept, "builds": builds, **await self.tasks()}

    async def prepare(self) -> dict[str, Any]:
        """Build what the family's tasks need beforehand, if `start` said that it `builds`; faults by task name.

        Raises UserError if nothing can be built. The caller bounds it: it can take many minutes the first time.
        """
        family = self._started()[1]
        prepare = getattr(family, "prepare", None)
        return {"faults": {} if prepare is None else await prepare()}

    async def tasks(self) -> dict[str, Any]:
        """How many tasks there are to draw from, and their names in order."""
        names = [task.name for task in self._started()[1].tasks]
        return {"count": len(names), "names": names}

    async def open(self, trajectory: Sequence[int], task_index: int, timeout_s: float) -> dict[str, Any]:
        """Set up the environment of a trajectory; one that is open under the same name is closed first."""
        _, family, chat = self._started()
        key = tuple(trajectory)
        await self._close(key)
        if len(self._sessions) >= self._config.sandboxes_per_worker:
            raise InfrastructureError(
                f"all {self._config.sandboxes_per_worker} sandboxes (environment.sandboxes_per_worker) are taken"
            )
        session = _Open(open_session(family, task_index, chat, self._config))
        self._sessions[key] = session
        try:
            async with session.turn:
                prompt = await session.agent.start(timeout_s)
            self._session(key, session)
        except BaseException:
            if self._sessions.get(key) is session:
                del self._sessions[key]
            await session.agent.close()
            raise
        return {"prompt_ids": prompt, "task": session.agent.task.name}

    async def advance(self, trajectory: Sequence[int], response_ids: Sequence[int], timeout_s: float) -> dict[str, Any]:
        """Carry out one response. `stop` is None or a `StopReason`; then there is no observation."""
        session = self._session(tuple(trajectory))
        async with session.turn:
            advance = await session.agent.advance(response_ids, timeout_s)
            state = "" if advance.stop else await session.agent.fingerprint(timeout_s)
        return {
            "observation_ids": list(advance.observation_ids),
            "stop": advance.stop and str(advance.stop),
            "state": state,
        }

    async def reopen(
        self,
        trajectory: Sequence[int],
        task_index: int,
        prompt_ids: Sequence[int],
        history: Sequence[Sequence[Any]],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Set up the environment and play `history` again, [response ids, observation ids, state] of each turn.

        `difference` says what came out otherwise, and is empty if nothing did; then the trajectory is open.
        """
        opened = await self.open(trajectory, task_index, timeout_s)
        if opened["prompt_ids"] != list(prompt_ids):
            return {"difference": "its prompt is another one"}
        for number, (response_ids, observation_ids, state) in enumerate(history, 1):
            again = await self.advance(trajectory, response_ids, timeout_s)
            if again["stop"] is not None or again["observation_ids"] != list(observation_ids):
                return {"difference": f"turn {number} was answered otherwise"}
            if again["state"] != state:
                return {"difference": f"turn {number} left other files"}
        return {"difference": ""}

    async def score(self, trajectory: Sequence[int], timeout_s: float) -> dict[str, Any]:
        """Reward in [0, 1] of what the trajectory achieved so far."""
        session = self._session(tuple(trajectory))
        async with session.turn:
            score = await session.agent.score(timeout_s)
        return {"reward": score.reward, "detail": dict(score.detail)}

    async def close(self, trajectory: Sequence[int]) -> None:
        """End a trajectory at once, whatever it is doing. Unknown and closed ones are no error."""
        await self._close(tuple(trajectory))

    async def stop(self) -> None:
        """Close everything; no process and no file of a sandbox is left. Can be called repeatedly."""
        await asyncio.gather(*(self._close(key) for key in list(self._sessions)))
        if (close := getattr(self._family, "close", None)) is not None:
            close()
        if self._backend is not None:
            await self._backend.close()
        self._backend = self._family = self._chat = None

    async def _close(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            await session.agent.close()

    def _session(self, key: Key, expected: _Open | None = None) -> _Open:
        session = self._sessions.get(key)
        if session is None or (expected is not None and session is not expected):
            raise InfrastructureError(f"trajectory {key} is not open here")
        return session

    def _started(self) -> tuple[SandboxBackend, TaskFamily, ChatRenderer]:
        if self._backend is None or self._family is None or self._chat is None:
            raise InfrastructureError("the environment worker is not started")
        return self._backend, self._family, self._chat


def sweep(directory: str) -> list[str]:
    """Remove the sandboxes that dead workers left in `directory` (see `start`); the names of their folders."""
    return sweep_folders(Path(directory)) if directory else []
