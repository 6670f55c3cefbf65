"""`environment.swebench:` tasks of the family `swebench`: where they come from, how they are built and graded."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from pearl.config.section import Section


class SwebenchConfig(Section):
    tasks_file: str | None = None
    """The tasks: a JSONL or Parquet file, a directory of tasks, or `hf:DATASET:SPLIT`. `environment.tasks` bounds how
    many are taken, from the first on."""
    cache: str | None = None
    """Directory for repositories and virtual environments, on each environment worker's own disk. None takes
    `$PEARL_CACHE/swebench` where sandboxes can see it, else `/var/tmp/pearl-<uid>/swebench`."""
    cache_gb: float = Field(50.0, gt=0)
    """What the cache may hold, GB; what has not been used for longest is removed. What is in use stays."""
    build_s: float = Field(900.0, gt=0)
    """Building one task (download, repository, virtual environment), seconds."""
    builds: int = Field(2, ge=1)
    """Tasks that are built at once."""
    test_s: float = Field(300.0, gt=0)
    """One run of a task's tests, seconds; a longer one fails them. `deadlines.score_s` bounds it, too."""
    attempts: int = Field(2, ge=1)
    """Gradings that are tried when the machine is at fault, within `deadlines.score_s`; then the trajectory is
    masked."""
    reward: Literal["resolved", "fraction"] = "resolved"
    """`resolved`: 1 if all FAIL_TO_PASS and PASS_TO_PASS tests pass, else 0. `fraction`: the share of FAIL_TO_PASS
    that passes, times the share of PASS_TO_PASS that does."""

    problem_chars: int = Field(16_000, ge=200)
    """Characters of a problem statement that are shown (head and tail)."""

    @field_validator("tasks_file", "cache")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """Workers have working directories of their own."""
        return value if value is None or value.startswith("hf:") else str(Path(value).expanduser().absolute())
