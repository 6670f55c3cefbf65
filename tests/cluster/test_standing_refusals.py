"""What `pearl cluster` refuses, before it starts or ends anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pearl.cluster.certificates import Certificates
from pearl.cluster.launcher import LaunchFailed
from pearl.cluster.standing import StandingCluster, State
from pearl.cluster_command import _run
from pearl.config.cluster import ClusterConfig
from pearl.config.load import load_config
from pearl.core.requests import Cause
from pearl.errors import RunFailed, UserError
from tests.cluster.servers import free_port
from tests.cluster.support import ROOT


def cluster(directory: Path) -> StandingCluster:
    return StandingCluster(directory, print)


def state_of(directory: Path, address: str | None) -> None:
    directory.mkdir()
    State("ab", ClusterConfig().model_dump(mode="json"), 0, 1, address).save(directory / "cluster.json")


async def up(directory: Path, *overrides: str) -> None:
    await cluster(directory).up(load_config(ROOT / "examples" / "tiny.yaml", overrides), 1, 0)


async def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "cluster"):
        with pytest.raises(UserError, match=f"--directory {directory} cannot be written"):
            await up(directory)
        with pytest.raises(UserError, match="there is no cluster in"):
            await cluster(directory).status()


async def test_a_scheduler_that_could_not_listen_is_refused_and_leaves_no_state(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster\.host = 192\.0\.2\.1 .* cannot be used"):
        await up(tmp_path / "cluster", "cluster.host=192.0.2.1")
    assert not (tmp_path / "cluster" / "cluster.json").exists()


@pytest.mark.parametrize("text", ['{"id": ', "[]", '{"id": "a", "of": "another version"}'])
async def test_a_state_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(text)
    for command in (cluster(tmp_path).status(), cluster(tmp_path).scale(1, 1, 1), cluster(tmp_path).down()):
        with pytest.raises(UserError, match=r"cluster\.json cannot be read"):
            await command


async def test_a_state_file_with_a_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    state_of(tmp_path / "cluster", None)
    path = tmp_path / "cluster" / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": {"kind": "moon"}}))
    with pytest.raises(UserError, match=r"cluster\.json cannot be read .*kind"):
        await cluster(tmp_path / "cluster").down()


async def test_certificates_that_are_gone_are_named(tmp_path: Path) -> None:
    state_of(tmp_path / "cluster", f"tls://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"there is no TLS file .*ca\.pem"):
        await cluster(tmp_path / "cluster").status()


async def test_a_cluster_that_was_interrupted_is_told_and_taken_down_with_its_keys(tmp_path: Path) -> None:
    state_of(tmp_path / "cluster", None)
    tls = Certificates.make(tmp_path / "cluster" / "tls").directory
    assert (await cluster(tmp_path / "cluster").status())["scheduler"] == "it was not started"
    with pytest.raises(UserError, match="the scheduler does not answer: it was not started"):
        await cluster(tmp_path / "cluster").scale(1, 1, 1)
    assert await cluster(tmp_path / "cluster").down() == []
    assert not tls.exists()


def test_a_provider_that_fails_in_between_is_told_and_how_to_go_on(tmp_path: Path) -> None:
    async def scale() -> dict[str, Any]:
        raise LaunchFailed("gpu-a does not answer", Cause.UNREACHABLE)

    with pytest.raises(RunFailed, match=f"gpu-a does not answer; `pearl cluster down --directory {tmp_path}`"):
        _run(Console(), cluster(tmp_path), scale())
