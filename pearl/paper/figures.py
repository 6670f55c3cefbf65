"""The source's figures, drawn again with ours beside what it prints. Black marks and grey bands are the source's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pearl.paper import published as p
from pearl.paper.end_to_end import SYSTEMS, EndToEnd
from pearl.paper.fixed_gpus import STAGES, SWEPT, Ablation, Sensitivity
from pearl.paper.layouts import Motivation, Pairs, Ratios, ratios
from pearl.paper.statistics import Estimate, estimate
from pearl.paper.study import Studies
from pearl.paper.world import SEGMENTS, segment

COLOURS = {
    "roll": "#bbbbbb", "roll-large": "#ccbb44", "rlboost+": "#4477aa", "pearl-paper": "#ee7733", "pearl": "#009988",
    "forced-pd": "#88ccee", "forced-pd-borrow": "#ddaa33", "forced-pd-gated": "#ee7733",
}  # fmt: skip
NAMES = {
    "roll": "ROLL", "roll-large": "ROLL-Large", "rlboost+": "RLBoost+", "pearl-paper": "PEARL as published",
    "pearl": "pearl (ours)", "forced-pd": "PD", "forced-pd-borrow": "+ toggle", "forced-pd-gated": "+ gate",
}  # fmt: skip
TITLES = {p.SMALL: "Qwen3-8B", p.LARGE: "Qwen3-30B-A3B"}
SOURCE = {"color": "black", "zorder": 5}
BAND = {"color": "black", "alpha": 0.13, "linewidth": 0, "zorder": 0}


def draw(studies: Studies, result: dict[str, Any], folder: Path) -> None:
    """Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    _save(folder / "motivation.png", 3, 4.2, lambda axes: _motivation(axes, studies.motivation, studies.pairs))
    _save(folder / "figure4_segments.png", 3, 4.0, _segments)
    _save(folder / "figure5_end_to_end.png", 2, 6.2, lambda axes: _end_to_end(axes, studies.end_to_end))
    _save(folder / "figure7_ablation.png", 2, 6.2, lambda axes: _ablation(axes, studies.ablation))
    _save(folder / "figure8_sensitivity.png", 3, 4.4, lambda axes: _sensitivity(axes, studies.sensitivity))
    _save(folder / "table2_ratios.png", 3, 4.4, lambda axes: _ratios(axes, studies.ratios))
    _save(folder / "table3_reconfiguration.png", 2, 5.0, lambda axes: _reconfiguration(axes, result["cells"]))
    _save(folder / "beyond.png", 2, 6.4, lambda axes: _beyond(axes, studies, result))


def _save(path: Path, columns: int, width: float, fill: Callable[[Sequence[Any]], None]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, 3.9), layout="constrained")
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", linewidth=0.3)
        one.set_axisbelow(True)
    fill(axes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _error(found: Estimate) -> list[list[float]]:
    return [[found.mean - found.lo], [found.hi - found.mean]]


def _motivation(axes: Sequence[Any], study: Motivation, pairs: Pairs) -> None:
    scaling, gained, best = axes
    gpus = (16, 24, 32)
    told = [100.0] + [100 - p.SCALING_CUT[n] for n in gpus[1:]]
    at_16 = study.makespans(16)
    ours = [estimate([100 * a / b for a, b in zip(study.makespans(n), at_16, strict=True)]) for n in gpus]
    scaling.plot(gpus, told, "D--", label="source", **SOURCE)
    scaling.errorbar(gpus, [e.mean for e in ours], [_error(e)[0][0] for e in ours], fmt="o-", color=COLOURS["rlboost+"],
                     label="ours", capsize=3)  # fmt: skip
    scaling.set(title="Section 3.1: rollout time by rollout GPUs, Qwen3-8B", ylabel="% of the time at 16", xticks=gpus)
    scaling.set_ylim(0, 110)
    batches = pairs.plan.pairs_batches
    found = [pairs.pairs_gain(batch) for batch in batches]
    gained.axhline(0, color="black", linewidth=0.7)
    gained.plot(list(p.PAIRS_GAIN), list(p.PAIRS_GAIN.values()), "D", label="source", **SOURCE)
    gained.errorbar(batches, [e.mean for e in found], [_error(e)[0][0] for e in found], fmt="o-",
                    color=COLOURS["pearl-paper"], label="ours", capsize=3)  # fmt: skip
    gained.set(title="Section 3.3: best pairs over colocated,\nQwen3-30B-A3B, 16 GPUs", xlabel="batch", ylabel="%",
               xticks=batches)  # fmt: skip
    places = [pairs.best(batch) for batch in batches]
    best.plot(list(p.BEST_PREFILL), list(p.BEST_PREFILL.values()), "D", label="source", **SOURCE)
    best.errorbar(batches, [b[0] for b in places], [[b[0] - b[1] for b in places], [b[2] - b[0] for b in places]],
                  fmt="o", color=COLOURS["pearl-paper"], label="ours", capsize=3)  # fmt: skip
    best.set(title="Section 3.3: prefill workers of the best ratio", xlabel="batch", ylabel="of 8", xticks=batches,
             ylim=(0, 8))  # fmt: skip
    for one in axes:
        one.legend(frameon=False, fontsize=8)


def _legend_below(axes: Any, columns: int) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns)


