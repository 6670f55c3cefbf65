"""`deadlines:` every wait of the system has one; all in seconds."""

from pydantic import Field

from pearl.config.section import Section


class DeadlinesConfig(Section):
    worker_start_s: float = Field(120.0, gt=0)
    """A worker process starts and registers with the Dask scheduler."""
    engine_start_s: float = Field(600.0, gt=0)
    """An SGLang server starts and answers."""
    trainer_start_s: float = Field(600.0, gt=0)
    """All trainer ranks load the model and form their group."""
    generate_s: float = Field(600.0, gt=0)
    """One generate request, from dispatch to its last token."""
    abort_s: float = Field(60.0, gt=0)
    """An engine acknowledges an abort."""
    sync_s: float = Field(300.0, gt=0)
    """An engine loads and verifies one snapshot."""
    engine_stop_s: float = Field(10.0, gt=0)
    """An engine whose slot leaves ends in good order; then its process is killed."""
    memory_s: float = Field(60.0, gt=0)
    """An engine gives its device memory back, or takes it again."""
    role_switch_s: float = Field(120.0, gt=0)
    """An engine changes its role and proves it. Where `pearl doctor` says that this takes a restart: the restart."""
    offload_s: float = Field(120.0, gt=0)
    """All trainer ranks move their states off their GPUs, or back."""
    environment_build_s: float = Field(600.0, gt=0)
    """An environment worker builds what all tasks need (family `swebench`: repositories and virtual environments,
    unless `pearl env build` has made them)."""
    environment_start_s: float = Field(60.0, gt=0)
    """An environment is set up and shows its first prompt."""
    environment_step_s: float = Field(60.0, gt=0)
    """One action of an agent."""
    score_s: float = Field(60.0, gt=0)
    """Scoring of a stopped trajectory."""
    train_s: float = Field(1800.0, gt=0)
    """One optimizer step."""
    publish_s: float = Field(300.0, gt=0)
    """Export of one snapshot."""
    checkpoint_s: float = Field(600.0, gt=0)
    """One checkpoint written."""
    shutdown_s: float = Field(60.0, gt=0)
    """Clean end of all processes, after which they are killed."""
    no_progress_s: float = Field(900.0, gt=0)
    """The watchdog ends a run in which nothing happened for this long, and says who waits for whom."""
