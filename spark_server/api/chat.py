"""POST /v1/chat/completions: from the body to runs in the engine and the form of the answer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.errors import EngineUnavailableError, RequestError
from engine.request import GenerationRequest
from spark_server.api.body import read_object
from spark_server.api.chat_format import ChatFormat
from spark_server.api.generation import ChoiceRun
from spark_server.api.messages import normalise_messages
from spark_server.api.response import GenerationResponse
from spark_server.api.sampling import (
    check_prompt_length,
    choice_seed,
    request_seed,
    sampling_params,
    stop_strings,
)
from spark_server.api.schemas import ChatBody, body_schema, validate
from spark_server.api.service import (
    Service,
    choice_count,
    refuse,
    service_of,
    template_kwargs,
    wants_usage,
)
from spark_server.api.tools import Choice, ToolPlan, output_grammar, plan_tools
from spark_server.engine_api import Endpoint, ModelInfo
from spark_server.text.calls import ToolSchemas
from spark_server.text.forced import CallListParser, NamedCallParser
from spark_server.text.model import Prompt, TextModel
from spark_server.text.reasoning import ReasoningMode
from spark_server.text.reply import CallParser, Reply
from spark_server.text.template import RESERVED_KWARGS
from spark_server.text.toolparser import ToolCallParser

router = APIRouter()


@router.post(Endpoint.CHAT, openapi_extra=body_schema(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    service, began = service_of(request), time.monotonic()
    data: dict[str, Any] = {}
    try:
        data = await read_object(request, service.options.max_body_bytes)
        body = validate(ChatBody, data)
        info, model = service.ready(body.model)
        usage = wants_usage(body)
        runs = await service.in_thread(lambda: _prepare(service, body, info, began))
    except (RequestError, EngineUnavailableError) as error:
        service.refused(Endpoint.CHAT, data, began, error)
        raise
    streaming = bool(body.stream)
    return GenerationResponse(
        runs,
        service.starter(Endpoint.CHAT, streaming),
        ChatFormat(
            model,
            len(runs),
            service.text.tokenizer.token_bytes,
            with_usage=usage,
            with_metrics=bool(body.metrics),
        ),
        prompt_tokens=runs[0].prompt_tokens,
        stream=streaming,
        include_usage=usage,
    )


def _top_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        refuse("needs logprobs: true", "top_logprobs")
    return None


def _prepare(service: Service, body: ChatBody, info: ModelInfo, began: float) -> list[ChoiceRun]:
    """Check, render, encode; runs in a text thread."""
    n = choice_count(body, 1, service.options)
    stops = stop_strings(body.stop)
    logprobs = _top_logprobs(body)
    parallel = body.parallel_tool_calls is not False
    plan = plan_tools(body.tools, body.tool_choice, parallel=parallel, grammar=info.grammar)
    output = output_grammar(body.response_format, grammar=info.grammar)
    if output is not None and plan.grammar is not None:
        refuse("cannot be combined with a forced tool call", "response_format")
    grammar = plan.grammar or output
    kwargs = template_kwargs(body.chat_template_kwargs, RESERVED_KWARGS)
    if grammar is not None:
        kwargs = {"enable_thinking": False, **kwargs}
    messages = normalise_messages(body.messages)
    prompt = service.text.render_chat(messages, list(plan.tools), kwargs)
    check_prompt_length(len(prompt.token_ids), info, "messages")
    asked = body.max_completion_tokens
    seed = request_seed(body)

    def make_reply() -> Reply:
        return Reply(
            service.text.tokenizer.detokenizer(
                skip_special_tokens=body.skip_special_tokens is not False
            ),
            stops=stops,
            min_tokens=body.min_tokens or 0,
            reasoning=reasoning_mode(service.text, prompt, forced=grammar is not None),
            parser=call_parser(service.text, plan, forced_output=output is not None),
            one_call=not parallel and plan.choice is Choice.AUTO and bool(plan.tools),
            # As OpenAI does: a function that the client named is no decision of the model.
            calls_finish=plan.choice is not Choice.NAMED,
        )

    runs = []
    for choice in range(n):
        params = sampling_params(
            body,
            max_tokens=body.max_tokens if asked is None else asked,
            logprobs=logprobs,
            seed=choice_seed(seed, choice),
            prompt_tokens=len(prompt.token_ids),
            info=info,
            defaults=service.text.defaults,
            options=service.options,
        )
        request = GenerationRequest(
            request_id=service.new_id(),
            prompt_ids=prompt.token_ids,
            sampling=params,
            priority=body.priority or 0,
            deadline=service.options.queue_timeout,
            grammar=grammar,
            cache_salt=body.cache_salt,
            retractable=not body.stream,
        )
        runs.append(ChoiceRun(choice, request, make_reply, began))
    return runs


def reasoning_mode(text: TextModel, prompt: Prompt, *, forced: bool) -> ReasoningMode:
    """Where the reply begins; a reply that a grammar forces holds no thought."""
    if forced or text.template is None or not text.template.reasons:
        return ReasoningMode.NONE
    if prompt.opens_reasoning:
        return ReasoningMode.OPEN
    return ReasoningMode.CLOSED if prompt.closes_reasoning else ReasoningMode.AUTO


def call_parser(text: TextModel, plan: ToolPlan, *, forced_output: bool) -> CallParser | None:
    """The parser that fits the request, or None when the reply cannot hold calls."""
    if plan.named is not None:
        return NamedCallParser(plan.named)
    if plan.choice is Choice.REQUIRED:
        return CallListParser()
    if forced_output or not (plan.tools or plan.suppress):
        return None
    xml = text.template is not None and text.template.xml_tool_calls
    return ToolCallParser(ToolSchemas(plan.tools), bare_functions=xml, suppress=plan.suppress)
