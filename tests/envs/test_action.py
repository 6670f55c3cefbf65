import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.action import Action, parse_action


@pytest.mark.parametrize(
    ("response", "command"),
    [
        ("```sh\nls -l\n```", "ls -l"),
        ("```bash\nls -l\n```", "ls -l"),
        ("```\nls -l\n```", "ls -l"),
        ("``` sh \n  ls -l  \n```", "ls -l"),
        ("First I look:\n```sh\nls\n```\nthen\n```sh\nrm -r x\n```", "ls"),
        ("```sh\n$ ls\n$ pwd\n```", "ls\npwd"),
        ("```sh\nls", "ls"),
        ("```sh\nls\n  ``` ", "ls"),
        ("```ls -l```", "ls -l"),
        ("```sh ls -l```", "ls -l"),
        ("```sh\ncat <<E\n`x`\nE\n```", "cat <<E\n`x`\nE"),
    ],
)
def test_the_first_block_is_the_command(response: str, command: str) -> None:
    assert parse_action(response) == Action(command)


@pytest.mark.parametrize(
    "response",
    ["", "ls -l", "`ls`", "```", "```sh", "```sh\n```", "```sh\n\n```", "```python\nprint(1)\n```", "``````"],
)
def test_other_responses_have_none(response: str) -> None:
    assert parse_action(response) == Action(None)


def test_submit_ends() -> None:
    assert parse_action("```sh\nsubmit\n```").submit
    assert not parse_action("```sh\necho submit\n```").submit


@given(st.text(alphabet="`sh\n $a", max_size=60))
def test_any_response_is_parsed(response: str) -> None:
    action = parse_action(response)
    assert action.command is None or action.command.strip()