def _segments(axes: Sequence[Any]) -> None:
    for number, (one, name) in enumerate(zip(axes, SEGMENTS, strict=True)):
        trace = json.loads(segment(name).read_text())
        at, gpus = zip(*trace["events"], strict=True)
        minutes = [t / 60 for t in at] + [trace["duration_s"] / 60]
        one.step(minutes, [4 + n for n in gpus] + [4 + gpus[-1]], where="post", color=COLOURS["rlboost+"], label="ours")
        one.axhline(trace["mean_rollout_gpus"], color=COLOURS["rlboost+"], linestyle=":", label="mean of ours")
        one.axhline(p.MEAN_ROLLOUT_GPUS[number], linestyle="--", label="the source's mean", **SOURCE)
        one.set(title=f"Figure 4, segment {number + 1}", xlabel="minutes", ylabel="rollout GPUs", ylim=(0, 18))
        one.legend(frameon=False, fontsize=8, loc="lower left")


def _end_to_end(axes: Sequence[Any], study: EndToEnd) -> None:
    for one, model in zip(axes, p.MODELS, strict=True):
        least, most = p.OVER_ROLL[model]
        one.axhspan(least, most, label="source: PEARL over ROLL", **BAND)
        for s, system in enumerate(SYSTEMS):
            found = [study.multiple(model, i, system) for i in range(3)]
            one.bar([i + 0.16 * (s - 2) for i in range(3)], [e.mean for e in found], 0.15, color=COLOURS[system],
                    yerr=[[e.mean - e.lo for e in found], [e.hi - e.mean for e in found]], label=NAMES[system],
                    error_kw={"linewidth": 0.8})  # fmt: skip
        for i in range(3):
            gain = study.gain((model, i, "pearl-paper"), (model, i, "rlboost+")).mean
            mine = study.gain((model, i, "pearl"), (model, i, "rlboost+")).mean
            top = max(study.multiple(model, i, system).hi for system in ("pearl-paper", "pearl"))
            told = p.OVER_RLBOOST[model][i]
            for line, (value, system) in enumerate(((gain, "pearl-paper"), (mine, "pearl"), (told, ""))):
                one.text(i + 0.24, top + 0.05 + 0.12 * line, f"{value:+.1f} %", ha="center", fontsize=8,
                         color=COLOURS.get(system, "black"))  # fmt: skip
        one.set(title=f"Figure 5: {TITLES[model]}", ylabel="throughput over ROLL", xticks=range(3))
        one.set_xticklabels([f"segment {i + 1}" for i in range(3)])
        one.set_ylim(0, most + 0.2)
        one.set_xlabel("numbers: over RLBoost+; black: PEARL in the source", fontsize=8)
    _legend_below(axes[0], 3)


def _ablation(axes: Sequence[Any], study: Ablation) -> None:
    sizes = study.plan.gpus
    shown = (*STAGES, "pearl")
    for one, model in zip(axes, p.MODELS, strict=True):
        for s, policy in enumerate(shown):
            found = [study.over_roll(model, gpus, policy) for gpus in sizes]
            at = [i + 0.2 * (s - 1.5) for i in range(len(sizes))]
            one.bar(at, [e.mean for e in found], 0.18, color=COLOURS[policy], label=NAMES[policy],
                    yerr=[[e.mean - e.lo for e in found], [e.hi - e.mean for e in found]],
                    error_kw={"linewidth": 0.8})  # fmt: skip
            if s == len(STAGES):
                continue
            least, most = p.ABLATION_FROM_8[model][s]
            for x, gpus in zip(at, sizes, strict=True):
                if gpus == 4:
                    one.plot(x, p.ABLATION_AT_4[model][s], "D", markersize=5, **SOURCE)
                else:
                    one.plot([x, x], [least, most], linewidth=3, alpha=0.75, solid_capstyle="butt", **SOURCE)
        one.plot([], [], "D", markersize=5, label="source", **SOURCE)
        one.plot([], [], linewidth=3, alpha=0.75, label="source, range over 8 to 16", **SOURCE)
        one.axhline(0, color="black", linewidth=0.7)
        one.set(title=f"Figure 7: {TITLES[model]}", ylabel="% over ROLL", xticks=range(len(sizes)))
        one.set_xticklabels([f"{gpus} GPUs" for gpus in sizes])
    _legend_below(axes[0], 3)


