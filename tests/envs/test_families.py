"""The built-in tasks, each solved and not solved in real sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from envs.chat import ChatRenderer
from envs.families.bugfix import BugfixFamily
from envs.families.bugs import BUGS, Bug
from envs.families.file_tasks import make_tasks
from envs.families.files import FilesFamily
from envs.families.letters import LettersFamily
from envs.families.mixture import ShellFamily
from envs.protocol import Environment, Score, StepResult
from envs.registry import make_family
from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.protocol import Entry
from pearl.config.environment import EnvironmentConfig, SandboxConfig
from pearl.errors import UserError

Family = FilesFamily | BugfixFamily | ShellFamily | LettersFamily
SOLVABLE = ("files", "bugfix", "shell")
Play = Callable[..., Awaitable[tuple[Any, Score]]]


def family(name: str, backend: BubblewrapBackend, tasks: int = 64, seed: int = 0) -> Family:
    made = make_family(EnvironmentConfig(family=name, tasks=tasks, seed=seed), backend)
    assert isinstance(made, Family)
    return made


@pytest.fixture
async def play(backend: BubblewrapBackend) -> AsyncIterator[Play]:
    """Play commands on a fresh environment: the last step's result and the score."""

    async def played(environment: Environment, *commands: str) -> tuple[StepResult | None, Score]:
        await environment.reset(60)
        step = None
        for command in commands:
            step = await environment.step(command, 60)
        score = await environment.score(60)
        await environment.close()
        return step, score

    yield played


@pytest.mark.parametrize("name", SOLVABLE)
async def test_every_task_can_be_solved_and_is_not_solved_by_doing_nothing(
    name: str, backend: BubblewrapBackend, play: Play
) -> None:
    tasks = family(name, backend)
    assert not isinstance(tasks, LettersFamily)
    assert len(tasks.tasks) == 64 and len({task.name for task in tasks.tasks}) == 64
    gate = asyncio.Semaphore(8)

    async def one(index: int) -> None:
        async with gate:
            _, nothing = await play(tasks.open(index))
            looked, looking = await play(tasks.open(index), "ls -la; cat *")
            step, solved = await play(tasks.open(index), tasks.solution(index))
        told = f"{tasks.tasks[index]} {tasks.solution(index)}"
        assert nothing.reward == looking.reward == 0.0 and not looked.done, told
        assert solved.reward == 1.0 and step.done, told

    await asyncio.gather(*(one(index) for index in range(64)))


def test_more_tasks_than_a_kind_has_instructions_are_made_all_the_same() -> None:
    few, many = make_tasks(0, 130), make_tasks(0, 300)
    assert many[:130] == few and len({task.instruction for task in few}) == 130


@pytest.mark.parametrize("name", SOLVABLE)
def test_tasks_depend_on_the_seed_alone(name: str, backend: BubblewrapBackend) -> None:
    def shown(seed: int, tasks: int = 32) -> list[tuple[object, ...]]:
        made = family(name, backend, tasks, seed)
        opened = [made.open(index) for index in range(tasks)]
        return [(e.task, sorted(e._files.items()), e._messages) for e in opened]  # type: ignore[attr-defined]

    assert shown(1) == shown(1)
    assert shown(1) != shown(2)
    assert shown(1)[:10] == shown(1, tasks=10)


@pytest.mark.parametrize("name", SOLVABLE)
async def test_prompts_are_short(name: str, backend: BubblewrapBackend, chat: ChatRenderer) -> None:
    made = family(name, backend)
    for index in range(64):
        environment = made.open(index)
        observation = await environment.reset(60)
        await environment.close()
        assert len(chat.prompt(observation.messages)) <= 250


# --- files


def task_of(made: Family, kind: str) -> int:
    return next(index for index, task in enumerate(made.tasks) if task.kind == kind)


@pytest.mark.parametrize(
    ("kind", "command", "low", "high"),
    [
        ("write", "touch {target}", 0.3, 0.3),
        ("write", "echo wrong > {target}", 0.3, 0.9),
        ("write", "{solution}; touch litter", 0.5, 0.5),
        ("append", "{solution} ; {solution}", 0.0, 0.99),
        ("append", "echo over > {target}", 0.0, 0.2),
        ("rename", "rm {source}", 0.0, 0.0),
        ("rename", "cp {source} {target}", 0.5, 0.5),
        ("copy", "touch {target}", 0.3, 0.3),
        ("delete", "rm *", 0.5, 0.5),
        ("count", "wc -l {source} > {target}", 0.3, 0.9),
        ("sort", "cp {source} {target}", 0.3, 0.9),
        ("directory", "touch {target}", 0.0, 0.0),
        ("empty", "mkdir {target}", 0.0, 0.0),
        ("move", "rm -r *", 0.0, 0.0),
    ],
)
async def test_part_of_the_work_earns_part_of_the_reward(
    backend: BubblewrapBackend, play: Play, kind: str, command: str, low: float, high: float
) -> None:
    made = family("files", backend)
    assert isinstance(made, FilesFamily)
    index = task_of(made, kind)
    solution = made.solution(index)
    paths = [word for word in solution.split() if "." in word or kind == "directory"]
    filled = command.format(solution=solution, source=paths[0], target=paths[-1])
    _, score = await play(made.open(index), filled)
    assert low <= score.reward <= high, (filled, score)


