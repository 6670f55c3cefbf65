"""Errors that a user sees as one line: what is wrong, with which value, and how to mend it."""


class UserError(Exception):
    """Bad input or a missing part of the machine; the command ends with exit code 2 and no traceback."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what = what
        self.remedy = remedy


class RunFailed(Exception):
    """A run that started could not go on; the command ends with exit code 1 and this one message."""
