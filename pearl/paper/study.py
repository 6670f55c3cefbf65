"""All of it: every study's jobs played, the cells, the summary, the files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.paper.beyond import Beyond
from pearl.paper.cell import Cell, Study
from pearl.paper.end_to_end import EndToEnd
from pearl.paper.fixed_gpus import Ablation, Sensitivity
from pearl.paper.layouts import Motivation, Pairs, Ratios
from pearl.paper.plan import Plan
from pearl.paper.report import aims, markdown, summary
from pearl.paper.runner import Kept, play_all

KEPT = "jobs.jsonl"
RESULT = "paper.json"
TABLE = "table.md"


@dataclass
class Studies:
    """The order is that of the table."""

    motivation: Motivation
    pairs: Pairs
    end_to_end: EndToEnd
    ablation: Ablation
    sensitivity: Sensitivity
    ratios: Ratios
    beyond: Beyond

    @classmethod
    def of(cls, plan: Plan) -> Studies:
        return cls(
            Motivation(plan), Pairs(plan), EndToEnd(plan), Ablation(plan), Sensitivity(plan), Ratios(plan), Beyond(plan)
        )

    @property
    def all(self) -> dict[str, Study]:
        return dict(vars(self))

    def play(self, kept: Kept, processes: int, until_s: float, progress: Callable[[int, int], None]) -> bool:
        """Whether all is played."""
        jobs = [job for study in self.all.values() for several in study.jobs.values() for job in several]
        played = play_all(jobs, kept, processes, until_s, progress)
        for study in self.all.values():
            study.played = played or {}
        return played is not None

    def cells(self) -> list[Cell]:
        """By figure, in the order in which these come up."""
        cells = [cell for study in self.all.values() for cell in study.cells()]
        figures = list(dict.fromkeys(cell.figure for cell in cells))
        return sorted(cells, key=lambda cell: figures.index(cell.figure))

    def gains_on_fixed_gpus(self) -> list[float]:
        """`pearl` over `pearl-paper`, per cent, in every place of figures 7 and 8."""
        return [
            study.gain((*key[:-1], "pearl"), key).mean
            for study in (self.ablation, self.sensitivity)
            for key in study.jobs
            if key[-1] == "pearl-paper"
        ]

    def result(self) -> dict[str, Any]:
        cells = self.cells()
        return {
            "seeds": {name: max(map(len, study.jobs.values())) for name, study in self.all.items()},
            "summary": summary(cells),
            "aims": aims(self.end_to_end, self.beyond, self.gains_on_fixed_gpus()),
            "cells": [cell.as_dict() for cell in cells],
            "series": {name: study.series() for name, study in self.all.items()},
        }


def write(studies: Studies, result: dict[str, Any], folder: Path) -> None:
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (folder / TABLE).write_text(markdown(studies.cells()))


def deadline(limit_s: float | None) -> float:
    return time.monotonic() + limit_s if limit_s else float("inf")