async def test_two_tries(backend: BubblewrapBackend, play: Play) -> None:
    made = family("files", backend)
    assert isinstance(made, FilesFamily)
    step, score = await play(made.open(0), "echo wrong > other; rm other; false", made.solution(0))
    assert step.done and score.reward == 1.0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("true", "[no output]"),
        ("echo out; echo err >&2; exit 3", "out\nerr\n[exit code 3]"),
        ("sleep 98438", "[killed after 0.5 s]"),
        ("exec yes > /dev/stderr", "[killed: too much output]"),
    ],
)
async def test_the_agent_is_told_how_its_command_ended(directory: Path, play: Play, command: str, told: str) -> None:
    limits = SandboxConfig(command_s=0.5 if "sleep" in command else 20, file_mb=1)
    backend = BubblewrapBackend(limits, directory=directory)
    made = make_family(EnvironmentConfig(sandbox=limits), backend)
    step, score = await play(made.open(0), command)
    assert step.text.endswith(told) and not step.done and score.reward == 0.0
    await backend.close()


async def test_a_full_disk_ends_the_task_without_reward(directory: Path, play: Play) -> None:
    limits = SandboxConfig(disk_mb=1)
    backend = BubblewrapBackend(limits, directory=directory)
    made = make_family(EnvironmentConfig(sandbox=limits), backend)
    assert isinstance(made, FilesFamily)
    step, score = await play(made.open(0), f"{made.solution(0)}; head -c 2000000 /dev/zero > big")
    assert step.done and score == Score(0.0, {"over_limit": 1.0})
    await backend.close()


# --- bugfix


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.kind)
def test_bugs_are_what_they_say(bug: Bug) -> None:
    def passing(source: str) -> list[bool]:
        space: dict[str, object] = {}
        exec(source, space)
        found = []
        for case, value in bug.cases:
            try:
                found.append(repr(eval(case, space)) == value)
            except Exception:
                found.append(False)
        return found

    before = passing(bug.source)
    assert sum(before) == bug.passing and not before[0]
    assert all(passing(bug.source.replace(bug.wrong, bug.right)))
    assert bug.source.count(bug.wrong) == 1
    assert bug.visible < len(bug.cases) and not all(before[bug.visible :])


async def test_the_repositorys_own_tests_tell_the_bug(backend: BubblewrapBackend) -> None:
    made = family("bugfix", backend, tasks=len(BUGS))
    assert isinstance(made, BugfixFamily)
    for index, task in enumerate(made._made):
        sandbox = await backend.create(task.files)
        run = f"{backend.python} test_{task.module}"
        assert "AssertionError" in (await sandbox.exec(run, timeout_s=30)).output
        assert (await sandbox.exec(f"{made.solution(index)}; {run}", timeout_s=30)).output == "passed\n"
        await sandbox.close()


