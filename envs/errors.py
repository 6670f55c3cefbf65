"""The one error that is not the agent's doing."""


class InfrastructureError(Exception):
    """An environment could not do its work: a sandbox did not start, a deadline of the caller passed.

    Never a reward of 0: the trajectory is attempted again elsewhere. Whatever a command does inside its sandbox (exit
    codes, time-outs, full disks) is the task's own affair and is told to the agent instead.
    """
