"""What a driver starts from when it resumes: the journal, as of the newest checkpoint that is whole."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.restore import Replay
from pearl.live.journal import Tokens, read_journal
from pearl.live.run_directory import RunDirectory
from trainer.checkpoint import is_complete


@dataclass(frozen=True, slots=True)
class Resume:
    replay: Replay
    tokens: Tokens
    step: int
    """Checkpoint that the trainer goes back to; 0 is the initial model."""
    tokens_generated: int


def load_resume(directory: RunDirectory) -> Resume:
    """Read the journal (a torn tail is cut off) and choose the checkpoint."""
    records = read_journal(directory.journal, repair=True)
    replay = Replay().read(records)
    whole = [s for s in replay.checkpoints if is_complete(directory.checkpoints, f"step-{s}")]
    generated = sum(len(record["token_ids"]) for record in records if record["kind"] == "turn")
    return Resume(replay, Tokens(records), max(whole, default=0), generated)
