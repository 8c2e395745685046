"""Every error that Spark raises on purpose, as one tree.

SparkError
├── ConfigError            settings that cannot work (exit code 2 at start-up)
│   └── DoesNotFitError    the ledger is larger than the budget
├── ModelFormatError       a checkpoint or config.json that cannot be served (exit code 2)
├── RequestError           a client's mistake (HTTP 4xx in OpenAI's error shape)
│   └── QueueFullError     the waiting queue is full (HTTP 429)
├── EngineUnavailableError the engine is loading, draining, dead or stuck (HTTP 503)
├── UnsupportedKernelError an operator lacks the dtype, size or device it was asked for
└── InvariantError         a bug of ours: two numbers that must agree do not
"""

from __future__ import annotations


class SparkError(Exception):
    """Base of all errors that Spark raises on purpose."""


class ConfigError(SparkError):
    """A setting that cannot work; the text names it and the way out."""


class DoesNotFitError(ConfigError):
    """The reserve exceeds the memory budget; the text names the largest term and what would fit."""


class ModelFormatError(SparkError):
    """A checkpoint that cannot be served; the text names the tensor or the key."""


class RequestError(SparkError):
    """A client's mistake, answered in OpenAI's error shape.

    Args:
        message: what is wrong, with both numbers where there are two.
        param: the request field to blame, or None.
        code: OpenAI's machine-readable code, e.g. `context_length_exceeded`, or None.
        status: the HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class QueueFullError(RequestError):
    """The waiting queue is full; the client should come back after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, code="queue_full", status=429)
        self.retry_after = retry_after


class EngineUnavailableError(SparkError):
    """The engine cannot take work now (loading, draining, dead or stuck)."""


class UnsupportedKernelError(SparkError):
    """An operator was asked for a dtype, size or device that it lacks."""


class InvariantError(SparkError):
    """Two numbers that must agree do not; a bug of ours, never a user's mistake."""
