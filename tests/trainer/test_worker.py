"""Two ranks as Dask actors in two processes, against one rank here."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from actors.trainer import TrainerWorker
from pearl.core.trajectory import Trajectory
from pearl.models import resolve_model
from pearl.weights.snapshot import read_manifest
from tests.trainer.samples import MODEL, config, make_group, make_groups, start
from trainer.wire import pack_groups, unpack_groups

pytestmark = pytest.mark.slow
# Three rows of which one fits a micro-batch: two for one rank, one and an empty one for the other.
UNEVEN = [make_group(50, [0.0, 1.0, 0.5], prompt=(50, 50), response=(3, 3))]


def silent(trajectory: Trajectory) -> Trajectory:
    """The same attempt, had it generated nothing."""
    return replace(trajectory, segments=trajectory.segments[:1])


# A single row, so that the other rank has none.
LONE_ROW = [
    [silent(trajectory) if trajectory.reward == 0.0 else trajectory for trajectory in make_group(1, [0.0, 1.0])]
]
SAME = ("loss", "grad_norm", "entropy", "mismatch_kl", "loss_tokens", "staleness_max", "logprob_delta_max")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Any]]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        futures = [
            client.submit(TrainerWorker, actor=True, workers=[address], pure=False, key=f"trainer-{index}")
            for index, address in enumerate(addresses)
        ]
        yield [future.result() for future in futures]


def on_all(actors: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    return [future.result(timeout=300) for future in [call(actor) for actor in actors]]


def begin(actors: list[Any], stage: int) -> list[dict[str, Any]]:
    settings = config(ranks=2, zero_stage=stage, micro_batch_tokens=64).model_dump()
    address, port = actors[0].rendezvous().result()
    futures = [
        actor.start(settings, str(resolve_model(MODEL)), "float32", rank, 2, address, port, 0, 10, 1.0, 600.0)
        for rank, actor in enumerate(actors)
    ]
    return [future.result(timeout=300) for future in futures]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one(ranks: list[Any], stage: int, tmp_path: Path) -> None:
    batches = [make_groups(1), LONE_ROW, UNEVEN, make_groups(4), make_groups(5)]
    single = start(config(zero_stage=0))
    expected = [single.train_step(step, batch) for step, batch in enumerate(batches, start=1)]
    single.close()

    described = begin(ranks, stage)
    assert [d["rank"] for d in described] == [0, 1]
    assert len({d["pid"] for d in described}) == 2
    with pytest.raises(RuntimeError, match="started already"):
        begin(ranks, stage)
    for step, batch in enumerate(batches[:4], start=1):
        data = pack_groups(batch)
        got = on_all(ranks, methodcaller("train", step, data))
        assert {name: got[0][name] for name in SAME} == {name: got[1][name] for name in SAME}
        for name in SAME:
            assert got[0][name] == pytest.approx(expected[step - 1][name], rel=1e-4, abs=1e-5), (step, name)
        if step in (2, 3):
            assert got[0]["micro_batches"] == (2.0, 4.0)[step - 2]

    exports = on_all(ranks, lambda actor: actor.export(str(tmp_path), 4))
    assert exports[1] == {}
    assert exports[0]["directory"] == str(tmp_path / "v4")
    manifest = read_manifest(tmp_path / "v4")
    assert (exports[0]["checksum"], exports[0]["nbytes"]) == (manifest.checksum, manifest.nbytes)
    assert on_all(ranks, lambda actor: actor.checksum()) == [manifest.checksum] * 2

    saved = on_all(ranks, lambda actor: actor.save(str(tmp_path / "checkpoints"), "four", {"epoch": 1}))
    assert saved[0]["directory"] == str(tmp_path / "checkpoints" / "four")
    data = pack_groups(batches[4])
    fifth = on_all(ranks, lambda actor: actor.train(5, data))
    assert fifth[0]["loss"] == pytest.approx(expected[4]["loss"], rel=1e-4, abs=1e-5)
    on_all(ranks, lambda actor: actor.stop())
    assert ranks[0].describe().result()["state"] == "stopped"

    begin(ranks, stage)
    assert on_all(ranks, lambda actor: actor.load(str(tmp_path / "checkpoints"), "four")) == [{"epoch": 1}] * 2
    assert ranks[1].describe().result() | {"step": 4, "version": 4} == ranks[1].describe().result()
    again = on_all(ranks, lambda actor: actor.train(5, data))
    assert {name: again[0][name] for name in SAME} == {name: fifth[0][name] for name in SAME}
    on_all(ranks, lambda actor: actor.stop())


def test_a_rank_that_is_not_started_says_so() -> None:
    worker = TrainerWorker()
    with pytest.raises(RuntimeError, match="not started"):
        worker.train(1, pack_groups(make_groups(1)))
    worker.stop()
    assert worker.describe()["state"] == "stopped"


def test_a_batch_survives_the_wire_and_other_bytes_do_not() -> None:
    assert unpack_groups(pack_groups(make_groups(1))) == make_groups(1)
    for data in (b"", b"\x01", b"\x91\x91\x80"):
        with pytest.raises(ValueError, match="no batch"):
            unpack_groups(data)
