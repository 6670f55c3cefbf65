"""Profiles of models on GPUs, shipped as YAML, and profiles that runs have written."""

from pearl.profiles.derive import Architecture, Gpu
from pearl.profiles.load import gpus, load_architecture, load_gpu, load_profile, models, read_profile, write_profile

__all__ = [
    "Architecture",
    "Gpu",
    "gpus",
    "load_architecture",
    "load_gpu",
    "load_profile",
    "models",
    "read_profile",
    "write_profile",
]
