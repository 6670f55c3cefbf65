"""`elastic:` what is refused, with its remedy, and that the named policies are those of the machines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest

from pearl.cluster.binding import bind
from pearl.config.elastic import Policy
from pearl.config.load import make_config
from pearl.core.autoscaler import AutoscalerSettings, Objective
from pearl.core.layout import Zone
from pearl.core.policies import POLICIES
from pearl.core.settings import ElasticSettings, Roles
from pearl.errors import UserError
from pearl.live.machine import TAKEN_OVER, live_policy


def config(**sections: Any) -> Any:
    return make_config(sections, "test")


def test_every_policy_of_the_machines_can_be_named() -> None:
    assert set(get_args(Policy)) == set(POLICIES)
    assert set(TAKEN_OVER) <= {field.name for field in fields(ElasticSettings)}


@pytest.mark.parametrize(
    ("elastic", "trainer", "said"),
    [
        ({"preemptible_slots": 1}, {}, "choose another policy"),
        ({"policy": "elastic", "overlap_slots": 1}, {}, "choose elastic-borrow or pearl"),
        ({"policy": "elastic-borrow"}, {}, r"set elastic\.overlap_slots"),
        ({"policy": "elastic", "autoscale": {"objective": "throughput"}}, {}, "has no slots to ask for"),
        (
            {"policy": "elastic", "preemptible_slots": 1, "autoscale": {"objective": "throughput"}},
            {},
            r"set elastic\.autoscale\.usd_per_slot_hour",
        ),
        ({"policy": "pearl", "overlap_slots": 2}, {}, r"trainer\.ranks = 1"),
        ({"policy": "pearl", "overlap_slots": 1}, {"zero_stage": 0}, r"trainer\.zero_stage = 0"),
        ({"policy": "elastic", "availability": {"file": "t.json"}}, {}, r"set elastic\.preemptible_slots"),
        (
            {"policy": "elastic", "preemptible_slots": 1, "availability": {"file": "t.json", "scale": 0.01}},
            {},
            r"leaves no time before elastic\.notice_margin_s",
        ),
        ({"policy": "static-pd", "prefill_decode": False}, {}, r"needs elastic\.prefill_decode"),
        ({"policy": "static-pd", "fixed_ratio": [0, 1]}, {}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(elastic: dict[str, Any], trainer: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(elastic=elastic, trainer=trainer)


def test_the_keys_reach_the_machines() -> None:
    run = config(elastic={"policy": "pearl", "prefill_decode": False, "return_deadline_s": 7.0, "mode_threshold": 0.2})
    policy = live_policy(run)
    assert (policy.elastic.roles, policy.elastic.return_deadline_s) == (Roles.COLOCATED, 7.0)
    assert policy.decision.mode_threshold == 0.2 and policy.elastic.inter_scale and policy.elastic.autoscale is None


def test_the_autoscaler_has_the_slots_and_prices_of_the_configuration() -> None:
    priced = {
        "objective": "tokens_per_usd",
        "usd_per_slot_hour": 2.5,
        "max_usd_per_hour": 9.0,
        "other_usd_per_hour": 7.0,
    }
    policy = live_policy(config(elastic={"policy": "elastic", "preemptible_slots": 4, "autoscale": priced}))
    assert policy.elastic.autoscale == AutoscalerSettings(
        4, 9.0, 7.0, Objective.TOKENS_PER_USD, 300.0, usd_per_slot_hour=2.5
    )


def test_an_overlap_slot_has_the_gpus_of_its_ranks_and_a_preemptible_one_its_own() -> None:
    run = config(
        engine={"tensor_parallel": 2},
        trainer={"ranks": 4},
        cluster={"rollout_workers": 1},
        elastic={"policy": "pearl", "overlap_slots": 2, "preemptible_slots": 1},
    )
    slots = bind(run, 8)
    assert [slots[f"overlap-{i}"].devices for i in range(2)] == [(0, 1), (2, 3)]
    assert slots["overlap-1"].slot_info().trainer_ranks == (2, 3)
    assert (slots["rollout-0"].devices, slots["preemptible-0"].devices) == ((4, 5), (6, 7))
    assert {slot for slot, b in slots.items() if b.zone == Zone.OVERLAP} == {"overlap-0", "overlap-1"}
    with pytest.raises(UserError, match=r"elastic\.preemptible_slots = 1, need 8 GPUs, this machine has 7"):
        bind(run, 7)
