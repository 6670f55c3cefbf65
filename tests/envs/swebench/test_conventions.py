from pathlib import Path

import pytest

from envs.swebench.conventions import parse, prompt
from envs.swebench.record import Recipe
from tests.envs.swebench.conftest import record


@pytest.mark.parametrize(
    ("response", "command"),
    [
        ("I look.\n```bash\nls -la\n```", "ls -la"),
        ("```\n$ ls\n```\nThat shows it.", "ls"),
        ("```sh\ncat <<'E' > a\nx\nE\n```", "cat <<'E' > a\nx\nE"),
        ("<think>\n```bash\nrm -rf /\n```\n</think>\n```bash\nls\n```", "ls"),
        ("```python\nprint(1)\n```\n```bash\nls\n```", "ls"),
        ("```bash\nls", "ls"),
    ],
)
def test_one_command_in_one_block(response: str, command: str) -> None:
    assert parse(response).command == command


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        ("ls", "none"),
        ("```bash\nls\n```\n```bash\npwd\n```", "2 of them"),
        ("```bash\n\n```", "empty"),
        ("```python\nprint(1)\n```", "none"),
    ],
)
def test_anything_else_is_answered_with_what_is_wrong(response: str, fault: str) -> None:
    action = parse(response)
    assert action.command is None and not action.submit and fault in action.fault


@pytest.mark.parametrize("command", ["submit", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"])
def test_both_ways_to_submit(command: str) -> None:
    assert parse(f"Done.\n```bash\n{command}\n```").submit
    assert not parse(f"```bash\n{command} now\n```").submit


def test_the_prompt_shows_the_problem_and_not_which_tests_judge(tmp_path: Path) -> None:
    made = record(tmp_path, problem_statement="x" * 5000)
    assert made.build is not None
    recipe = Recipe(
        sdist="a==1", test_cmd=("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_a.py")
    )
    system, user = prompt(made, recipe, 1000)
    assert "python -m pytest -rA -p no:cacheprovider`" in user.content and "test_a" not in user.content
    assert "4000 characters cut" in user.content and "/testbed" in user.content and "submit" in user.content
    assert system.role == "system"
