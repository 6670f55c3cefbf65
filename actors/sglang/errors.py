"""What can go wrong with an engine. Each carries one message that a user can read; all of them pickle."""


class EngineError(Exception):
    """The engine refused a call, or answered it with an error; it lives on."""


class EngineTimeout(EngineError):
    """The engine did not finish a call within its deadline."""


class EngineDied(EngineError):
    """The engine's processes are gone; the message ends with the last lines of its log."""


class RestartNeeded(EngineError):
    """The live server cannot take the role, or is in none after a switch that failed."""


class PortTaken(EngineDied):
    """The server ended because another process had taken its port meanwhile."""


class WeightLoadError(EngineError):
    """A snapshot was refused or did not arrive whole; the engine serves nothing until one does."""


class StaleVersion(EngineError):
    """A sync to a version older than what the engine has; nothing was changed."""
