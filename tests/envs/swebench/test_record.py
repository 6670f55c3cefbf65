import json
from pathlib import Path

import pytest

from envs.swebench.faults import diff
from envs.swebench.load import load_tasks, save_tasks
from envs.swebench.record import TaskRecord
from pearl.errors import UserError
from tests.envs.swebench.conftest import RIGHT, WRONG, record, write_jsonl

ROW = {
    "instance_id": "pallets__flask-1",
    "repo": "pallets/flask",
    "version": "2.3",
    "base_commit": "abc",
    "problem_statement": "It breaks.",
    "hints_text": None,
    "created_at": "2023",
    "patch": diff("src/a.py", "x\n", "y\n"),
    "test_patch": diff("tests/test_a.py", "x\n", "y\n"),
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_y"],
}


def test_a_row_of_the_benchmark(tmp_path: Path) -> None:
    [task] = load_tasks(str(write_jsonl(tmp_path / "t.jsonl", [{**ROW, "version": 2.3}])))
    assert task.fail_to_pass == ("tests/test_a.py::test_x",) and task.pass_to_pass == ("tests/test_a.py::test_y",)
    assert task.version == "2.3" and task.build is None


def test_a_row_with_an_image_and_one_with_a_recipe(tmp_path: Path) -> None:
    recipe = {"sdist": "flask==2.2", "python": "3.11", "deps": ["click"], "test_cmd": ["python", "-m", "pytest"]}
    rows = [{**ROW, "image_name": "swe/x"}, {**ROW, **recipe, "instance_id": "two", "source": "where it comes from"}]
    first, second = load_tasks(str(write_jsonl(tmp_path / "t.jsonl", rows)))
    assert first.build and first.build.image == "swe/x"
    assert second.build and second.build.sdist == "flask==2.2" and second.build.source is None


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    tasks = [record(tmp_path), record(tmp_path, instance_id="b", test_patch="", status="valid", run_s=2.0)]
    save_tasks(tmp_path / "new" / "t.jsonl", tasks)
    assert load_tasks(str(tmp_path / "new" / "t.jsonl")) == tasks


def test_parquet_and_json(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {**ROW, "version": "2.3", "FAIL_TO_PASS": json.loads(str(ROW["FAIL_TO_PASS"]))}
    table = pytest.importorskip("pyarrow").Table.from_pylist([row])
    parquet.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps([row]))
    assert load_tasks(str(tmp_path / "t.parquet")) == load_tasks(str(tmp_path / "t.json"))


def test_a_directory_of_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    (folder / "repo").mkdir(parents=True)
    (folder / "gold.patch").write_text(diff("sums.py", WRONG, RIGHT))
    (folder / "problem.md").write_text("double is wrong")
    (folder / "task.yaml").write_text("build: {python: '3.11', test_cmd: [python, run.py]}\nFAIL_TO_PASS: [a]\n")
    [task] = load_tasks(str(tmp_path))
    assert task.instance_id == "sums" and task.kind == "own" and task.problem_statement == "double is wrong"
    assert task.build and task.build.source == str(folder / "repo")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"patch": "words"}, "unified diff"),
        ({"patch": ""}, "gold patch is empty"),
        ({"instance_id": "../../etc"}, "instance_id"),
        ({"FAIL_TO_PASS": "not a list"}, "JSON list"),
        ({"sdist": "flask", "test_cmd": ["x"]}, "name==version"),
        ({"sdist": "flask==1", "test_cmd": []}, "test_cmd"),
        ({"sdist": "flask==1", "test_cmd": ["x"], "pythonpath": "../.."}, "pythonpath"),
        ({"format": 7}, "format"),
        ({"format": 1, "environment_setup_commit": "x"}, "environment_setup_commit"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{**ROW, "instance_id": "fine"}, {**ROW, **change}])
    with pytest.raises(UserError, match=f"line 2.*{named}"):
        load_tasks(str(path))


@pytest.mark.parametrize("text", ["{", "[1, 2]\n", "", '{"instance_id": 3}'])
def test_a_file_that_holds_no_tasks_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"t\.jsonl"):
        load_tasks(str(tmp_path / "t.jsonl"))


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="twice"):
        load_tasks(str(write_jsonl(tmp_path / "t.jsonl", [ROW, ROW])))


def test_the_record_is_frozen_and_its_json_names_its_format(tmp_path: Path) -> None:
    made = record(tmp_path)
    assert made.as_json()["format"] == 1 and "FAIL_TO_PASS" in made.as_json()
    assert TaskRecord.model_validate(json.loads(json.dumps(made.as_json()))) == made
