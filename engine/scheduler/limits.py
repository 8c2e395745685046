"""How much a request may generate, or why it can never run. Knows no queue and no sequence."""

from __future__ import annotations

from engine.config import GRID
from engine.errors import RequestError
from engine.request import GenerationRequest
from engine.scheduler.sequence import blocks_at_most


def output_limit(request: GenerationRequest, longest: int, kv_blocks: int) -> int:
    """Tokens that a request may generate, by max_tokens and the context length.

    Args:
        longest: tokens of prompt and output that a sequence may have.
        kv_blocks: of the whole pool, GRID tokens each.

    Raises:
        RequestError: it can never run: empty, longer than the context or than the KV pool.
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    if length >= longest:
        raise RequestError(
            f"the prompt has {length} tokens and the context length is {longest}; shorten the "
            "prompt so that one token can be generated",
            param="prompt",
            code="context_length_exceeded",
        )
    if request.sampling.max_tokens < 1:
        raise RequestError(
            f"max_tokens is {request.sampling.max_tokens} and must be at least 1",
            param="max_tokens",
        )
    limit = min(request.sampling.max_tokens, longest - length)
    if blocks_at_most(length, limit) > kv_blocks:
        raise RequestError(
            f"prompt and max_tokens need {length + limit} tokens of KV cache, the pool holds "
            f"{kv_blocks * GRID}; shorten the prompt, lower max_tokens or raise --kv-tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return limit
