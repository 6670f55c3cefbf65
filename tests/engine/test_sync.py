"""Weight updates: verified against the manifest, refused when anything is wrong, never backwards."""

from __future__ import annotations

import asyncio

import pytest

from actors.rollout import RolloutWorker
from actors.sglang.errors import StaleVersion, WeightLoadError
from tests.engine.support import Snapshots, progress, request, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_sync_reads_back_what_the_manifest_says(engine: RolloutWorker, snapshots: Snapshots) -> None:
    before = await engine.generate(request("old"))
    snapshot = snapshots.publish()
    synced = await engine.sync(str(snapshot.directory), snapshot.version)
    assert synced["checksum"] == snapshot.manifest.checksum
    assert synced["verified"] == len(snapshot.manifest.tensors)
    assert synced["unverified"] == 0
    after = await engine.generate(request("new"))
    assert after["versions"] == [[snapshot.version, 32]]
    assert after["token_ids"] != before["token_ids"]
    assert after["cached_tokens"] == 0, "the prefix cache must be flushed"


async def test_sync_aborts_what_is_pending(engine: RolloutWorker, snapshots: Snapshots) -> None:
    call = asyncio.create_task(engine.generate(request("p", tokens=900)))
    await until(lambda: progress(engine).get("p", 0) > 0)
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    result = await call
    assert result["finish"] == "abort"
    assert len(result["versions"]) == 1 and result["versions"][0][0] < snapshot.version


async def test_older_version_is_refused_and_changes_nothing(engine: RolloutWorker, snapshots: Snapshots) -> None:
    old, new = snapshots.publish(), snapshots.publish()
    await engine.sync(str(new.directory), new.version)
    with pytest.raises(StaleVersion, match=f"version {old.version} is older than version {new.version}"):
        await engine.sync(str(old.directory), old.version)
    assert (await engine.generate(request("still")))["versions"] == [[new.version, 32]]


@pytest.mark.parametrize("fault", ["damaged", "short", "gone", "other model", "lacks a tensor", "other dtype", "shape"])
async def test_bad_snapshot_stops_serving_until_a_good_one(
    engine: RolloutWorker, snapshots: Snapshots, fault: str
) -> None:
    weights = snapshots.weights(1)
    config = None
    if fault == "lacks a tensor":
        del weights["model.layers.1.mlp.down_proj.weight"]
    elif fault == "other dtype":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    elif fault == "shape":
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    elif fault == "other model":
        config = "0" * 16
    bad = snapshots.publish(weights, config=config)
    data = bad.directory / "data.bin"
    if fault == "damaged":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif fault == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif fault == "gone":
        data.unlink()
    with pytest.raises(WeightLoadError, match=f"did not load version {bad.version}") as raised:
        await engine.sync(str(bad.directory), bad.version)
    assert "may be damaged now" not in str(raised.value), "the model must not be touched"
    refused = await engine.generate(request("no"))
    assert (refused["finish"], refused["reason"]) == ("failed", "the engine has no synced weights")
    good = snapshots.publish()
    await engine.sync(str(good.directory), good.version)
    assert (await engine.generate(request("yes")))["finish"] == "length"


async def test_request_during_a_sync_waits_for_it(engine: RolloutWorker, snapshots: Snapshots) -> None:
    snapshot = snapshots.publish()
    sync = asyncio.create_task(engine.sync(str(snapshot.directory), snapshot.version))
    assert engine._client is not None
    await until(lambda: not engine._client._gate.is_set())  # type: ignore[union-attr]
    result = await engine.generate(request("during"))
    await sync
    assert result["versions"] == [[snapshot.version, 32]]


async def test_flush_and_memory(engine: RolloutWorker, snapshots: Snapshots) -> None:
    await engine.generate(request("fill", range(1, 40)))
    assert (await engine.generate(request("hit", range(1, 40))))["cached_tokens"] > 0
    await engine.flush()
    assert (await engine.generate(request("miss", range(1, 40))))["cached_tokens"] == 0
    await engine.release_memory()
    assert (await engine.generate(request("no")))["finish"] == "failed"
    await engine.resume_memory()
    snapshot = snapshots.publish()
    await engine.sync(str(snapshot.directory), snapshot.version)
    assert (await engine.generate(request("back")))["finish"] == "length"
