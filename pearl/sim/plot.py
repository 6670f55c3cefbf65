"""The picture of a timeline: who did what, over the tokens that came of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pearl.core.layout import Zone
from pearl.errors import UserError
from pearl.sim.timeline import Doing, Timeline

COLOURS = {
    Doing.COLOCATED: "#4477aa",
    Doing.PREFILL: "#ee7733",
    Doing.DECODE: "#33bbaa",
    Doing.TRAINING: "#555555",
    Doing.STARTING: "#e8d9a0",
    Doing.LOADING: "#c9b037",
    Doing.MOVING: "#cc3377",
    Doing.IDLE: "#e6e6e6",
}
"""Told apart by people who are colour-blind, too. What is absent is white."""
ZONES = {Zone.OVERLAP: "training GPUs\n(overlap zone)", Zone.RESERVED: "reserved", Zone.PREEMPTIBLE: "preemptible"}
"""From the top down."""
SUFFIXES = (".png", ".svg", ".pdf")
LABELLED_LANES = 40
LABEL_GAP = 0.025
"""Of the width, between two labels of decisions."""


def check(path: Path) -> None:
    """Raises UserError where nothing can be drawn, before anything is simulated."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib", "Run `pip install matplotlib`")
    if path.suffix not in SUFFIXES or not path.parent.is_dir():
        raise UserError(
            f"cannot draw to {path}", f"Name a file in a folder that exists, ending in {', '.join(SUFFIXES)}"
        )


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Raises UserError where the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = [(name, lane) for zone in ZONES for name, lane in timeline.lanes.items() if lane.zone is zone]
    height = min(14.0, 2.6 + 0.21 * max(12, len(lanes)))
    figure, (roles, tokens) = pyplot.subplots(
        2, 1, figsize=(14, height + 2), sharex=True, height_ratios=(height - 1, 2.2), layout="constrained"
    )
    minutes = timeline.now / 60
    _lanes(roles, lanes, timeline)
    _decisions(roles, timeline, len(lanes), minutes)
    _tokens(tokens, timeline)
    tokens.set_xlim(0, minutes)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "Name another file") from None
    finally:
        pyplot.close(figure)


def _lanes(axes: Any, lanes: list[tuple[str, Any]], timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used: set[Doing] = set()
    for y, (_, lane) in enumerate(lanes):
        spans: dict[Doing, list[tuple[float, float]]] = {}
        for since, end, doing in lane.spans(timeline.now):
            spans.setdefault(doing, []).append((since / 60, (end - since) / 60))
        for doing, bars in spans.items():
            if doing is not Doing.ABSENT:
                used.add(doing)
                axes.broken_barh(bars, (y - 0.42, 0.84), facecolors=COLOURS[doing], linewidth=0)
    y = 0
    for zone, label in ZONES.items():
        count = sum(lane.zone is zone for _, lane in lanes)
        if count:
            axes.text(-0.075, y + (count - 1) / 2, label, rotation=90, ha="center", va="center", fontsize=9,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            if y:
                axes.axhline(y - 0.5, color="black", linewidth=0.8)
            y += count
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    shown = lanes if len(lanes) <= LABELLED_LANES else []
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=7)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=COLOURS[doing], label=str(doing)) for doing in COLOURS if doing in used]
    axes.legend(handles=handles, ncol=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.005), fontsize=8,
                frameon=False, handlelength=1.2)  # fmt: skip
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _decisions(axes: Any, timeline: Timeline, lanes: int, minutes: float) -> None:
    """A line for each decision that changed the layout, its label where there is room."""
    labelled = -1.0
    before = ""
    for at_s, layout, _ in timeline.decisions:
        if layout == before:
            continue
        before = layout
        at = at_s / 60
        axes.plot([at, at], [-0.5, lanes - 0.5], color="black", linewidth=0.5, alpha=0.55)
        if at - labelled >= LABEL_GAP * minutes or labelled < 0:
            axes.text(at, -0.75, layout, rotation=60, fontsize=7, ha="left", va="bottom")
            labelled = at


def _tokens(axes: Any, timeline: Timeline) -> None:
    at, rate = timeline.rates()
    axes.fill_between([t / 60 for t in at], rate, step="mid", color="#4477aa", alpha=0.35, linewidth=0)
    axes.step([t / 60 for t in at], rate, where="mid", color="#4477aa", linewidth=0.9)
    for number, (at_s, _) in enumerate(timeline.steps):
        axes.axvline(
            at_s / 60, ymin=0, ymax=0.06, color="#555555", linewidth=1.2, label=None if number else "step done"
        )
    axes.set_ylabel("generated tokens/s")
    axes.set_xlabel("virtual minutes")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.3)
    if timeline.steps:
        axes.legend(loc="upper right", fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
