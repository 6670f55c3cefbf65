"""KV memory of one worker, in tokens: what requests hold, and prefixes that are kept until the room is needed.

As in a radix cache, the first prompt is held once for all members of a group; what follows it belongs to a trajectory.
A trajectory's part is *held* while a request uses it and *idle* afterwards; idle parts are evicted, least recently used
first. A prompt goes with the last part that hangs on it.
"""

from __future__ import annotations

from pearl.core.trajectory import TrajectoryId


class KvMemory:
    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens
        self.used = 0
        self.idle_tokens = 0
        self.held: dict[TrajectoryId, int] = {}
        """Own tokens (without the shared prompt) of trajectories with a request; growth of decoding is not in here."""
        self.idle: dict[TrajectoryId, int] = {}
        """Least recently used first."""
        self._prompts: dict[int, list[int]] = {}
        """Group -> [tokens, parts that hang on it]."""

    def cached(self, trajectory: TrajectoryId) -> int:
        """Tokens of the trajectory's context that are here."""
        prompt = self._prompts.get(trajectory.group)
        return (prompt[0] if prompt else 0) + self.idle.get(trajectory, 0)

    @property
    def held_tokens(self) -> int:
        """What cannot be evicted."""
        return self.used - self.idle_tokens

    def take(self, trajectory: TrajectoryId, context: int, shared: int, reserve: int) -> bool:
        """Hold `context` tokens, the first `shared` of them with the group; False, and no change, without room.

        `reserve`: tokens that must stay free beside it.
        """
        own = context - shared
        before = self.idle.get(trajectory)
        prompt = self._prompts.get(trajectory.group) if shared else None
        new = own + (shared if shared and prompt is None else 0)
        if context > self.capacity or (self.held and self.held_tokens + new + reserve > self.capacity):
            return False
        if before is not None:
            del self.idle[trajectory]
            self.idle_tokens -= before
        elif shared:
            if prompt is None:
                self._prompts[trajectory.group] = [shared, 1]
            else:
                prompt[1] += 1
        self.held[trajectory] = own
        self.used += new - (before or 0)
        self._evict()
        return True

    def grow(self, tokens: int) -> None:
        """Decoding wrote so much more; the caller saw to it that idle parts can make room."""
        self.used += tokens
        if self.used > self.capacity:
            self._evict()

    def give(self, trajectory: TrajectoryId, *, grown: int = 0, unwritten: int = 0, keep: bool = True) -> None:
        """A request ends; `grown`: tokens that `grow` counted for it, `unwritten`: what it held and never computed."""
        own = self.held.pop(trajectory)
        unwritten = min(unwritten, own)
        self.used -= unwritten
        own += grown - unwritten
        if keep:
            self.idle[trajectory] = own
            self.idle_tokens += own
        else:
            self.used -= own
            self._unhang(trajectory.group)

    def extend(self, trajectory: TrajectoryId, tokens: int) -> None:
        """An idle part becomes longer, if there is room without evicting anything."""
        if trajectory in self.idle and self.used + tokens <= self.capacity:
            self.idle[trajectory] += tokens
            self.idle_tokens += tokens
            self.used += tokens

    def clear(self) -> None:
        """Drop all idle parts: new weights make them wrong."""
        while self.idle:
            self._drop_oldest()

    def _evict(self) -> None:
        while self.used > self.capacity and self.idle:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        trajectory = next(iter(self.idle))
        own = self.idle.pop(trajectory)
        self.idle_tokens -= own
        self.used -= own
        self._unhang(trajectory.group)

    def _unhang(self, group: int) -> None:
        prompt = self._prompts.get(group)
        if prompt is not None:
            prompt[1] -= 1
            if prompt[1] == 0:
                self.used -= prompt[0]
                del self._prompts[group]
