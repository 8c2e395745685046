"""Puts the HTTP API together from what it is given. Starts nothing and reads no settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from spark_server.api import chat, completions, info
from spark_server.api.errors import install_handlers
from spark_server.api.middleware import ApiKeyMiddleware, RequestIdMiddleware
from spark_server.api.options import ApiOptions
from spark_server.api.service import Service
from spark_server.engine_api import EngineClient, MetricsPage, RequestObserver
from spark_server.text.model import TextModel
from spark_server.version import version

RULES = """\
OpenAI's API over one model. What it leaves open is settled here:

- `null` means the default. Unknown fields are ignored with one warning in the server's log. Known
  fields that cannot be honoured, and duplicate keys, are refused with 400.
- A prompt must leave room for one token, else 400 `context_length_exceeded`. The output is clamped
  to the room that is left and to the operator's ceiling. `max_completion_tokens` wins over
  `max_tokens`; without either a chat may fill the context, a completion has 16 tokens.
- `temperature` below 0.001 is greedy. Choice 0 uses `seed`, choice k a value mixed from it and k.
- `min_tokens` wins over stop strings and stop ids: a stop string matches only in text after the
  first `min_tokens` tokens. Of several, the one that is complete first ends the text. Stop strings
  are looked for in all that the model writes, reasoning and calls included.
- `usage.completion_tokens` counts the token that ended a sequence; `logprobs` have an entry for
  every counted token.
- `finish_reason` is `tool_calls` when the reply ended after complete calls, `length` when it was
  cut, also inside a call, and `stop` for a function that `tool_choice` named. With
  `parallel_tool_calls: false` the reply ends with its first call.
- `developer` is `system`; several system messages are merged in order into the first message.
- In chats, text that looks like control tokens stays text; in `/v1/completions` it does not.
- `"metrics": true` adds timings and draft counts to each choice.
- A stream begins with the first token, so that refusals are plain HTTP errors; a later failure is
  an event with `error`, and no `[DONE]` follows.
"""


def create_app(
    engine: EngineClient,
    text: TextModel,
    options: ApiOptions,
    observer: RequestObserver,
    metrics_page: MetricsPage,
) -> FastAPI:
    """The API over an engine.

    Args:
        engine: where sequences are generated; need not be ready yet.
        text: tokenizer and chat template of the same model, see `load_text_model`.
        observer: is told about every generating request.
        metrics_page: renders /metrics.
    """
    service = Service(engine, text, options, observer, metrics_page)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Spark",
        description=RULES,
        version=version(),
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    for part in (chat, completions, info):
        app.include_router(part.router)
    install_handlers(app)
    # Added last is outermost: a refused key still gets its request id back.
    app.add_middleware(ApiKeyMiddleware, keys=options.api_keys)
    app.add_middleware(RequestIdMiddleware)
    return app