def _sensitivity(axes: Sequence[Any], study: Sensitivity) -> None:
    rate, batch_gain, length_gain = axes
    batches, lengths = study.plan.batches, study.plan.lengths
    middle = min(batches, key=lambda batch: abs(batch - 64))
    base = sum(study.column("batch", middle, "rlboost+"))
    for policy in SWEPT:
        over = [sum(study.column("batch", batch, policy)) / base for batch in batches]
        rate.plot(batches, over, "o-", color=COLOURS[policy], label=NAMES[policy])
    for system, batch in p.PEAK_BATCH.items():
        colour = COLOURS["rlboost+" if system == "rlboost+" else "pearl-paper"]
        name = {"rlboost+": "RLBoost+", "pearl": "PEARL"}[system]
        rate.axvline(batch, linestyle="--", linewidth=1, color=colour, label=f"source: {name} peaks")
    rate.set(title="Figure 8: throughput by batch, Qwen3-8B, 8 GPUs", xlabel="batch", ylim=(0, None),
             ylabel=f"over RLBoost+ at {middle}", xticks=batches)  # fmt: skip
    for one, what, values, told in (
        (batch_gain, "batch", batches, p.BATCH_GAIN),
        (length_gain, "length", lengths, p.LENGTH_GAIN),
    ):
        one.axhspan(*told, label="source, least to most", **BAND)
        for policy in SWEPT[1:]:
            found = [study.gain((what, value, policy), (what, value, "rlboost+")) for value in values]
            one.errorbar(values, [e.mean for e in found], [_error(e)[0][0] for e in found], fmt="o-", capsize=3,
                         color=COLOURS[policy], label=NAMES[policy])  # fmt: skip
        one.axhline(0, color="black", linewidth=0.7)
        one.set(title=f"Figure 8: over RLBoost+ by {what}", xlabel=what, ylabel="%", xticks=values)
    for one in axes:
        one.legend(frameon=False, fontsize=8)


def _ratios(axes: Sequence[Any], study: Ratios) -> None:
    """A row of the source's table each: how much slower than the best ratio each ratio is."""
    for one, gpus in zip(axes, (10, 12, 16), strict=True):
        for overlap, colour in ((False, COLOURS["rlboost+"]), (True, COLOURS["pearl-paper"])):
            if (gpus, overlap) not in study.plan.ratios:
                continue
            workers = gpus // 2 + 8 * overlap
            lost = [study.regret(workers, ratio).mean for ratio in ratios(workers)]
            share = [(i + 1) / workers for i in range(workers - 1)]
            label = f"{workers} workers{', overlap' if overlap else ''}"
            one.plot(share, lost, "o-", markersize=3, color=colour, label=label)
            selected, best = (int(text.split("P")[0]) for text in p.RATIOS[gpus, overlap])
            one.plot(best / workers, lost[best - 1], "D", label=None, **SOURCE)
            one.annotate(p.RATIOS[gpus, overlap][1], (best / workers, lost[best - 1]), (0, -13 if overlap else 7),
                         fontsize=8, ha="center", textcoords="offset points")  # fmt: skip
            if selected != best:
                one.plot(selected / workers, lost[selected - 1], "D", fillstyle="none", **SOURCE)
        one.plot([], [], "D", label="the source's best (open: selected)", **SOURCE)
        one.set(title=f"Table 2: {gpus} GPUs", xlabel="share of prefill workers", ylabel="% slower than the best ratio",
                ylim=(-4, 45), xlim=(0, 1))  # fmt: skip
        one.legend(frameon=False, fontsize=8)


def _reconfiguration(axes: Sequence[Any], cells: list[dict[str, Any]]) -> None:
    for one, model in zip(axes, p.MODELS, strict=True):
        rows = [cell for cell in cells if cell["figure"] == "Table 3" and cell["model"] == model]
        at = range(len(rows))
        one.bar(
            [x - 0.2 for x in at], [cell["published"] for cell in rows], 0.38, color="black", alpha=0.6, label="source"
        )
        one.bar(
            [x + 0.2 for x in at], [cell["ours"] for cell in rows], 0.38, color=COLOURS["pearl-paper"], label="ours"
        )
        one.set(title=f"Table 3: {TITLES[model]}", ylabel="s", xticks=at)
        one.set_xticklabels([cell["name"].replace(", ", ",\n") for cell in rows], fontsize=8)
        one.legend(frameon=False, fontsize=8)


def _beyond(axes: Sequence[Any], studies: Studies, result: dict[str, Any]) -> None:
    gains = sorted(studies.beyond.gains_by_environment())
    drawn, dollars = axes
    drawn.bar(range(len(gains)), gains, color=[COLOURS["pearl" if gain >= 0 else "pearl-paper"] for gain in gains])
    drawn.axhline(0, color="black", linewidth=0.7)
    drawn.set(
        title=f"pearl over pearl-paper in {len(gains)} drawn environments", ylabel="%", xlabel="environments, sorted"
    )
    worth = result["series"]["end_to_end"]["tokens_per_dollar_over_roll"]
    labels = [f"{TITLES[model][6:]}\nsegment {i + 1}" for model in p.MODELS for i in range(3)]
    for s, system in enumerate(SYSTEMS):
        values = [worth[f"{model}/{i}/{system}"] for model in p.MODELS for i in range(3)]
        dollars.bar([x + 0.16 * (s - 2) for x in range(6)], values, 0.15, color=COLOURS[system], label=NAMES[system])
    dollars.set(title="tokens per dollar over ROLL (a preemptible GPU at 35 % of the price)", xticks=range(6))
    dollars.set_xticklabels(labels, fontsize=8)
    _legend_below(dollars, 5)
