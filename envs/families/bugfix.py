"""The family `bugfix`: mend one line of a tiny repository, judged by tests that the agent cannot reach.

Only the module that holds the bug is taken from the agent's workspace. It goes into a fresh sandbox with clean files,
where a script evaluates expressions, some of which no test in the repository has. The expected values never enter that
sandbox: they are compared outside, so that no code of the agent's that runs there can know them, or report for them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from envs.families.bugs import BugTask, make_bugs, sed
from envs.families.shell import ShellEnvironment
from envs.protocol import Message, Score, Task
from envs.sandbox.protocol import Entry, SandboxBackend
from pearl.config.environment import EnvironmentConfig, SandboxConfig

SYSTEM = Message("system", "Fix each bug with one short shell command in a ```sh block.")
DEMONSTRATIONS = (
    ("ops.py", "def minus(a, b):\n    return a * b\n", "minus(5, 2)", "3", "a * b", "a - b"),
    ("text.py", "def tail(text):\n    return text[:1]\n", "tail('abc')", "'bc'", "[:1]", "[1:]"),
)
MAX_MODULE_BYTES = 64 << 10
GRADE_S = 15.0
"""Wall time of all cases, for code that sleeps. Busy code is stopped by CPU time, the same on a loaded machine."""
EVALUATE = """
import importlib, json, signal, sys
sys.path.insert(0, ".")
mark, name, cases = {mark!r}, {name!r}, {cases!r}
say = sys.stdout.write
def late(*_): raise TimeoutError
signal.signal(signal.SIGPROF, late)
signal.setitimer(signal.ITIMER_PROF, 1.0)
space = vars(importlib.import_module(name))
for number, case in enumerate(cases):
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    try:
        value = repr(eval(case, space))[:1000]
    except BaseException as error:
        value = type(error).__name__ + "!"
    say("\\n%s %s\\n" % (mark, json.dumps([number, value])))
    sys.stdout.flush()
"""


class BugfixFamily:
    """`environment.tasks` tasks made from `environment.seed`; those beyond the number of bugs differ in names only."""

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        self._made = make_bugs(config.seed, config.tasks)
        self._backend = backend
        self._limits = config.sandbox
        self.tasks: Sequence[Task] = [
            Task(made.name, "bugfix", made.bug.kind, request(made.module, "", *made.bug.cases[0]).lstrip())
            for made in self._made
        ]

    def open(self, index: int) -> BugfixEnvironment:
        return BugfixEnvironment(self.tasks[index], self._made[index], self._backend, self._limits)

    def solution(self, index: int) -> str:
        return self._made[index].solution


class BugfixEnvironment(ShellEnvironment):
    def __init__(self, task: Task, made: BugTask, backend: SandboxBackend, limits: SandboxConfig) -> None:
        super().__init__(task, made.files, prompt(made), backend, limits)
        self._made = made

    async def grade(self, workspace: Mapping[str, Entry], timeout_s: float) -> Score:
        """The share of the failing cases that pass now; each one that passed and fails now takes one away."""
        total = len(self._made.bug.cases)
        module = workspace.get(self._made.module, Entry("other"))
        before = self._made.bug.passing
        if module.kind != "file" or len(module.data) > MAX_MODULE_BYTES:
            passed = 0
        elif module.data == self._made.module_source:
            passed = before
        else:
            passed = await self._passing(module.data, timeout_s)
        return Score(max(0.0, (passed - before) / (total - before)), {"passed": float(passed), "cases": float(total)})

    async def _passing(self, source: bytes, timeout_s: float) -> int:
        cases = self._made.bug.cases
        mark = secrets.token_hex(8)
        name = self._made.module.removesuffix(".py")
        script = EVALUATE.format(mark=mark, name=name, cases=[case for case, _ in cases])
        sandbox = await self._backend.create({self._made.module: source})
        try:
            result = await sandbox.exec(
                f"exec {self._backend.python} -I -S -B - 2>/dev/null",
                timeout_s=min(0.8 * timeout_s, GRADE_S),
                stdin=script.encode(),
            )
        finally:
            await sandbox.close()
        said: dict[int, str] = {}
        for line in result.output.splitlines():
            if line.startswith(mark + " "):
                number, value = json.loads(line.removeprefix(mark + " "))
                said.setdefault(number, value)
        return sum(said.get(number) == value for number, (_, value) in enumerate(cases))


def prompt(made: BugTask) -> tuple[Message, ...]:
    shown = [
        message
        for path, source, case, value, wrong, right in DEMONSTRATIONS
        for message in (
            Message("user", request(path, source, case, value)),
            Message("assistant", f"```sh\n{sed(wrong, right, path)}\n```"),
        )
    ]
    return (SYSTEM, *shown, Message("user", request(made.module, made.bug.source, *made.bug.cases[0])))


def request(path: str, source: str, case: str, value: str) -> str:
    code = f"{path}:\n{source}" if source else ""
    return f"{code}{case} should be {value}. Fix {path}."
