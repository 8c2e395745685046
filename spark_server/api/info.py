"""Routes that generate nothing: models, tokenizer, health, version, metrics, ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.errors import EngineUnavailableError
from spark_server.api.body import read_object
from spark_server.api.messages import normalise_messages
from spark_server.api.sampling import check_id
from spark_server.api.schemas import DetokenizeBody, TokenizeBody, body_schema, validate
from spark_server.api.service import Service, refuse, service_of, template_kwargs, unknown_model
from spark_server.api.tools import plan_tools
from spark_server.engine_api import EngineState, ModelInfo
from spark_server.text.template import RESERVED_KWARGS
from spark_server.version import version

router = APIRouter()


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _state(service: Service, status: int) -> Response:
    state = service.engine.state()
    age = round(service.engine.age(), 3)
    return _json({"status": state.value, "seconds_without_progress": age}, status)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the server is of use or will be; 503 when the engine is dead or stuck."""
    service = service_of(request)
    bad = service.engine.state() in (EngineState.DEAD, EngineState.STUCK)
    return _state(service, 503 if bad else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when requests are taken: the model is loaded and answers as it should."""
    service = service_of(request)
    return _state(service, 200 if service.engine.state() is EngineState.READY else 503)


@router.get("/version")
async def show_version() -> Response:
    """The server's version."""
    return _json({"version": version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' page."""
    body, content_type = service_of(request).metrics_page(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/debug/ledger")
async def ledger(request: Request) -> Response:
    """The memory ledger."""
    value = service_of(request).engine.ledger()
    if value is None:
        raise EngineUnavailableError("there is no ledger yet: the engine is still starting")
    return _json(value)


def _model(name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "spark",
        "root": info.model_id,
        "max_model_len": info.max_seq_len,
        "max_batch_size": info.max_batch_size,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """What is served."""
    service = service_of(request)
    info = service.loaded()
    data = [_model(name, info) for name in service.model_names(info)]
    return _json({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One served model."""
    service = service_of(request)
    info = service.loaded()
    if name not in service.model_names(info):
        raise unknown_model(name)
    return _json(_model(name, info))


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Ids of a text or of a rendered chat."""
    service = service_of(request)
    data = await read_object(request, service.options.max_body_bytes)
    body = validate(TokenizeBody, data)
    info = _named(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        refuse("give either prompt or messages", "prompt")
    ids = await service.in_thread(lambda: _ids(service, body))
    return _json({"tokens": ids, "count": len(ids), "max_model_len": info.max_seq_len})


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return service.text.tokenizer.encode(body.prompt, add_special_tokens=special)
    plan = plan_tools(body.tools, None, parallel=True, grammar=False)
    kwargs = template_kwargs(body.chat_template_kwargs, RESERVED_KWARGS)
    messages = normalise_messages(body.messages)
    return list(service.text.render_chat(messages, list(plan.tools), kwargs).token_ids)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Text of ids, special tokens shown."""
    service = service_of(request)
    data = await read_object(request, service.options.max_body_bytes)
    body = validate(DetokenizeBody, data)
    info = _named(service, body.model)
    tokens = [check_id(token_id, info, "tokens") for token_id in body.tokens]
    text = await service.in_thread(
        lambda: service.text.tokenizer.decode(tokens, skip_special_tokens=False)
    )
    return _json({"prompt": text})


def _named(service: Service, name: str | None) -> ModelInfo:
    info = service.loaded()
    if name is not None and name not in service.model_names(info):
        raise unknown_model(name)
    return info
