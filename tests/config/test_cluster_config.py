"""What of `cluster:` is refused before anything starts, and how."""

from __future__ import annotations

from typing import Any

import pytest

from pearl.cluster.binding import bind
from pearl.config.load import make_config
from pearl.core.layout import Zone
from pearl.errors import UserError
from pearl.live.preflight import ModelSize, plan_memory

ELASTIC: dict[str, Any] = {"policy": "elastic", "preemptible_slots": 2}
EXISTING = {"kind": "existing", "address": "tls://10.0.0.1:8786", "tls_directory": "tls"}


@pytest.mark.parametrize(
    ("cluster", "elastic", "said"),
    [
        ({"kind": "existing"}, ELASTIC, r"needs cluster\.address"),
        ({"kind": "existing", "address": "tls://10.0.0.1:8786"}, ELASTIC, r"needs cluster\.tls_directory"),
        ({"kind": "existing", "address": "tcp://10.0.0.1:8786"}, ELASTIC, "whoever reaches it runs code as you"),
        ({"kind": "existing", "address": "10.0.0.1:8786"}, ELASTIC, r"cluster\.address"),
        (EXISTING | {"address": "tls://10.0.0.1"}, ELASTIC, r"cluster\.address"),
        (EXISTING | {"address": "tls://10.0.0.1:port"}, ELASTIC, r"cluster\.address"),
        (EXISTING | {"address": "tcp://127.0.0.1:8786"}, ELASTIC, r"not encrypted, and cluster\.tls_directory is set"),
        ({"address": "tls://10.0.0.1:8786"}, ELASTIC, r"set cluster\.kind to existing"),
        ({"kind": "ssh"}, ELASTIC, r"cluster\.ssh\.hosts is empty"),
        ({"kind": "ssh", "ssh": {"hosts": [""]}}, ELASTIC, r"cluster\.ssh\.hosts is empty"),
        ({"kind": "ssh", "ssh": {"hosts": "gpu-a"}}, ELASTIC, r"cluster\.ssh\.hosts = 'gpu-a': .* a list, written"),
        ({"kind": "ssh", "ssh": {"hosts": ["gpu-a", "gpu-a"]}}, ELASTIC, r"cluster\.ssh\.hosts .*twice"),
        ({"kind": "ssh", "ssh": {"hosts": ["gpu-a"], "devices": [0, 0]}}, ELASTIC, r"cluster\.ssh\.devices .*twice"),
        (
            {"kind": "ssh", "ssh": {"hosts": ["gpu-a"], "devices": [-1]}},
            ELASTIC,
            r"cluster\.ssh\.devices = \[-1\] are no indices",
        ),
        (EXISTING, {}, r"elastic\.preemptible_slots is 0"),
        (EXISTING, {**ELASTIC, "availability": {"file": "trace.json"}}, r"set elastic\.availability\.file to null"),
        ({"kind": "slurm", "host": "10.0.0.1"}, {**ELASTIC, "policy": "static-pd"}, r"cluster\.kv_interface = lo"),
        (EXISTING, {**ELASTIC, "policy": "static-pd"}, r"cluster\.kv_interface = lo"),
        ({"kind": "moon"}, ELASTIC, r"cluster\.kind = 'moon'"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused_with_the_remedy(
    cluster: dict[str, Any], elastic: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make_config({"cluster": cluster, "elastic": elastic}, "test")


@pytest.mark.parametrize(
    "cluster",
    [
        EXISTING,
        {"kind": "existing", "address": "tcp://127.0.0.1:8786"},
        {"kind": "existing", "address": "tcp://10.0.0.1:8786", "insecure": True},
        {"kind": "ssh", "ssh": {"hosts": ["gpu-a.invalid"]}},
        {"kind": "slurm"},
    ],
)
def test_a_cluster_that_can_work_is_taken(cluster: dict[str, Any]) -> None:
    make_config({"cluster": cluster, "elastic": ELASTIC}, "test")


def test_slots_of_a_provider_take_no_gpu_and_no_memory_of_this_machine() -> None:
    size = ModelSize(1_000_000, 2, 64, 1024)
    trees: list[dict[str, Any]] = [{}, {"cluster": {"kind": "slurm"}}, {"cluster": EXISTING}]
    local, jobs, existing = (make_config({**tree, "elastic": ELASTIC}, "test") for tree in trees)
    assert [b.devices for b in bind(local, 5).values() if b.zone == Zone.PREEMPTIBLE] == [(3,), (4,)]
    with pytest.raises(UserError, match="this machine has 3"):
        bind(local, 3)
    brought = [b for b in bind(jobs, 3).values() if b.zone == Zone.PREEMPTIBLE]
    assert [b.slot for b in brought] == ["preemptible-0", "preemptible-1"]
    assert all("CUDA_VISIBLE_DEVICES" not in b.environment() for b in brought), "the provider says which"
    assert not [b for b in bind(existing, 3).values() if b.zone == Zone.PREEMPTIBLE], "they have names of their own"
    assert sum(plan_memory(jobs, size).values()) < sum(plan_memory(local, size).values())
