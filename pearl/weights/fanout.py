"""From whom a host takes a snapshot, so that many hosts do not cost the trainer's host many copies.

Hosts stand in a chain in the order in which they first asked for a version: each takes it from the one before it, also
while that one still fetches, and only the first takes it from the trainer's host. So every link carries it once each
way. Hosts that have all of it already come first, since they let nobody wait. Whom a host can wait for stands before it
in the chain, so no ring of waiting hosts can form.
"""

from __future__ import annotations

from collections.abc import Iterable

BEFORE = 3
"""Hosts before it in the chain that a host can turn to, the nearest one first."""


class FanOut:
    """One run's copies, by version and host. `origin` is the trainer's host, the last resort of all."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._chains: dict[int, list[str]] = {}
        self._whole: dict[int, set[str]] = {}

    def sources(self, version: int, host: str, holders: Iterable[str] = ()) -> list[str]:
        """Hosts to take `version` from, best first. `holders`: hosts that are known to have all of it."""
        chain = self._chains.setdefault(version, [])
        if host not in chain:
            chain.append(host)
        place = chain.index(host)
        before = list(reversed(chain[max(0, place - BEFORE) : place]))
        whole = [h for h in [*holders, *(b for b in before if b in self._whole.get(version, ()))] if h != self.origin]
        return [h for h in dict.fromkeys([*whole, *before, self.origin]) if h != host]

    def copied(self, version: int, host: str) -> None:
        """The host has all of it."""
        self._whole.setdefault(version, set()).add(host)

    def retire(self, version: int) -> None:
        """Nobody asks for `version` or older ones any more."""
        for old in [v for v in self._chains if v <= version]:
            del self._chains[old]
            self._whole.pop(old, None)

    @property
    def newest(self) -> int | None:
        """The newest version that a host asked for and that is not retired."""
        return max(self._chains, default=None)

    @property
    def hosts(self) -> set[str]:
        """That may have copies."""
        return {host for chain in self._chains.values() for host in chain} - {self.origin}
