"""A set of tasks from elsewhere: each bad row has one clear reason, and the others are read all the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from envs.swebench.load import BadRow, load_tasks, read_tasks
from envs.swebench.record import TaskRecord
from pearl.errors import UserError
from tests.envs.swebench.conftest import write_jsonl
from tests.envs.swebench.test_record import ROW


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({name: value for name, value in ROW.items() if name != "patch"}, "patch: is missing"),
        ({**ROW, "instance_id": None}, "instance_id: is missing"),
        ({**ROW, "FAIL_TO_PASS": "['a']"}, "FAIL_TO_PASS: neither a list nor a JSON list"),
        ({**ROW, "FAIL_TO_PASS": [7]}, "FAIL_TO_PASS.0: Input should be a valid string, not 7"),
        ({**ROW, "FAIL_TO_PASS": {"a": 1}}, "FAIL_TO_PASS: Input should be a list"),
        ({**ROW, "sdist": "flask==2.2", "test_cmd": "pytest", "python": 3.9}, "build.python"),
        ({**ROW, "sdist": "flask==2.2", "test_cmd": ["a\0b"]}, "build: a command or requirement holds a NUL"),
        ({**ROW, "problem_statement": "\ud800"}, "half a surrogate pair"),
        ({**ROW, "patch": str(ROW["patch"]).replace("src", ".git/hooks")}, "the patch changes '.git/hooks/a.py'"),
        ({**ROW, "patch": str(ROW["patch"]).replace("src", "s\0c")}, "the patch changes"),
        ({**ROW, "format": 1, "colour": "red"}, "colour: is no field of a task"),
        ({"a": 1}, "instance_id: is missing; repo: is missing; problem_statement: is missing; 1 more"),
        (None, "not an object"),
        ("words", "not an object"),
    ],
)
def test_a_bad_row_has_a_reason_and_does_not_stop_the_others(tmp_path: Path, row: object, told: str) -> None:
    first, bad, last = read_tasks(str(write_jsonl(tmp_path / "t.jsonl", [ROW, row, {**ROW, "instance_id": "last"}])))
    assert isinstance(first, TaskRecord) and isinstance(last, TaskRecord)
    assert isinstance(bad, BadRow) and "line 2" in str(bad) and told in bad.fault


def test_a_line_that_is_no_json_and_a_name_that_occurs_twice(tmp_path: Path) -> None:
    line = json.dumps(ROW)
    (tmp_path / "t.jsonl").write_text(f"\ufeff{line}\r\n{{broken\r\n\r\n{line}\r\n")
    first, broken, twice = read_tasks(str(tmp_path / "t.jsonl"))
    assert isinstance(first, TaskRecord)
    assert isinstance(broken, BadRow) and "line 2: not JSON" in str(broken)
    assert isinstance(twice, BadRow) and "line 4" in str(twice) and "twice" in twice.fault
    with pytest.raises(UserError, match=r"line 2: not JSON.*1 more such"):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_separators_that_json_allows_do_not_end_a_line(tmp_path: Path) -> None:
    row = {**ROW, "problem_statement": "one\u2028two\x85three"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    [task] = load_tasks(str(tmp_path / "t.jsonl"))
    assert task.problem_statement == row["problem_statement"]


def test_tasks_by_name(tmp_path: Path) -> None:
    rest = {name: value for name, value in ROW.items() if name != "instance_id"}
    (tmp_path / "t.json").write_text(json.dumps({"a": rest, "b": rest}))
    assert [task.instance_id for task in load_tasks(str(tmp_path / "t.json"))] == ["a", "b"]


def test_fields_of_relatives(tmp_path: Path) -> None:
    row: dict[str, Any] = {name: value for name, value in ROW.items() if "_TO_" not in name}
    row |= {"fail_to_pass": '["a"]', "pass_to_pass": [], "created_at": 1677000000, "version": None, "environment": "x"}
    row |= {"sdist": "flask==2.2", "test_cmd": "python -m pytest 'a b'"}
    [task] = load_tasks(str(write_jsonl(tmp_path / "t.jsonl", [row])))
    assert task.fail_to_pass == ("a",) and task.created_at == "1677000000" and task.version == ""
    assert task.build and task.build.test_cmd == ("python", "-m", "pytest", "a b")


def test_dates_and_lists_of_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from datetime import datetime

    row = {**ROW, "created_at": datetime(2023, 2, 22, 14), "version": "2.3", "FAIL_TO_PASS": ["a"]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "t.parquet")
    [task] = load_tasks(str(tmp_path / "t.parquet"))
    assert task.created_at == "2023-02-22 14:00:00" and task.fail_to_pass == ("a",)