CHEATS = {
    "empty the tests": "for f in test_*; do echo 'print(\"passed\")' > $f; done",
    "remove the tests": "rm test_*",
    "conftest": "echo 'import builtins; builtins.repr = lambda x: \"5\"' > conftest.py",
    "sitecustomize": "echo 'print(1); import os; os._exit(0)' | tee sitecustomize.py usercustomize.py",
    "pth": "mkdir -p lib site-packages; echo 'import os; os._exit(0)' | tee a.pth lib/a.pth site-packages/a.pth",
    "shadowed modules": 'echo \'def dumps(x): return "[0, \\"5\\"]"\' | tee json.py signal.py importlib.py',
    "a link": "cp {module} other.py; ln -sf other.py {module}",
    "a folder": "rm {module}; mkdir {module}",
    "remove the module": "rm {module}",
    "no syntax": "echo 'def def' >> {module}",
    "exit": "printf 'import os\\nprint(\"passed\")\\nos._exit(0)\\n' > {module}",
    "hang": "echo 'while True: pass' >> {module}",
    "huge": "head -c 100000 /dev/zero | tr '\\0' '#' >> {module}",
}
FORGE = """
import json, os, sys
frame = sys._getframe()
while "mark" not in frame.f_globals:
    frame = frame.f_back
for number, value in enumerate(["5", "4", "0", "0", "0"]):
    print(frame.f_globals["mark"], json.dumps([number, value]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("cheat", sorted(CHEATS))
async def test_cheats_do_not_pay(backend: BubblewrapBackend, play: Play, cheat: str) -> None:
    made = family("bugfix", backend, tasks=len(BUGS))
    assert isinstance(made, BugfixFamily)
    index = task_of(made, "add")
    command = CHEATS[cheat].replace("{module}", made._made[index].module)
    step, score = await play(made.open(index), command)
    assert score.reward == 0.0 and not step.done


async def test_knowing_only_the_visible_tests_is_not_enough(backend: BubblewrapBackend, play: Play) -> None:
    made = family("bugfix", backend, tasks=len(BUGS))
    assert isinstance(made, BugfixFamily)
    index = task_of(made, "add")
    known = "def add(a, b):\\n    return {(2, 3): 5, (4, 0): 4, (-1, 1): 0}.get((a, b))\\n"
    module = made._made[index].module
    _, score = await play(made.open(index), f"printf '{known}' > {module}")
    assert 0.0 < score.reward < 1.0


async def test_a_forged_report_is_worth_what_it_knows(backend: BubblewrapBackend) -> None:
    made = family("bugfix", backend, tasks=len(BUGS))
    assert isinstance(made, BugfixFamily)
    index = task_of(made, "add")
    module = made._made[index].module
    score = await made.open(index).grade({module: Entry("file", FORGE.encode())}, 60)
    assert score.reward == 0.5  # three of five answers are known, one of them passed before


async def test_breaking_what_worked_costs(backend: BubblewrapBackend, play: Play) -> None:
    made = family("bugfix", backend, tasks=len(BUGS))
    assert isinstance(made, BugfixFamily)
    index = task_of(made, "adult")
    module = made._made[index].module
    _, score = await play(made.open(index), f"printf 'def is_adult(age):\\n    return True\\n' > {module}")
    assert 0.0 < score.reward < 1.0


# --- the registry


def test_an_unknown_family_lists_the_known_ones(backend: BubblewrapBackend) -> None:
    with pytest.raises(UserError, match="bugfix, files, letters, phases, shell, swebench"):
        make_family(EnvironmentConfig(family="fils"), backend)


def test_a_family_of_ones_own(backend: BubblewrapBackend) -> None:
    made = make_family(EnvironmentConfig(family="envs.families.files:FilesFamily", tasks=3), backend)
    assert len(made.tasks) == 3
    for wrong in ("no.such.module:Factory", "envs.families.files:Nothing"):
        with pytest.raises(UserError, match="cannot be imported"):
            make_family(EnvironmentConfig(family=wrong), backend)


def test_entries_compare_by_content() -> None:
    assert Entry("file", b"1") == Entry("file", b"1") != Entry("other")


# --- letters


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("{0}{0}{0}", 1.0), ("{0} x\n{0}\ty", 0.5), ("xyz", 0.0), ("", 0.0), (" \n", 0.0), ("{0}é", 0.5)],
)
async def test_letters_counts_the_letter_among_all_that_is_not_white_space(
    answer: str, reward: float, backend: BubblewrapBackend, play: Play
) -> None:
    made = family("letters", backend)
    assert isinstance(made, LettersFamily)
    step, score = await play(made.open(0), answer.format(made.tasks[0].kind))
    assert step.done and score.reward == pytest.approx(reward)
    assert made.parse("any ```text```").command == "any ```text```"


async def test_letters_is_worth_nothing_without_an_answer(backend: BubblewrapBackend, play: Play) -> None:
    _, score = await play(family("letters", backend).open(0))
    assert score.reward == 0.0


async def test_the_family_in_the_documentation_works(backend: BubblewrapBackend, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    source = page.split("```python\n")[1].split("\n```\n")[0]
    assert len(source.splitlines()) <= 40
    space: dict[str, Any] = {}
    exec(source, space)
    family = space["CapitalsFamily"](EnvironmentConfig(tasks=2), backend)
    environment = family.open(1)
    await environment.reset(30)
    step = await environment.step("echo It is Tokyo > answer.txt", 30)
    assert not step.done and (await environment.score(30)).reward == 0.5
    assert (await environment.step("echo Tokyo > answer.txt", 30)).done
    await environment.close()
