"""What of the clouds' sections is refused before anything starts, and how."""

from __future__ import annotations

from typing import Any

import pytest

from pearl.config.load import make_config
from pearl.errors import UserError

HOST = "10.0.0.1"
EC2 = {"instance_types": ["g6e.xlarge"], "image": "ami-1", "security_groups": ["sg-1"]}
GCP = {"project": "p", "machine_types": ["g2-standard-4"], "zones": ["us-central1-a"], "image": "pearl"}
AZURE = {
    "resource_group": "rg", "location": "westeurope", "sizes": ["Standard_NC4as_T4_v3"], "image": "/images/pearl",
    "vnet": "net", "security_group": "closed",
}  # fmt: skip
KUBERNETES = {"image": "pearl:1"}
ALL: dict[str, dict[str, Any]] = {"ec2": EC2, "gcp": GCP, "azure": AZURE, "kubernetes": KUBERNETES}


def made(kind: str, section: dict[str, Any], host: str = HOST) -> None:
    elastic = {"policy": "elastic", "preemptible_slots": 2}
    make_config({"cluster": {"kind": kind, "host": host, kind: section}, "elastic": elastic}, "test")


@pytest.mark.parametrize("kind", ALL)
def test_what_a_cloud_needs_is_enough_and_each_part_of_it_is_asked_for(kind: str) -> None:
    made(kind, ALL[kind])
    for key in ALL[kind]:
        with pytest.raises(UserError, match=rf"cluster\.{kind}\.{key} is (not set|empty)"):
            made(kind, {name: value for name, value in ALL[kind].items() if name != key})
    with pytest.raises(UserError, match=rf"cluster\.host = 127\.0\.0\.1 cannot be reached from {kind}"):
        made(kind, ALL[kind], "127.0.0.1")


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("ec2", {"instance_types": ["a", "a"]}, r"cluster\.ec2\.instance_types names a twice"),
        ("ec2", {"places": ["us-east-1a", "us-east-1a"]}, "names us-east-1a twice"),
        ("ec2", {"lifetime_s": 30}, r"cluster\.ec2\.lifetime_s"),
        ("ec2", {"max_price_usd": 0}, r"cluster\.ec2\.max_price_usd"),
        ("gcp", {"zones": ["z", "z"]}, r"cluster\.gcp\.zones names z twice"),
        ("azure", {"sizes": ["s", "s"]}, r"cluster\.azure\.sizes names s twice"),
        ("kubernetes", {"node_pools": [{"a": "b"}, {"a": "b"}]}, r"cluster\.kubernetes\.node_pools names"),
        ("kubernetes", {"node_pools": []}, "leave it out to take any node"),
    ],
)
def test_what_cannot_work_is_refused(kind: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(kind, {**ALL[kind], **more})


def test_a_launch_template_says_image_and_network() -> None:
    made("ec2", {"instance_types": ["g6e.xlarge"], "launch_template": "gpu:3"})


def test_another_endpoint_may_reach_this_host_alone() -> None:
    made("ec2", {**EC2, "endpoint_url": "http://127.0.0.1:5000"}, "127.0.0.1")
