"""`pearl bench`: the console side of studies that come with the package."""

from __future__ import annotations

import json as json_module
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Studies that compare with published figures.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Everything is simulated; no GPU, model or network is needed."""


@app.command()
def paper(
    json: Annotated[bool, typer.Option("--json", help="Console to stderr; one object on stdout.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds and sizes: some minutes, wide intervals.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for paper.json, table.md, the figures and what was played so far; bench/results/paper, or "
            "paper-quick beside it, if not given."
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Simulations at once; by default as many as there are CPUs.")
    ] = (os.cpu_count() or 1),
    limit: Annotated[
        float | None, typer.Option(min=1, help="Stop after so many seconds; the same command goes on from there.")
    ] = None,
) -> None:
    """Replay the source's evaluation in the simulator: its figures beside ours, cell by cell, and pearl beside them."""
    from pearl.paper import figures
    from pearl.paper.plan import Plan
    from pearl.paper.report import aims_table, table
    from pearl.paper.runner import Kept
    from pearl.paper.study import KEPT, Studies, deadline, write
    from pearl.paper.world import load_world

    console = Console(stderr=json)
    out = out or Path("bench/results") / ("paper-quick" if quick else "paper")
    out.mkdir(parents=True, exist_ok=True)
    world = load_world()
    studies = Studies.of(Plan.quick(world) if quick else Plan(world))

    with console.status("") as status:
        done = studies.play(
            Kept(out / KEPT), processes, deadline(limit), lambda n, of: status.update(f"{n} of {of} simulations")
        )
    if not done:
        console.print("time is over; the same command goes on from here", highlight=False)
        raise typer.Exit(1)
    result = studies.result()
    write(studies, result, out)
    drawn = find_spec("matplotlib") is not None
    if drawn:
        figures.draw(studies, result, out)
    if json:
        print(json_module.dumps(result))
    else:
        console.print(table(studies.cells(), console.width), aims_table(result["aims"]))
        for name in ("agrees_sign", "agrees_rank", "within_5_points"):
            console.print(f"held out, {name}: {result['summary'][name]['yes']} of {result['summary'][name]['of']}")
        pictures = "the figures beside it" if drawn else "no figures, for want of matplotlib"
        console.print(f"written: {out}/paper.json, {pictures}", highlight=False, soft_wrap=True)
