"""The server's life: settings, port, engine process, HTTP app, signals, exit code.

Ties the other modules together; knows no route, no tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError
from engine.reserve.ledger import LedgerTerm, MemoryLedger, TermKind
from engine.reserve.preflight import Preflight
from engine.reserve.table import ledger_table, preflight_table
from spark_server.engine_client import ProcessEngineClient
from spark_server.http_metrics import HttpMetrics
from spark_server.logging import setup_logging
from spark_server.metrics import Metrics
from spark_server.model_source import ModelSource, locate_model
from spark_server.resolve import check_early, engine_config
from spark_server.settings import Settings, load_settings, read_api_keys
from spark_server.text.template_source import require_template
from spark_server.wire import Launch, Ready

ENGINE_FACTORY = "engine.build:build_engine"
_BACKLOG = 2048
# What open responses may take after their sequences have ended.
_FLUSH_SECONDS = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppParts:
    """What an HTTP app is made of."""

    settings: Settings
    source: ModelSource
    keys: frozenset[str]
    client: ProcessEngineClient
    metrics: Metrics


def openai_app(parts: AppParts) -> ASGIApp:
    """The app of `spark_server.api`, imported here so that the engine loads meanwhile."""
    from spark_server.api.app import create_app
    from spark_server.api.options import ApiOptions
    from spark_server.text.model import load_text_model

    limits = parts.settings.limits
    options = ApiOptions(
        api_keys=tuple(sorted(parts.keys)),
        max_body_bytes=limits.max_body_size,
        max_choices=limits.max_choices,
        max_output_tokens=limits.max_output_tokens,
        queue_timeout=limits.queue_timeout,
    )
    text = load_text_model(parts.source.folder, parts.settings.model.chat_template)
    return create_app(parts.client, text, options, parts.metrics, parts.metrics.render)


def serve(
    argv: Sequence[str],
    *,
    prog: str = "serve",
    factory: str = ENGINE_FACTORY,
    make_app: Callable[[AppParts], ASGIApp] = openai_app,
) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        argv: the words after the program's name.
        prog: the program's name in the help.
        factory: `module:function` that builds the engine in its process.
        make_app: builds the HTTP app.

    Raises:
        ConfigError, ModelFormatError: a user's mistake, before anything was started.
    """
    loaded = load_settings(argv, prog=prog)
    settings = loaded.settings
    setup_logging(settings.logging.log_level, access_log=settings.logging.access_log)
    for warning in loaded.warnings:
        logger.warning("%s", warning)
    keys = read_api_keys(settings.auth)
    source = locate_model(settings.model.model)
    launch, notes = _launch(settings, source, factory)
    for note in (*loaded.notes, *notes):
        logger.info("%s", note)
    listener = bind(settings.server.host, settings.server.port)
    with contextlib.closing(listener):
        metrics = Metrics()
        client = ProcessEngineClient(
            launch,
            stuck_timeout=settings.server.stuck_timeout,
            metrics=metrics,
            on_ready=lambda ready: _announce(ready, client, listener, settings),
        )
        client.spawn()  # loads while the app is imported below
        try:
            app = HttpMetrics(make_app(AppParts(settings, source, keys, client, metrics)), metrics)
        except BaseException:
            client.abandon()
            raise
        return asyncio.run(_serve(app, client, listener, settings))


def _launch(settings: Settings, source: ModelSource, factory: str) -> tuple[Launch, list[str]]:
    config, notes = engine_config(settings, source.folder)
    share, reserve = settings.memory.gpu_memory_utilization, settings.memory.host_reserve
    check_early(config, share, reserve)
    require_template(Path(source.folder), settings.model.chat_template)
    name = settings.model.served_model_name or source.name
    return (
        Launch(
            factory=factory,
            commands="",
            events="",
            config=config,
            model_id=name,
            utilization=share,
            host_reserve=reserve,
            log_level=settings.logging.log_level,
        ),
        notes,
    )


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything is loaded; connections wait until the app accepts them.

    Raises:
        ConfigError: no such address, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken; stop what listens there, "
                "or use another --port (0 takes a free one)"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients reach the listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(
    ready: Ready, client: ProcessEngineClient, listener: socket.socket, settings: Settings
) -> None:
    """Say what the start took and where the server is."""
    if settings.logging.log_level in ("debug", "info"):
        sys.stderr.write(f"\n{phase_table(client.phases)}\n\n{memory_table(ready.ledger)}\n\n")
    if client.starts > 1:
        logger.info("The engine is back")
        return
    seconds = time.time() - psutil.Process().create_time()
    logger.info(
        "Spark serves %s on %s after %.1f s", ready.info.model_id, url_of(listener), seconds
    )


def phase_table(phases: Sequence[tuple[str, float, str]]) -> str:
    """The phases of a start with their seconds, one a line."""
    width = max((len(name) for name, _, _ in phases), default=0)
    lines = [f"{'phase':{width}}  seconds"]
    for name, seconds, detail in phases:
        lines.append(f"{name:{width}}  {seconds:7.2f}  {detail}".rstrip())
    return "\n".join(lines)


def memory_table(values: Mapping[str, Any]) -> str:
    """The ledger of the engine process, as `spark plan` prints it.

    Args:
        values: `as_dict()` of a MemoryLedger or of a Preflight, after the way through JSON.
    """
    terms = (
        LedgerTerm(term["name"], term["bytes"], TermKind(term["kind"]), term["why"])
        for term in values["terms"]
    )
    ledger = MemoryLedger(tuple(terms))
    if "budget_bytes" not in values:
        return ledger_table(ledger)
    return preflight_table(
        Preflight(ledger, values["kv_blocks"], values["budget_bytes"], values["free_bytes"])
    )


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal first drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    app: ASGIApp, client: ProcessEngineClient, listener: socket.socket, settings: Settings
) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=settings.logging.access_log,
            server_header=False,
            http="httptools",
            ws="none",
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )
    asked, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await client.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _first(asked.wait(), asyncio.shield(client.fatal), asyncio.shield(serving))
    code = 0
    if client.fatal.done():
        fatal = client.fatal.result()
        sys.stderr.write(f"error: {fatal.message}\n")
        code = fatal.exit_code
    elif asked.is_set():
        client.drain()
        limit = settings.server.drain_timeout
        logger.info("Draining: no new requests, running ones may take %g s", limit)
        await _first(client.idle(), hurry.wait(), asyncio.sleep(limit))
    left = await client.shutdown(0)
    if left:
        logger.warning("Ended %d sequences that still ran", left)
    server.should_exit = True
    await serving
    if not client.fatal.done() and not asked.is_set():
        logger.error("The HTTP server ended by itself")
        code = 1
    return code


async def _first(*waits: object) -> None:
    """Wait until one of the awaitables is done, and let go of the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
