"""The official grader's verdicts on logs; runs in an interpreter that has swebench, and imports nothing of PEARL."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path


def as_printed(name: str, log: str) -> str:
    """Since Python 3.11 unittest repeats the method's name; the parser takes names as they are printed."""
    match = re.match(r"(\w+) \(((?:\w+\.)+\w+)\)", name)
    if match is None or name in log:
        return name
    return f"{match[1]} ({match[2]}.{match[1]}){name[match.end() :]}"


def main() -> None:
    """Standard input: a list of {task, cheat, log, repo, parser, fail_to_pass, pass_to_pass}. Standard output: JSON."""
    from swebench.harness.grading import get_eval_report  # type: ignore[import-not-found]
    from swebench.types import TestSpec  # type: ignore[import-not-found]

    verdicts = []
    for job in json.load(sys.stdin):
        log = Path(job["log"]).read_text()
        spec = TestSpec(
            instance_id=job["task"],
            image="",
            eval_script_list=[],
            repo=job["repo"],
            version="",
            FAIL_TO_PASS=[as_printed(name, log) for name in job["fail_to_pass"]],
            PASS_TO_PASS=[as_printed(name, log) for name in job["pass_to_pass"]],
            log_parser=job["parser"],
            eval_type="pass_and_fail",
        )
        prediction = {"instance_id": job["task"], "model_patch": "x"}
        report = get_eval_report(spec, prediction, job["log"], False)[job["task"]]
        verdicts.append({"task": job["task"], "cheat": job["cheat"], "resolved": report["resolved"]})
    json.dump({"version": version("swebench"), "verdicts": verdicts}, sys.stdout)


if __name__ == "__main__":
    main()
