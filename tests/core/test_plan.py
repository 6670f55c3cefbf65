"""The minimal-change plan against every other plan there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core.layout import Layout, Role
from pearl.core.plan import Cost, minimal_change

ROLES = list(Role)
STEPS = st.tuples(
    st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 3), st.integers(0, 3)), max_size=5),
    st.integers(0, 3),
    st.integers(0, 2),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)


def every_plan(present: dict[str, Role], joiners: list[str], target: Layout, leaving: set[str]) -> Iterator[dict]:
    names = [*(name for name in present if name not in leaving), *joiners]
    wanted = [role for role in ROLES for _ in range(target.count(role))]
    for chosen in combinations(names, target.workers):
        for roles in set(permutations(wanted)):
            yield dict(zip(chosen, roles, strict=True))


def score(present: dict[str, Role], after: dict[str, Role], leaving: set[str], cost: dict[str, Cost]) -> tuple:
    """(D_worker + D_role, cost of interruption), by the definitions."""
    workers = len(after.keys() - present.keys()) + len(present.keys() - after.keys())
    survivors = present.keys() & after.keys()
    source = Counter(present[name] for name in survivors)
    goal = Counter(after.values())
    roles = sum(source[role] - min(source[role], goal[role]) for role in ROLES)
    hit = [n for n in present if n not in leaving and (n not in after or after[n] is not present[n])]
    return workers + roles, tuple(sum(cost[name][i] for name in hit) for i in (0, 1))


@hypothesis_settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_plan_changes_less_and_none_that_changes_as_little_interrupts_less(step: tuple) -> None:
    workers, joining, leaves, counts = step
    present = {f"w{i}": role for i, (role, _, _) in enumerate(workers)}
    cost = {f"w{i}": (requests, tokens) for i, (_, requests, tokens) in enumerate(workers)}
    joiners = [f"j{i}" for i in range(joining)]
    leaving = set(list(present)[:leaves])
    target = Layout(*counts)
    if target.workers > len(present) - len(leaving) + joining:
        with pytest.raises(ValueError, match="needs"):
            minimal_change(present, target, joiners, frozenset(leaving), cost)
        return
    plan = minimal_change(present, target, joiners, frozenset(leaving), cost)
    assert Counter(plan.roles.values()) == Counter({role: target.count(role) for role in ROLES if target.count(role)})
    assert set(plan.add) == plan.roles.keys() - present.keys()
    assert set(plan.remove) == present.keys() - plan.roles.keys()
    assert set(plan.changed) == {n for n in present.keys() & plan.roles.keys() if plan.roles[n] is not present[n]}
    least = min(score(present, other, leaving, cost) for other in every_plan(present, joiners, target, leaving))
    assert score(present, plan.roles, leaving, cost) == least


def test_survivors_keep_their_roles_and_joiners_fill_the_deficits() -> None:
    present = {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE}
    plan = minimal_change(present, Layout(prefill=2, decode=3), ["d", "e"])
    assert plan.changed == plan.remove == ()
    assert plan.roles == {**present, "d": Role.PREFILL, "e": Role.DECODE}


def test_the_worker_with_the_least_to_interrupt_is_reassigned() -> None:
    present = dict.fromkeys("abc", Role.COLOCATED)
    plan = minimal_change(
        present, Layout(prefill=1, decode=1, colocated=1), cost={"a": (3, 0), "b": (1, 9), "c": (1, 2)}
    )
    assert plan.changed == ("b", "c")
