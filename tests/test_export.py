"""`pearl export`: what a run kept becomes a directory that transformers loads, equal bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pearl.errors import UserError
from pearl.export import export
from pearl.weights.snapshot import DATA, config_hash, write_snapshot
from tests.live.test_command import pearl, refused


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run directory with weights of versions 2 and 3, unlike the model's own."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "tiny-random-llama"}}))
    for version in (2, 3):
        named = trained(tiny_model, version).named_parameters()
        write_snapshot(folder / "weights", version, config_hash(tiny_model), named)
    return folder


def trained(tiny_model: Path, version: int) -> Any:
    model = load(tiny_model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(version)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.to(torch.bfloat16)  # and not the buffers: from_pretrained leaves those alone
    return model


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(torch.tensor([[1, 4, 9, 16, 25]])).logits


@pytest.mark.parametrize("shard_bytes", [10**10, 10**5])
def test_the_directory_loads_with_the_snapshots_logits(
    run: Path, tiny_model: Path, tmp_path: Path, shard_bytes: int
) -> None:
    from transformers import AutoTokenizer

    done = export(run, tmp_path / "out", shard_bytes=shard_bytes)
    model = load(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and done.dtype == "bfloat16" and done.version == 3
    assert torch.equal(logits(model), logits(trained(tiny_model, 3)))
    assert not torch.equal(logits(model), logits(load(tiny_model)))
    theirs, ours = AutoTokenizer.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Rename a.csv."}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_bytes == 10**5)


def test_an_exported_directory_is_a_model_to_train(run: Path, tmp_path: Path) -> None:
    from pearl.models import resolve_model

    assert resolve_model(export(run, tmp_path / "out").output) == tmp_path / "out"


def test_the_command_writes_the_version_that_is_asked_for(run: Path, tiny_model: Path) -> None:
    result = pearl("export", str(run), "--version", "2", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["version"] == 2 and said["output"] == str(run / "export" / "v2")
    assert torch.equal(logits(load(Path(said["output"]))), logits(trained(tiny_model, 2)))


def test_what_cannot_be_exported_is_refused_with_the_remedy(run: Path, tmp_path: Path) -> None:
    assert "did not keep version 7" in refused("export", str(run), "--version", "7")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "not an empty directory" in refused("export", str(run), "--output", str(tmp_path / "full"))
    with pytest.raises(UserError, match="no run directory"):
        export(tmp_path / "full")
    (tmp_path / "full" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"kept no weights.*checkpoint\.keep_weights"):
        export(tmp_path / "full")


def test_a_damaged_snapshot_is_noticed_and_nothing_is_left(run: Path, tmp_path: Path) -> None:
    data = run / "weights" / "v3" / DATA
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum"):
        export(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_weights_of_another_model_are_refused(run: Path, tiny_model: Path) -> None:
    write_snapshot(run / "weights", 4, "another model", load(tiny_model).named_parameters())
    with pytest.raises(UserError, match=r"model\.path = 'tiny-random-llama' has other shapes"):
        export(run)
