"""When to ask a provider again that did not give a slot, and in which other way. Pure: time comes in as a number.

Each *option* (an instance type in a zone, a partition, a host) rests after a failure, twice as long after each one in a
row. Credentials and configuration mend themselves least: after them it rests as long as it ever does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST_S, MOST_S = 5.0, 300.0
"""Rest after the first failure, and the longest one."""


class Cause(StrEnum):
    """Kind of reason for which a request failed."""

    CAPACITY = "capacity"
    """The provider has none left (now)."""
    QUOTA = "quota"
    """It has, and this account may not have more."""
    CREDENTIALS = "credentials"
    """It does not know who asks, or does not let them."""
    CONFIGURATION = "configuration"
    """What was asked for does not exist."""
    UNREACHABLE = "unreachable"
    """No answer."""
    OTHER = "other"


LASTING = (Cause.CREDENTIALS, Cause.CONFIGURATION)
"""Only a person can mend it."""


@dataclass(slots=True)
class _Rest:
    failures: int = 0
    until_s: float = 0.0


class Requests:
    """Of one zone at one provider. Times are seconds of one clock."""

    def __init__(self, options: Sequence[str] = ("",), first_s: float = FIRST_S, most_s: float = MOST_S) -> None:
        """`options` in the order of preference."""
        self.options, self.first_s, self.most_s = tuple(options), first_s, most_s
        self._rests = {option: _Rest() for option in self.options}

    def choose(self, now: float, room: Callable[[str], bool] = lambda option: True) -> str | None:
        """The best option that does not rest and has `room`; None if there is none."""
        return next((o for o in self.options if self._rests[o].until_s <= now and room(o)), None)

    def wait_s(self, now: float) -> float:
        """Until one can be asked; 0 if one can be now."""
        return max(0.0, min(rest.until_s for rest in self._rests.values()) - now)

    def failed(self, option: str, cause: Cause, now: float) -> None:
        """A request that fails while its option rests already is of the same failure: many can be under way at once."""
        rest = self._rests[option]
        if rest.until_s <= now:
            rest.failures += 1
            seconds = self.most_s if cause in LASTING else self.first_s * 2.0 ** (rest.failures - 1)
            rest.until_s = now + min(self.most_s, seconds)

    def given(self, option: str) -> None:
        """A slot came: the option is as good as new."""
        self._rests[option] = _Rest()
