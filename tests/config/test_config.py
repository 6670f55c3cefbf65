"""Configuration: what is refused, how it is said, and that the reference page is current."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.config.reference import reference
from pearl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("pipeline:\n  steps: 3\n")
    return path


def test_overrides_win_and_are_typed(file: Path) -> None:
    config = load_config(file, ["pipeline.steps=7", "model.path=tiny-random-llama", "engine.sampling.stop=[a, b]"])
    assert (config.pipeline.steps, config.engine.sampling.stop) == (7, ("a", "b"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.stepz=3", r"unknown key pipeline\.stepz = 3 \(did you mean pipeline\.steps\?\)"),
        ("pipelin.steps=3", r"unknown key pipelin .*did you mean pipeline"),
        ("pipeline.steps=many", r"pipeline\.steps = 'many': input should be a valid integer"),
        ("pipeline.steps=0", r"pipeline\.steps = 0: input should be greater than or equal to 1"),
        ("pipeline.group_size=1", r"pipeline\.group_size = 1"),
        ("trainer.zero_stage=4", r"trainer\.zero_stage = 4"),
        ("trainer.ranks=3", r"trajectories do not divide by trainer\.ranks"),
        ("pipeline.max_trajectory_tokens=5000", r"above model\.context_tokens"),
        ("trainer.micro_batch_tokens=512", r"trainer\.micro_batch_tokens = 512 cannot hold"),
        ("engine.max_total_tokens=512", r"engine\.max_total_tokens = 512 cannot hold"),
        ("pipeline.min_group_size=9", r"pipeline\.min_group_size = 9 is above"),
        ("steps", r"override 'steps' is not key\.sub=value"),
        ("seed.x=3", r"seed is a value, not a section|seed"),
        ("name=../up", r"name = '\.\./up'"),
    ],
)
def test_a_fault_names_the_key_the_value_and_a_remedy(file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as fault:
        load_config(file, ["seed=0", override])
    assert fault.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML.*line 1"), ("- 1", "holds a list"), ("pipeline: 3", r"pipeline = 3")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"binary\.yaml cannot be read"):
        load_config(tmp_path / "binary.yaml")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_valid(example: Path) -> None:
    load_config(example)


@pytest.mark.parametrize("kind", ["existing", "ssh", "slurm", "ec2", "gcp", "azure", "kubernetes"])
def test_the_example_of_a_kind_of_cluster_is_the_elastic_one(kind: str) -> None:
    own, elastic = (yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text()) for name in (kind, "elastic"))
    assert own["cluster"].pop("rollout_workers") == elastic["cluster"].pop("rollout_workers")
    for example in (own, elastic):
        del example["name"], example["cluster"], example["elastic"]["policy"]
    del elastic["elastic"]["availability"]  # plays a cloud on one machine
    assert own == elastic


def test_the_reference_page_is_what_the_models_say() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), "run `make docs`"


def test_every_key_is_documented() -> None:
    def undocumented(model: type, prefix: str = "") -> list[str]:
        missing = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            if hasattr(field.annotation, "model_fields"):
                missing += undocumented(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                missing.append(prefix + name)
        return missing

    assert undocumented(RunConfig) == []


def test_a_user_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(UserError("what", "remedy")))
    assert (error.what, error.remedy, str(error)) == ("what", "remedy", "what. remedy")
