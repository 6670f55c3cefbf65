"""From what a model wrote to the command that it meant."""

from __future__ import annotations

import re
from dataclasses import dataclass

SUBMIT = "submit"
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:(?<=\n)[ \t]*```|\Z)", re.DOTALL)
_ONE_LINE = re.compile(r"```[ \t]*(?:(?:sh|bash|shell|console)[ \t]+)?([^`\n]+?)[ \t]*```")
_LANGUAGES = frozenset({"", "sh", "bash", "shell", "console", "zsh"})


@dataclass(frozen=True, slots=True)
class Action:
    """A shell command to run, or None: the response holds none. `submit` ends the trajectory."""

    command: str | None
    submit: bool = False
    fault: str = ""
    """What is wrong with a response without a command, for the agent; a general hint if it is empty."""


def parse_action(response: str) -> Action:
    """The first fenced code block, whatever surrounds it; an unclosed one counts (the response was cut)."""
    block = _FENCE.search(response)
    line = _ONE_LINE.search(response)
    if line is not None and (block is None or line.start() <= block.start()):
        command = line[1]
    elif block is not None and block[1].lower() in _LANGUAGES:
        command = block[2]
    else:
        return Action(None)
    command = "\n".join(row.removeprefix("$ ") for row in command.strip().splitlines())
    if not command:
        return Action(None)
    return Action(command, submit=command == SUBMIT)
