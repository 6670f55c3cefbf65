"""Task families by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from envs.families.bugfix import BugfixFamily
from envs.families.files import FilesFamily
from envs.families.letters import LettersFamily
from envs.families.mixture import ShellFamily
from envs.families.phases import PhasesFamily
from envs.families.swebench import SwebenchFamily
from envs.protocol import TaskFamily
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig
from pearl.errors import UserError

Factory = Callable[[EnvironmentConfig, SandboxBackend], TaskFamily]

FAMILIES: dict[str, Factory] = {
    "files": FilesFamily,
    "bugfix": BugfixFamily,
    "letters": LettersFamily,
    "phases": PhasesFamily,
    "shell": ShellFamily,
    "swebench": SwebenchFamily,
}


def make_family(config: EnvironmentConfig, backend: SandboxBackend) -> TaskFamily:
    """The family that `environment.family` names: built in, or your own as "package.module:Factory".

    A factory is called with the configuration and the sandboxes of its worker, and returns a `TaskFamily`.
    """
    return find_factory(config.family)(config, backend)


def find_factory(name: str) -> Factory:
    if name in FAMILIES:
        return FAMILIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"environment.family = {name!r} is not known",
            f'Choose one of: {known}; or name your own factory as "package.module:Factory".',
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's may raise anything
        raise UserError(
            f"environment.family = {name!r} cannot be imported ({type(error).__name__}: {error})",
            "The module must be importable on every environment worker (install it, or set PYTHONPATH there).",
        ) from error
