"""Ranks of one trainer on two hosts: a network namespace with a real sshd in it is the other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.binding import bind
from pearl.cluster.processes import LocalLauncher
from pearl.cluster.providers import make_cluster
from pearl.cluster.ranks import RanksLauncher
from pearl.config import RunConfig
from pearl.config.cluster import SshConfig
from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.errors import UserError
from pearl.live.actors import ActorClasses, Actors
from pearl.live.run_directory import RunDirectory
from pearl.live.trainer import TrainerGroup
from pearl.live.waits import WaitTable
from pearl.models import resolve_model
from tests.cluster.servers import sshd
from tests.cluster.spaces import other_host
from tests.cluster.support import ROOT, START_S
from tests.trainer.samples import MODEL, make_groups


def config(**tree: Any) -> RunConfig:
    trainer = {"ranks": 2, "dtype": "float32", "micro_batch_tokens": 1024, **tree.pop("trainer", {})}
    base = {
        "model": {"path": MODEL, "dtype": "float32", "context_tokens": 1024},
        "pipeline": {"groups_per_batch": 2, "group_size": 4, "max_trajectory_tokens": 640},
        "checkpoint": {"every_steps": 1, "keep_weights": False},
    }
    return make_config({**base, **tree, "trainer": trainer}, "test")


def test_ranks_are_dealt_out_to_hosts_in_runs() -> None:
    slots = bind(config(trainer={"ranks": 4, "hosts": ["b"]}), 8)
    hosts = [(slots[f"trainer-{rank}"].host, slots[f"trainer-{rank}"].devices) for rank in range(4)]
    assert hosts == [("", (0,)), ("", (1,)), ("b", ()), ("b", ())]  # host b numbers its own devices
    assert slots["rollout-0"].devices == (2,)


def test_ranks_that_do_not_deal_out_evenly_are_refused() -> None:
    with pytest.raises(UserError, match=r"trainer\.ranks = 4 do not deal out evenly"):
        config(trainer={"ranks": 4, "hosts": ["b", "c"]})


def test_gpus_of_another_host_cannot_be_borrowed_here() -> None:
    elastic = {"policy": "elastic-borrow", "overlap_slots": 2}
    with pytest.raises(UserError, match=r"trainer\.ranks"):
        config(trainer={"hosts": ["b"]}, elastic=elastic)


async def test_a_host_with_other_files_and_one_that_does_not_answer_are_refused(tmp_path: Path) -> None:
    hidden = tmp_path / "runs"
    hidden.mkdir()
    veil = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$0" "$@"')
    with sshd(tmp_path / "ssh", within=veil) as server:
        known = SshConfig(options=server.options)
        here = LocalLauncher(tmp_path / "logs", "127.0.0.1")
        await RanksLauncher(here, ["here"], 1, known).reach(tmp_path / "shared")
        with pytest.raises(UserError, match=r"does not see .*runs as this machine does"):
            await RanksLauncher(here, ["here"], 1, known).reach(hidden)
        with pytest.raises(UserError, match="nobody does not answer"):
            await RanksLauncher(here, ["nobody"], 1, known).reach(tmp_path / "shared")
    assert list((tmp_path / "shared").iterdir()) == []


async def trained(config: RunConfig, folder: Path) -> tuple[str, list[Event], dict[str, str]]:
    """Checksum of the weights after one step, what was told, and where each rank was."""
    posted: list[Event] = []
    directory = RunDirectory(folder)
    cluster = make_cluster(config, folder / "workers", lambda *_: None)
    async with cluster:
        actors = Actors(cluster, bind(config, 0), WaitTable(), START_S, ActorClasses())
        group = TrainerGroup(actors, config, resolve_model(MODEL), directory, posted.append)
        await group.start()
        await group.train(ev.TrainBatch(1, ()), make_groups(1)[:2])
        await group.publish(ev.PublishSnapshot(1), 1)
        where = {slot: str(cluster.workers[slot].address) for slot in group.slots}
        group.retire(2)
        return group.checksums[1], posted, where


@pytest.mark.slow
async def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    alone, _, _ = await trained(config(), tmp_path / "alone")
    with other_host() as space, sshd(tmp_path / "ssh", space.there, space.command()) as server:
        both = config(
            trainer={"hosts": ["here"]},
            cluster={"host": space.here, "ssh": {"options": list(server.options), "directory": str(ROOT)}},
        )
        checksum, posted, where = await trained(both, tmp_path / "both")
    assert posted == [ev.TrainerReady(0, 0), ev.BatchTrained(1), ev.SnapshotPublished(1), ev.CheckpointWritten(1)]
    assert checksum == alone
    assert where["trainer-0"].startswith(f"tls://{space.here}:")
    assert where["trainer-1"].startswith(f"tls://{space.there}:")
