"""How much of its prefix a turn finds in the engine's cache, in a live run's `events.jsonl`.

python -m pearl.paper.hits RUN_DIR
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def prefix_hits(events: Path) -> dict[str, Any]:
    """Share of the context in front of a turn's new tokens that was cached, by where the turn went; the first turns,
    which have none, and turns that an interruption cut in two are left out."""
    asked: dict[str, tuple[str, int]] = {}
    place: dict[str, tuple[str, int]] = {}
    context: dict[str, int] = {}
    cut: set[str] = set()
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    all_prompts = all_cached = 0
    for line in events.read_text().splitlines():
        e = json.loads(line)
        trajectory = e.get("trajectory")
        if e["kind"] == "Generate":
            asked[trajectory] = (e.get("prefill_worker") or e["worker"], e["version"])
        elif e["kind"] == "TurnGenerated" and (told := e.get("telemetry")) and told["cached_tokens"] >= 0:
            all_prompts += told["prompt_tokens"]
            all_cached += told["cached_tokens"]
            before, at = place.get(trajectory), asked[trajectory]
            if before and trajectory not in cut and context[trajectory]:
                where = "same worker" if before[0] == at[0] else "another worker"
                row = found[f"{where}, {'same' if before[1] == at[1] else 'new'} weights"]
                row[0] += 1
                row[1] += min(told["cached_tokens"], context[trajectory])
                row[2] += context[trajectory]
            place[trajectory] = at
            context[trajectory] = told["prompt_tokens"] + e["tokens"]
            (cut.discard if e["finish"] in ("stop", "length") else cut.add)(trajectory)
    return {
        "cached_share_of_prompts": round(all_cached / all_prompts, 4),
        "turns": {name: row[0] for name, row in sorted(found.items())},
        "found_share_of_prefix": {name: round(row[1] / row[2], 4) for name, row in sorted(found.items())},
    }


if __name__ == "__main__":
    print(json.dumps(prefix_hits(Path(sys.argv[1]) / "events.jsonl"), indent=1))
