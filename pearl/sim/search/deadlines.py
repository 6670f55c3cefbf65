"""Virtual seconds: how long what is asked for takes as a rule, and at most."""

from __future__ import annotations

TYPICAL_AND_DEADLINE_S: dict[str, tuple[float, float]] = {
    "StartEngine": (6.0, 60.0),
    "SyncWeights": (1.0, 15.0),
    "AbortRequests": (0.2, 4.0),
    "SwitchRole": (0.5, 8.0),
    "ReleaseEngine": (0.5, 8.0),
    "ResumeEngine": (0.7, 8.0),
    "StopEngine": (0.3, 3.0),
    "Generate": (1.0, 25.0),
    "OpenEnvironment": (0.7, 15.0),
    "ReopenEnvironment": (1.0, 15.0),
    "StepEnvironment": (0.7, 15.0),
    "ScoreTrajectory": (0.7, 15.0),
    "StartEnvironmentWorker": (2.0, 30.0),
    "RestartTrainer": (6.0, 60.0),
    "TrainBatch": (3.0, 30.0),
    "PublishSnapshot": (1.0, 15.0),
    "OffloadTrainer": (0.6, 8.0),
    "ReloadTrainer": (0.6, 8.0),
}
CHECKPOINT_S = (1.0, 15.0)
TIMER_LATE_S = 0.5
"""A timer fires at most this late."""
LATE_SHARE = 0.999
"""A late answer comes after this share of its deadline."""
EVENTS = 40_000
"""A run that takes more does not end."""
RUN_S = 20_000.0


def return_grace_s() -> float:
    """What a batch may wait for its GPUs beyond `return_deadline_s`.

    The trainer may still be writing a checkpoint or leaving, the timer is late, an engine is ended by force, the
    trainer comes back; and once more, if it came back to a part of them first.
    """
    limit = {name: deadline_s for name, (_, deadline_s) in TYPICAL_AND_DEADLINE_S.items()}
    return limit["OffloadTrainer"] + TIMER_LATE_S + limit["StopEngine"] + 2 * limit["ReloadTrainer"] + CHECKPOINT_S[1]
