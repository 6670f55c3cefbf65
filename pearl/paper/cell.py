"""One figure of the source beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pearl.paper.jobs import Job, Numbers
from pearl.paper.statistics import Estimate, estimate, gains

POINTS = 5.0


@dataclass(frozen=True, slots=True)
class Cell:
    """`unit`: "%" of gain, "x", "s", or what else is counted. `ours` is of the same system as `published`; `pearl` is
    of ours in its place, where there is one."""

    figure: str
    name: str
    model: str
    published: float | None
    ours: float
    lo: float
    hi: float
    unit: str = "%"
    held_out: bool = True
    agrees_sign: bool | None = None
    """Gains only: whether ours has the published sign."""
    agrees_rank: bool | None = None
    """Whether ours has the published place in its row, or is the published choice."""
    within_5_points: bool | None = None
    """Percentages and multiples only (0.05 of a multiple is 5 points)."""
    note: str = ""
    pearl: Estimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """With numbers that are fit to print."""
        values = asdict(self)
        pearl = values.pop("pearl")
        for name in ("ours", "lo", "hi"):
            values[name] = round(values[name], 4)
        names = ("pearl", "pearl_lo", "pearl_hi")
        return {**values, **dict(zip(names, [round(v, 4) for v in pearl] if pearl else (None,) * 3, strict=True))}


def gain_cell(
    figure: str, name: str, model: str, published: float, ours: Estimate, *, pearl: Estimate | None = None, **more: Any
) -> Cell:
    """Per cent."""
    if ours.lo <= 0.0 <= ours.hi and not more.get("note"):
        more["note"] = "the interval has 0 in it"
    return Cell(
        figure, name, model, published, *ours, unit="%", agrees_sign=(ours.mean > 0) == (published > 0),
        within_5_points=abs(ours.mean - published) <= POINTS, pearl=pearl, **more,
    )  # fmt: skip


def multiple_cell(
    figure: str, name: str, model: str, published: float, ours: Estimate, *, pearl: Estimate | None = None, **more: Any
) -> Cell:
    return Cell(
        figure, name, model, published, *ours, unit="x", agrees_sign=(ours.mean > 1) == (published > 1),
        within_5_points=abs(ours.mean - published) <= POINTS / 100, pearl=pearl, **more,
    )  # fmt: skip


def same_rank(published: Sequence[float], ours: Sequence[float]) -> list[bool]:
    """Whether each has the same place among ours as among the published ones."""

    def places(values: Sequence[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    return [a == b for a, b in zip(places(published), places(ours), strict=True)]


@dataclass
class Study:
    """Jobs by what they are for, one for each seed, and what comes of them."""

    jobs: dict[tuple[Any, ...], list[Job]] = field(default_factory=dict)
    played: dict[Job, Numbers] = field(default_factory=dict)

    def column(self, *key: Any, of: str = "throughput") -> list[float]:
        return [self.played[job][of] for job in self.jobs[key]]

    def gain(self, better: tuple[Any, ...], worse: tuple[Any, ...], of: str = "throughput") -> Estimate:
        """Per cent, paired by seed."""
        return estimate(gains(self.column(*better, of=of), self.column(*worse, of=of)))

    def cells(self) -> list[Cell]:
        raise NotImplementedError

    def series(self) -> dict[str, Any]:
        """What the figures draw beside the cells, and what is worth keeping."""
        return {}
