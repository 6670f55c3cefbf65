"""`pearl cluster`: a scheduler and workers that outlive a run."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pearl.errors import RunFailed, UserError

if TYPE_CHECKING:
    from pearl.cluster.standing import StandingCluster

app = typer.Typer(help="A cluster that outlives a run: start it, look at it, change it, end it.", no_args_is_help=True)

Directory = Annotated[Path, typer.Option(help="Where the cluster's state, certificates and logs lie.")]
Json = Annotated[bool, typer.Option("--json", help="Progress to stderr; one object on stdout.")]
DEFAULT = Path("cluster")


def _console(json: bool) -> Console:
    return Console(stderr=json, highlight=False, soft_wrap=True)


@app.command()
def up(
    run: Annotated[Path, typer.Argument(help="A run's YAML file: its section `cluster`, and what a slot needs.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, any number of them.")] = None,
    slots: Annotated[int | None, typer.Option(min=0, help="Workers; elastic.preemptible_slots if not given.")] = None,
    directory: Directory = DEFAULT,
    json: Json = False,
) -> None:
    """Start a scheduler here and workers where `cluster.kind` says."""
    from pearl.cluster.standing import StandingCluster
    from pearl.config.load import load_config

    config = load_config(run, overrides or [])
    console = _console(json)
    count = config.elastic.preemptible_slots if slots is None else slots
    gpus = 0 if config.engine.device == "cpu" else config.engine.tensor_parallel
    if config.engine.device == "auto" and not _has_gpu() and config.cluster.kind == "local":
        gpus = 0
    cluster = StandingCluster(directory, console.print)
    _show(console, cluster, _run(console, cluster, cluster.up(config, count, gpus)), json)


@app.command()
def status(directory: Directory = DEFAULT, json: Json = False) -> None:
    """Say who is there. Exit code 1 if the scheduler does not answer."""
    from pearl.cluster.standing import StandingCluster

    console = _console(json)
    cluster = StandingCluster(directory, console.print)
    found = asyncio.run(cluster.status())
    _show(console, cluster, found, json)
    raise typer.Exit(0 if found["scheduler"] == "here" else 1)


@app.command()
def scale(
    slots: Annotated[int, typer.Argument(min=0, help="Workers that there are to be.")],
    directory: Directory = DEFAULT,
    start: Annotated[float, typer.Option("--start-s", min=0, help="Seconds that a new worker has to join.")] = 300.0,
    grace: Annotated[float, typer.Option("--grace-s", min=0, help="Seconds of notice to their driver.")] = 30.0,
    json: Json = False,
) -> None:
    """Start or end workers until there are that many."""
    from pearl.cluster.standing import StandingCluster

    console = _console(json)
    cluster = StandingCluster(directory, console.print)
    _show(console, cluster, _run(console, cluster, cluster.scale(slots, start, grace)), json)


@app.command()
def down(directory: Directory = DEFAULT, json: Json = False) -> None:
    """End everything that was started, and look that nothing is left; also after a command that was killed."""
    from pearl.cluster.standing import StandingCluster

    console = _console(json)
    left = asyncio.run(StandingCluster(directory, console.print).down())
    if json:
        print(json_module.dumps({"left": left}))
    if left:
        raise RunFailed(f"something is left: {'; '.join(left)}; try again")
    console.print("nothing is left")


@app.command()
def manifests(
    run: Annotated[Path, typer.Argument(help="A run's YAML file: its section `cluster.kubernetes`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, any number of them.")] = None,
    name: Annotated[str, typer.Option(help="Of the cluster; its certificates are the secret NAME-tls.")] = "pearl",
    slots: Annotated[int | None, typer.Option(min=0, help="Workers; elastic.preemptible_slots if not given.")] = None,
) -> None:
    """Print what dask-kubernetes' operator needs for a cluster that outlives a run; start nothing."""
    import yaml

    from pearl.cluster.pods import standing_manifests
    from pearl.config.load import load_config

    config = load_config(run, overrides or [])
    if fault := config.cluster.kubernetes.fault():
        raise UserError(f"{run}: {fault}", "See docs/clusters.md, Kubernetes.")
    count = config.elastic.preemptible_slots if slots is None else slots
    gpus = 0 if config.engine.device == "cpu" else config.engine.tensor_parallel
    made = json_module.loads(json_module.dumps(standing_manifests(config.cluster.kubernetes, name, count, gpus)))
    print(yaml.safe_dump_all(made, sort_keys=False), end="")  # without the references that shared parts would become


def _run(console: Console, cluster: StandingCluster, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    from pearl.cluster.launcher import LaunchFailed

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        console.print(f"interrupted; {cluster.line('down')} ends all that was started")
        raise
    except LaunchFailed as error:
        raise RunFailed(f"{error}; {cluster.line('down')} ends all that was started") from None


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.device_count())


def _show(console: Console, cluster: StandingCluster, status: dict[str, Any], json: bool) -> None:
    if json:
        print(json_module.dumps(status))
        return
    table = Table("slot", "state", "zone", "life", "host", "devices")
    for slot in status["slots"]:
        table.add_row(*(str(slot[name] if slot[name] is not None else "") for name in
                        ("slot", "state", "zone", "life", "host", "devices")))  # fmt: skip
    console.print(table)
    if status["scheduler"] != "here":
        console.print(f"the scheduler of this {status['kind']} cluster does not answer: {status['scheduler']}")
        console.print(f"end it with {cluster.line('down')}, and start it anew")
        return
    driver = "a driver is connected" if status["driver"] else "no driver is connected"
    console.print(f"{status['kind']} cluster at {status['address']}: {driver}")
    console.print(
        f"use it: pearl train RUN.yaml cluster.kind=existing cluster.address={status['address']} "
        f"cluster.tls_directory={status['tls_directory']}"
    )
