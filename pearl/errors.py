"""Errors that a user sees as one line: what is wrong, with which value, and how to mend it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a missing part of the machine; the command ends with exit code 2 and no traceback."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        return UserError, (self.what, self.remedy)  # it crosses processes


class RunFailed(Exception):
    """A run that started could not go on; the command ends with exit code 1 and this one message."""
