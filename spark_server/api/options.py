"""What the operator decides about the API, frozen. Reads no environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Options of the HTTP layer.

    Attributes:
        api_keys: accepted bearer tokens; empty means that no key is asked for.
        served_names: further names that `model` may have, beside the model's own.
        max_body_bytes: largest request body; a larger one is answered with 413.
        max_choices: largest number of sequences of one request (prompts times `n`).
        max_output_tokens: the operator's ceiling on a sequence's output, also when the request
            says nothing; None leaves the context as the only bound.
        queue_timeout: seconds after which a request that still waits is given up, or None.
        text_threads: threads that render templates and encode text.
    """

    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    max_choices: int = 128
    max_output_tokens: int | None = None
    queue_timeout: float | None = None
    text_threads: int = 2
