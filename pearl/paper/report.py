"""Cells and what they come to, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pearl.paper import published as p
from pearl.paper.beyond import Beyond
from pearl.paper.cell import Cell
from pearl.paper.end_to_end import EndToEnd
from pearl.paper.statistics import gains

WIDE = 110
"""Columns of a console that have room for intervals."""


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    held = [cell for cell in cells if cell.held_out and cell.published is not None]

    def share(name: str) -> dict[str, Any]:
        said = [cell for cell in held if getattr(cell, name) is not None]
        return {
            "yes": sum(getattr(cell, name) for cell in said),
            "of": len(said),
            "not": [f"{cell.figure}: {cell.name}, {cell.model}" for cell in said if not getattr(cell, name)],
        }

    return {
        "cells": len(cells),
        "held_out": len(held),
        **{name: share(name) for name in ("agrees_sign", "agrees_rank", "within_5_points")},
    }


def aims(end_to_end: EndToEnd, beyond: Beyond, others: Sequence[float]) -> list[dict[str, Any]]:
    """What `pearl` is to reach. `others`: its gains over `pearl-paper`, per cent, in the fixed-GPU cells."""
    segments = range(3)
    rows: list[dict[str, Any]] = []

    def aim(what: str, at_least: float, ours: float) -> None:
        rows.append({"aim": what, "at_least": at_least, "ours": round(ours, 3), "reached": ours >= at_least})

    for model, least in zip(p.MODELS, (2.4, 2.8), strict=True):
        for i in segments:
            aim(f"{model}, segment {i + 1}: times ROLL", least, end_to_end.multiple(model, i, "pearl").mean)
        for i in segments:
            gain = end_to_end.gain((model, i, "pearl"), (model, i, "rlboost+")).mean
            aim(f"{model}, segment {i + 1}: % over RLBoost+", p.OVER_RLBOOST[model][i] + 5, gain)
    in_cells = [
        fmean(gains(end_to_end.column(model, i, "pearl"), end_to_end.column(model, i, "pearl-paper")))
        for model in p.MODELS
        for i in segments
    ] + list(others)
    drawn = beyond.gains_by_environment()
    aim("% over pearl-paper, mean over the cells", 5, fmean(in_cells))
    aim("% over pearl-paper, least of the cells", -1, min(in_cells))
    aim("% over pearl-paper, mean over the drawn environments", 5, fmean(drawn))
    aim("% over pearl-paper, least of the drawn environments", -1, min(drawn))
    return rows


def table(cells: Sequence[Cell], width: int) -> Table:
    """For a console of `width` columns; a narrow one gets no intervals."""
    wide = width >= WIDE
    title = "The source's figures and ours (simulated)" + ("; brackets: 95 % intervals" if wide else "")
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "model", "source", "ours", *(["(from, to)"] if wide else []), "pearl", "sign", "rank", "5 pt"):
        figures = name in ("source", "ours", "pearl")
        result.add_column(name, justify="right" if figures else "left", no_wrap=name != "")
    mark = {True: "yes", False: "[red]no[/]", None: ""}
    figure = ""
    for c in cells:
        if c.figure != figure:
            figure = c.figure
            result.add_row(f"[bold]{figure}[/]")
        between = "" if c.lo == c.hi else f"[dim]({short(c.lo, c.unit)}, {short(c.hi, c.unit)})[/]"
        result.add_row(
            " " + c.name + ("" if c.held_out else " (not held out)"), c.model.removeprefix("qwen3-"),
            "" if c.published is None else short(c.published, c.unit), short(c.ours, c.unit),
            *([between] if wide else []), "" if c.pearl is None else short(c.pearl.mean, c.unit),
            mark[c.agrees_sign], mark[c.agrees_rank], mark[c.within_5_points],
        )  # fmt: skip
    return result


def short(value: float, unit: str) -> str:
    """Without a unit that is a noun."""
    return number(value, unit) if unit in ("%", "x", "s") else f"{value:g}"


def aims_table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(title="What pearl is to reach", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("aim", "at least", "ours", "reached"):
        result.add_column(name)
    for row in rows:
        result.add_row(
            row["aim"], f"{row['at_least']:g}", f"{row['ours']:.2f}", "yes" if row["reached"] else "[red]no[/]"
        )
    return result


def number(value: float, unit: str) -> str:
    text = {"%": f"{value:+.1f} %", "x": f"{value:.2f}x", "s": f"{value:.1f} s"}
    return text.get(unit, f"{value:g} {unit}")


def markdown(cells: Sequence[Cell]) -> str:
    """The table of docs/evaluation.md."""
    lines = [
        "| | model | source | ours, 95 % interval | `pearl` | sign | rank | 5 points |",
        "|---|---|---|---|---|---|---|---|",
    ]
    mark = {True: "yes", False: "**no**", None: ""}
    figure = ""
    for c in cells:
        if c.figure != figure:
            figure = c.figure
            lines.append(f"| **{figure}** | | | | | | | |")
        between = "" if c.lo == c.hi else f" ({c.lo:.4g} to {c.hi:.4g})"
        lines.append(
            f"| {c.name}{'' if c.held_out else ' †'} | {c.model.removeprefix('qwen3-')} | "
            f"{'' if c.published is None else number(c.published, c.unit)} | {number(c.ours, c.unit)}{between} | "
            f"{'' if c.pearl is None else number(c.pearl.mean, c.unit)} | "
            f"{mark[c.agrees_sign]} | {mark[c.agrees_rank]} | {mark[c.within_5_points]} |"
        )
    return "\n".join(lines) + "\n"
