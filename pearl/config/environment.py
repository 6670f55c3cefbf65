"""`environment:` which tasks are played, where, and for how long."""

from typing import Any, Literal

from pydantic import Field

from pearl.config.section import Section
from pearl.config.swebench import SwebenchConfig


class SandboxConfig(Section):
    backend: Literal["bubblewrap", "podman", "docker", "swerex", "process"] = "bubblewrap"
    """How commands are isolated: namespaces of this machine's own system, containers, sandboxes elsewhere, or not at
    all (`process`)."""
    unsafe: bool = False
    """Allow `process`, under which a model's commands can do whatever you can."""
    image: str | None = None
    """Container image of sandboxes whose task has none of its own, with bash, coreutils and Python; for `podman` and
    `docker`."""
    deployment: dict[str, Any] | None = None
    """For `swerex`: where sandboxes run, as SWE-ReX says it, `{type: modal, image: python:3.11}`."""
    memory_mb: int = Field(512, ge=16)
    """Memory of all processes of a sandbox together, MB; under `bubblewrap` also the address space of each."""
    processes: int = Field(64, ge=4)
    """Processes and threads at once."""
    command_s: float = Field(10.0, gt=0)
    """Wall time of one command; a longer one is killed with all that it started, and the agent is told."""
    cpu_s: int = Field(30, ge=1)
    """CPU seconds of one process of a command."""
    file_mb: int = Field(16, ge=1)
    """Largest file that a command may write, MB."""
    disk_mb: int = Field(64, ge=1)
    """All that a trajectory's commands may leave in its writable layer, MB."""
    output_chars: int = Field(4000, ge=100)
    """Characters of a command's output that are kept (head and tail)."""
    directory: str | None = None
    """Where writable layers lie, on each environment worker's own disk; not a network file system, not an overlay.
    None takes `$XDG_RUNTIME_DIR/pearl` where it can be used, else `/tmp/pearl-<uid>`."""


class EnvironmentConfig(Section):
    family: str = "files"
    """Built-in task family (`files`, `bugfix`, `shell`, `letters`, `phases`, `swebench`), or your own as
    "package.module:Factory"."""
    tasks: int = Field(64, ge=1)
    """Number of tasks made from the seed."""
    seed: int = 0
    """Seed of the task generator (the run's seed only sets the order)."""
    max_turns: int = Field(2, ge=1)
    """Turns of one trajectory."""
    workers: int = Field(1, ge=1)
    """EnvironmentWorker actors; each holds many sandboxes."""
    sandboxes_per_worker: int = Field(32, ge=1)
    """Open sandboxes of one environment worker."""
    observation_tokens: int = Field(128, ge=8)
    """Tokens of one observation; longer ones are cut in the middle before they are tokenised."""
    sandbox: SandboxConfig = SandboxConfig()
    swebench: SwebenchConfig = SwebenchConfig()
