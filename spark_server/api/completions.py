"""POST /v1/completions: prompts as text or ids, one or many, `n` choices each.

Choices are numbered prompt by prompt. In a text prompt, control tokens are control tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.errors import EngineUnavailableError, RequestError
from engine.request import GenerationRequest
from spark_server.api.body import read_object
from spark_server.api.completion_format import CompletionFormat
from spark_server.api.generation import ChoiceRun
from spark_server.api.options import ApiOptions
from spark_server.api.response import GenerationResponse
from spark_server.api.sampling import (
    check_id,
    check_prompt_length,
    choice_seed,
    request_seed,
    sampling_params,
    stop_strings,
)
from spark_server.api.schemas import CompletionBody, body_schema, validate
from spark_server.api.service import Service, choice_count, refuse, service_of, wants_usage
from spark_server.api.tools import output_grammar
from spark_server.engine_api import Endpoint, ModelInfo
from spark_server.text.reply import Reply

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's default on this endpoint


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked request: its sequences, what stands in front of each, and its prompts' tokens."""

    runs: list[ChoiceRun]
    echoes: list[str]
    prompt_tokens: int


@router.post(Endpoint.COMPLETIONS, openapi_extra=body_schema(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue prompts."""
    service, began = service_of(request), time.monotonic()
    data: dict[str, Any] = {}
    try:
        data = await read_object(request, service.options.max_body_bytes)
        body = validate(CompletionBody, data)
        info, model = service.ready(body.model)
        usage = wants_usage(body)
        work = await service.in_thread(lambda: _prepare(service, body, info, began))
    except (RequestError, EngineUnavailableError) as error:
        service.refused(Endpoint.COMPLETIONS, data, began, error)
        raise
    streaming = bool(body.stream)
    return GenerationResponse(
        work.runs,
        service.starter(Endpoint.COMPLETIONS, streaming),
        CompletionFormat(
            model,
            work.echoes,
            service.text.tokenizer.token_bytes,
            with_usage=usage,
            with_metrics=bool(body.metrics),
        ),
        prompt_tokens=work.prompt_tokens,
        stream=streaming,
        include_usage=usage,
    )


def split_prompts(prompt: object) -> list[str] | list[list[int]]:
    """The prompts of a request: all texts, or all lists of ids.

    Raises:
        RequestError: empty, mixed, or of another type.
    """
    form = "must be a text, a list of texts, a list of ids or a list of lists of ids"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        refuse(form, "prompt")
    if not prompt:
        refuse("the list is empty", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(type(item) is int for item in prompt):
        return [prompt]
    if not all(isinstance(item, list) and all(type(i) is int for i in item) for item in prompt):
        refuse(form, "prompt")
    return prompt


def _encode(
    service: Service, prompts: list[str] | list[list[int]], info: ModelInfo
) -> list[tuple[int, ...]]:
    """Ids of every prompt, all checked before any work starts."""
    encoded: list[tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = service.text.tokenizer.encode(prompt)
        else:
            ids = [check_id(token_id, info, "prompt") for token_id in prompt]
        check_prompt_length(len(ids), info, "prompt")
        encoded.append(tuple(ids))
    return encoded


def _prepare(service: Service, body: CompletionBody, info: ModelInfo, began: float) -> _Work:
    """Check and encode; runs in a text thread."""
    if body.echo and body.logprobs is not None:
        refuse("log-probabilities of a prompt are not supported; leave out echo", "logprobs")
    prompts = split_prompts(body.prompt)
    n = choice_count(body, len(prompts), service.options)
    stops = stop_strings(body.stop)
    grammar = output_grammar(body.response_format, grammar=info.grammar)
    seed = request_seed(body)
    options: ApiOptions = service.options

    def make_reply() -> Reply:
        detokenizer = service.text.tokenizer.detokenizer(
            skip_special_tokens=body.skip_special_tokens is not False
        )
        return Reply(detokenizer, stops=stops, min_tokens=body.min_tokens or 0)

    runs: list[ChoiceRun] = []
    for ids in _encode(service, prompts, info):
        for choice in range(n):
            params = sampling_params(
                body,
                max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
                seed=choice_seed(seed, choice),
                prompt_tokens=len(ids),
                info=info,
                defaults=service.text.defaults,
                options=options,
            )
            request = GenerationRequest(
                request_id=service.new_id(),
                prompt_ids=ids,
                sampling=params,
                priority=body.priority or 0,
                deadline=options.queue_timeout,
                grammar=grammar,
                cache_salt=body.cache_salt,
                retractable=not body.stream,
            )
            runs.append(ChoiceRun(len(runs), request, make_reply, began))
    return _Work(
        runs=runs,
        echoes=_echoes(service, body, prompts, runs),
        prompt_tokens=sum(run.prompt_tokens for run in runs[::n]),
    )


def _echoes(
    service: Service,
    body: CompletionBody,
    prompts: list[str] | list[list[int]],
    runs: list[ChoiceRun],
) -> list[str]:
    """What stands in front of each choice's text."""
    if not body.echo:
        return [""] * len(runs)
    texts = [
        prompt
        if isinstance(prompt, str)
        else service.text.tokenizer.decode(
            prompt, skip_special_tokens=body.skip_special_tokens is not False
        )
        for prompt in prompts
    ]
    n = len(runs) // len(texts)
    return [text for text in texts for _ in range(n)]
