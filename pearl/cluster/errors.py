"""How a call to an actor can fail; each names the actor and the method."""


class ActorError(Exception):
    """Base of all below."""


class ActorLost(ActorError):
    """The worker process is gone (or lives another incarnation)."""


class ActorTimeout(ActorError):
    """No answer before the deadline."""


class ActorCallFailed(ActorError):
    """The method raised, or its result could not travel. `kind` is the exception's class name there."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
