"""Data sets of Hugging Face, without its hub: from a directory, and from the cache that an earlier load left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs.swebench.conftest import write_jsonl
from tests.envs.swebench.test_record import ROW

pytest.importorskip("datasets")
CACHE = """
import sys, datasets, pathlib
made = datasets.load_dataset(sys.argv[1], split="test")
[arrow] = [pathlib.Path(file["filename"]) for file in made.cache_files]
cached = pathlib.Path(sys.argv[2]) / "datasets" / "some-lab___swe-set" / "default" / "0.0.0" / 40 * "0"
cached.parent.mkdir(parents=True)
arrow.parent.rename(cached)
(cached / arrow.name).rename(cached / "swe-set-test.arrow")
""".replace('40 * "0"', '("0" * 40)')
"""As a load from the hub lays it down."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "test.jsonl", [ROW, {**ROW, "instance_id": "two", "patch": "words"}])
    return tmp_path / "set"


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=120)


def listed(home: Path, name: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from pearl.cli import main; sys.argv[1:] = ['env', 'list', sys.argv[1], '--json']; main()"
    return run(home, "-c", code, name)


def test_from_the_cache_without_the_hub(tmp_path: Path, source: Path) -> None:
    made = run(tmp_path / "home", "-c", CACHE, str(source), str(tmp_path / "home"))
    assert made.returncode == 0, made.stderr
    found = json.loads(listed(tmp_path / "home", "hf:some-lab/swe-set:test").stdout)
    assert [row["instance_id"] for row in found["results"]] == [ROW["instance_id"]]
    [bad] = found["bad_rows"]
    assert bad["instance_id"] == "two" and "row 2" in bad["reason"] and "unified diff" in bad["reason"]
    other = listed(tmp_path / "home", "hf:some-lab/swe-set:train")
    assert other.returncode != 0 and "['test']" in other.stderr + other.stdout


def test_from_a_directory(tmp_path: Path, source: Path) -> None:
    found = json.loads(listed(tmp_path / "home", f"hf:{source}:test").stdout)
    assert found["tasks"] == 2


def test_a_set_that_is_not_cached_is_named(tmp_path: Path) -> None:
    found = listed(tmp_path / "home", "hf:some-lab/other")
    assert found.returncode != 0 and "some-lab/other (split test) cannot be loaded" in found.stderr + found.stdout
