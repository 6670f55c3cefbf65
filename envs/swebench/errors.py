"""Why a task cannot be built or tried; `reason` is one word for tables, the text says the rest."""

from __future__ import annotations


class TaskError(Exception):
    """A task is not usable here. Not an agent's doing, and nothing that another attempt would mend."""

    reason = "task_error"


class PythonUnavailable(TaskError):
    reason = "python_unavailable"


class NoRecipe(TaskError):
    """The record does not say how to build it, or says so in a way that no backend here can follow."""

    reason = "no_recipe"


class BuildFailed(TaskError):
    reason = "build_failed"


class BuildTimeout(BuildFailed):
    reason = "build_timeout"


class PatchDoesNotApply(TaskError):
    reason = "patch_does_not_apply"
