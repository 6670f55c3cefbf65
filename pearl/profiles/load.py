"""Shipped profiles by name, and profile files in and out."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile
from pearl.errors import UserError
from pearl.profiles.derive import Architecture, Gpu, derive

HARDWARE = "hardware"


@cache
def _shipped(name: str) -> dict[str, Any]:
    return yaml.safe_load((resources.files(__package__) / f"{name}.yaml").read_text())


def models() -> list[str]:
    files = [Path(entry.name) for entry in resources.files(__package__).iterdir()]
    return sorted(file.stem for file in files if file.suffix == ".yaml" and file.stem != HARDWARE)


def gpus() -> list[str]:
    return sorted(_shipped(HARDWARE))


def load_gpu(name: str) -> Gpu:
    """Raises UserError for a name that does not exist."""
    return Gpu(**_shipped(HARDWARE)[_known("GPU", name, gpus())])


def load_architecture(model: str) -> Architecture:
    """Raises UserError for a name that does not exist."""
    return Architecture(**_shipped(_known("model", model, models()))["architecture"])


def load_profile(model: str, gpu: str, tensor_parallel: int = 1) -> EngineProfile:
    """Of a worker of `tensor_parallel` GPUs; raises UserError for unknown names and for weights that do not fit."""
    architecture, hardware = load_architecture(model), load_gpu(gpu)
    if tensor_parallel not in (1, 2, 4, 8):
        raise UserError(f"tensor parallel size {tensor_parallel}", "Take 1, 2, 4 or 8")
    entries = _shipped(model.lower())["gpus"]
    profile = derive(architecture, hardware, entries[_known("GPU", gpu, sorted(entries))]["costs"], tensor_parallel)
    if profile.kv_capacity_tokens <= 0:
        raise UserError(
            f"{architecture.weight_bytes / 1e9:.0f} GB of weights of {model} do not fit on {tensor_parallel} x {gpu}",
            "Take a larger tensor parallel size, or a GPU with more memory",
        )
    return profile


def _known(kind: str, name: str, names: list[str]) -> str:
    if name.lower() not in names:
        raise UserError(f"no profile of {kind} {name!r}", f"There are: {', '.join(names)}")
    return name.lower()


def write_profile(path: Path, profile: Profile) -> None:
    """As `read_profile` takes it."""
    text = yaml.safe_dump({"engine": asdict(profile.engine), "workload": _workload(profile.workload)}, sort_keys=False)
    path.write_text(text)


def _workload(work: WorkloadProfile) -> dict[str, Any]:
    return {**asdict(work), "turns": [asdict(turn) for turn in work.turns]}


def read_profile(path: Path) -> Profile:
    """Raises UserError that names the file and what is wrong with it."""
    try:
        data = yaml.safe_load(path.read_text())
        engine, work = data["engine"], dict(data["workload"])
        turns = tuple(TurnShape(**turn) for turn in work.pop("turns"))
        profile = Profile(EngineProfile(**engine), WorkloadProfile(turns=turns, **work))
        numbers = [getattr(profile.engine, field.name) for field in fields(EngineProfile)]
        numbers += [getattr(turn, field.name) for turn in turns for field in fields(TurnShape)]
        if not turns or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("it has no turns, or something that is not a number")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "Give the profile.yaml of a run") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error).split("\n")[0]
        raise UserError(f"{path} is no profile: {what}", "Give the profile.yaml of a run") from None
    return profile
