"""The minimal-change plan: which workers are added, removed and given another role to get from one layout to another.

Plan = (W_add, W_remove, ρ) of the source. Every role keeps workers up to its target count, deficits are filled by added
or reassigned ones: that is the least D_worker + D_role. Which workers of a role with too many leave it is free: here
the ones whose interruption costs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pearl.core.layout import Layout, Role

Cost = tuple[int, int]
"""What interrupting a worker costs: requests in flight, then cached tokens; (0, 0) for one that does not serve."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`roles` is ρ: the role of every worker that is there in the end."""

    add: tuple[str, ...]
    remove: tuple[str, ...]
    roles: dict[str, Role]
    changed: tuple[str, ...]
    """Workers that stay and get another role."""


def minimal_change(
    present: Mapping[str, Role],
    target: Layout,
    joiners: Sequence[str] = (),
    leaving: frozenset[str] = frozenset(),
    cost: Mapping[str, Cost] | None = None,
) -> Plan:
    """From the workers that are `present`, those `leaving` excepted, to `target`, with `joiners` to take from in order.

    Raises ValueError if there are not enough workers.
    """
    cost = cost or {}
    staying = {name: role for name, role in present.items() if name not in leaving}
    if len(staying) + len(joiners) < target.workers:
        raise ValueError(f"{target} needs {target.workers} workers, there are {len(staying) + len(joiners)}")
    surplus: list[str] = []
    deficits: list[Role] = []
    by_role: dict[Role, list[str]] = {role: [] for role in Role}
    for name, role in staying.items():
        by_role[role].append(name)
    for role, names in by_role.items():
        spare = len(names) - target.count(role)
        deficits += [role] * -spare
        if spare > 0:
            names.sort(key=lambda name: (cost.get(name, (0, 0)), name))
            surplus += names[:spare]
    added = tuple(joiners[: max(0, target.workers - len(staying))])
    changed = surplus[: len(deficits) - len(added)]
    removed = surplus[len(changed) :]  # whoever is left of the surplus when every deficit is filled
    left = frozenset(surplus)
    roles = {name: role for name, role in staying.items() if name not in left}
    roles.update(zip([*changed, *added], deficits, strict=True))
    return Plan(added, tuple(sorted({*removed, *(leaving & present.keys())})), roles, tuple(sorted(changed)))
