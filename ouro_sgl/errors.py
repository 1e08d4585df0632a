"""The errors that cross module boundaries."""

from __future__ import annotations


class OuroError(Exception):
    """Base of the errors raised on purpose."""


class ConfigError(OuroError):
    """A flag, a checkpoint or a combination of both that cannot be served; names the value."""


class RequestError(OuroError):
    """A request that is refused. ``status`` is the HTTP status that the client sees."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class EngineDeadError(OuroError):
    """A process of the server died; no request can be served any more."""


class IntegrityError(OuroError):
    """An invariant of the bookkeeping does not hold: a bug, never the client's fault."""
