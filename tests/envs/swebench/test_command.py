"""`pearl env` as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envs.swebench.load import load_tasks, save_tasks
from pearl.env_command import app
from pearl.errors import UserError
from tests.envs.swebench.conftest import FAILING, record


@pytest.fixture
def tasks(tmp_path: Path, source: Path) -> Path:
    bad = {"source": str(source), "python": "2.0", "test_cmd": ["x"]}
    save_tasks(
        tmp_path / "tasks.jsonl",
        [record(source, kind="swebench"), record(source, instance_id="old", build=bad)],
    )
    return tmp_path / "tasks.jsonl"


def pearl(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_list(tasks: Path) -> None:
    shown = pearl("list", tasks)
    assert shown["tasks"] == 2
    assert [row["instance_id"] for row in shown["results"]] == ["own__sums-1", "old"]


def test_build_and_validate(tasks: Path, cache: Path, tmp_path: Path) -> None:
    built = pearl("build", tasks, "--cache", cache)
    assert (built["tasks"], built["built"]) == (2, 1)
    output, logs = tmp_path / "out" / "valid.jsonl", tmp_path / "logs"
    found = pearl("validate", tasks, "--cache", cache, "--runs", 1, "--output", output, "--logs", logs)
    first, second = found.pop("results")
    assert found == {"tasks": 2, "valid": 1}
    assert isinstance(first.pop("seconds"), float) and isinstance(second.pop("seconds"), float)
    assert first == {
        "instance_id": "own__sums-1",
        "fails_before": True,
        "passes_after": True,
        "official_match": True,
        "reason": "",
    }
    assert second.pop("reason").startswith("python_unavailable: ")
    assert second == {"instance_id": "old", "fails_before": False, "passes_after": False, "official_match": None}
    [valid] = load_tasks(str(output))
    assert valid.status == "strict" and valid.official_fail_to_pass == (FAILING,) and valid.run_s
    assert FAILING in (logs / "own__sums-1.after.log").read_text()


def test_names_that_cannot_be_printed_stop_nothing(cache: Path, tmp_path: Path, source: Path) -> None:
    names = record(source, kind="swebench", repo="a[/b]\ud800", fail_to_pass=(FAILING, "\ud800"))
    save_tasks(tmp_path / "names.jsonl", [names])
    for command in (["validate", "--runs", "1", "--cache", str(cache)], ["list"]):
        result = CliRunner().invoke(app, [*command, str(tmp_path / "names.jsonl")], catch_exceptions=False)
        assert result.exit_code == 0 and "\\ud800" in result.output


def test_run_with_the_gold_patch_and_with_another(tasks: Path, cache: Path, tmp_path: Path, source: Path) -> None:
    assert pearl("run", tasks, "--gold", "--cache", cache)["reward"] == 1.0
    (tmp_path / "other.patch").write_text(record(source).patch.replace("2 * n", "4 * n"))
    assert pearl("run", tasks, "--patch", tmp_path / "other.patch", "--cache", cache)["reward"] == 0.0


def test_run_by_hand(tasks: Path, cache: Path) -> None:
    commands = "cat src/sums.py\n\nsed -i 's/n + 3/2 * n/' src/sums.py\nsubmit\n"
    result = CliRunner().invoke(app, ["run", str(tasks), "--cache", str(cache)], input=commands, catch_exceptions=False)
    assert result.exit_code == 0 and "return n + 3" in result.stdout and "reward 1, resolved 1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["validate", "TASKS", "--only", "nobody"], "nobody"),
        (["list", "/nonexistent.jsonl"], "do not exist"),
        (["run", "TASKS", "--id", "old", "--gold"], "python"),
        (["run", "TASKS", "--patch", "/nonexistent"], "cannot be read"),
        (["validate", "TASKS", "--output", "/proc/none/valid.jsonl"], "/proc/none/valid.jsonl cannot be written"),
        (["validate", "TASKS", "--logs", "/dev/null/logs"], "/dev/null/logs cannot be made"),
        (["mutate", "itsdangerous", "--output", "tasks.jsonl"], "'itsdangerous' is not of the form"),
        (["mutate", "itsdangerous==2.1.2", "--python", "3", "--output", "tasks.jsonl"], "'3' is not of the form"),
    ],
)
def test_bad_input_is_one_clear_error(tasks: Path, cache: Path, arguments: list[str], named: str) -> None:
    given = [str(tasks) if word == "TASKS" else word for word in arguments]
    with pytest.raises(UserError, match=f"(?i){named}"):
        CliRunner().invoke(app, given, catch_exceptions=False)
