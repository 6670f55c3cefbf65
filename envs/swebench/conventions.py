"""What SWE agents are used to: the prompt, one bash command a turn in a fence, a command that submits."""

from __future__ import annotations

import re

from envs.action import Action
from envs.protocol import Message
from envs.swebench.builder import WORKSPACE
from envs.swebench.record import Recipe, TaskRecord

SUBMIT = ("submit", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_LANGUAGES = frozenset({"", "bash", "sh", "shell", "console"})
SYSTEM = Message(
    "system",
    "You repair software by shell commands. Each of your answers says briefly what you think and then gives exactly "
    "one command in one ```bash block. You see its output before your next answer.",
)
TASK = """The repository in {workspace} has this problem:

<problem>
{problem}
</problem>

Change the source code so that it is solved. Tests, and files that say how tests run, are restored before your work is \
judged, so do not change them. Every command starts anew in {workspace}: `cd` and variables do not last; there is no \
network. The tests run with `{tests}`.

When you are done, answer with the command `submit`, alone in its block."""


def parse(response: str) -> Action:
    """Exactly one block of shell code, wherever it stands after the model's thoughts; an unclosed one counts."""
    blocks = [found[2] for found in _FENCE.finditer(response.rpartition("</think>")[2]) if found[1] in _LANGUAGES]
    if len(blocks) != 1:
        found = f"{len(blocks)} of them" if blocks else "none"
        return Action(None, fault=f"Give exactly one command in one ```bash block; your answer has {found}.")
    command = "\n".join(row.removeprefix("$ ") for row in blocks[0].strip().splitlines())
    if not command:
        return Action(None, fault="The ```bash block is empty. Give one command in it.")
    return Action(command, submit=command in SUBMIT)


def prompt(record: TaskRecord, recipe: Recipe, problem_chars: int) -> tuple[Message, ...]:
    problem = record.problem_statement.strip()
    if len(problem) > problem_chars:
        half = problem_chars // 2
        problem = f"{problem[:half]}\n[... {len(problem) - 2 * half} characters cut ...]\n{problem[-half:]}"
    words = [word if re.fullmatch(r"[\w./:=+-]+", word) else f"'{word}'" for word in _shown(recipe.test_cmd)]
    return (SYSTEM, Message("user", TASK.format(workspace=WORKSPACE, problem=problem, tests=" ".join(words))))


def _shown(test_cmd: tuple[str, ...]) -> list[str]:
    """The command without the files that it names: which tests judge is not the agent's to know."""
    return [word for word in test_cmd if word.startswith("-") or not re.search(r"[/.]", word) or "runtests" in word]
