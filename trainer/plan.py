"""The split of rows over minibatches, ranks and micro-batches.

Deterministic, and every rank computes the whole plan from the same rows, so the ranks agree on the number of collective
calls without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.bundle import Bundle


def balance(bundles: Sequence[Bundle], parts: int) -> list[list[Bundle]]:
    """Split into `parts` of about equal tokens: longest first, each to the part that is lightest so far.

    With at least `parts` bundles no part is empty. Ties go by position, so equal input gives equal output.
    """
    loads = [0] * parts
    split: list[list[Bundle]] = [[] for _ in range(parts)]
    for bundle in sorted(bundles, key=lambda bundle: -bundle.length):
        lightest = loads.index(min(loads))
        split[lightest].append(bundle)
        loads[lightest] += bundle.length
    return split


def pack(bundles: Sequence[Bundle], budget: int) -> list[list[Bundle]]:
    """Micro-batches of bundles of similar length with bundles x longest <= `budget` padded tokens, each exactly once.

    Raises ValueError for a row that is longer than the budget.
    """
    packed: list[list[Bundle]] = []
    for bundle in sorted(bundles, key=lambda bundle: -bundle.length):
        if bundle.length > budget:
            raise ValueError(
                f"{bundle.rows[0].id} has {bundle.length} tokens, more than trainer.micro_batch_tokens = {budget};"
                " raise it"
            )
        if packed and (len(packed[-1]) + 1) * packed[-1][0].length <= budget:
            packed[-1].append(bundle)
        else:
            packed.append([bundle])
    return packed


def plan_ranks(bundles: Sequence[Bundle], ranks: int, budget: int) -> list[list[list[Bundle]]]:
    """For each rank its micro-batches; all ranks have equally many.

    A rank with fewer gets empty ones, for which it runs a forward and a backward that add zero: ZeRO's collective calls
    must be equal in number on all ranks.
    """
    plans = [pack(part, budget) for part in balance(bundles, ranks)]
    count = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]
