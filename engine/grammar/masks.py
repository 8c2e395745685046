"""Token masks of running requests, with compilation beside the engine's thread and a cache.

Implements `engine.core.TokenMasks`. Knows what is compiled, for whom and how long it is kept; not
how.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from engine.errors import EngineUnavailableError, InvariantError, QueueFullError, RequestError
from engine.grammar.schema import check_schema
from engine.request import GenerationRequest
from engine.sampling.shaping import TokenMask

MAX_PENDING = 64  # different schemas that may wait for compilation
CACHED_GRAMMARS = 64
CACHED_BYTES = 64 << 20

Compiled = tuple[Any, int]  # a compiled grammar and its bytes

logger = logging.getLogger(__name__)


class Following(Protocol):
    """What follows one request; see `follower.Follower`."""

    def allowed(self, output: Sequence[int]) -> TokenMask | None: ...


class Grammars(Protocol):
    """A compiler that is ready; used by the compiling thread, but for `follow`."""

    def compile(self, schema: str) -> Compiled:
        """A compiled grammar and its bytes; raises RequestError or EngineUnavailableError."""
        ...

    def follow(self, compiled: Any) -> Following:
        """A follower at the start of a grammar."""
        ...


class GrammarMasks:
    """Masks by request id; all methods but the thread's own are called by the engine's thread.

    Args:
        load: makes the compiler, in the compiling thread; may take seconds.
    """

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._schemas: SimpleQueue[str] = SimpleQueue()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._waiting: dict[str, set[int]] = {}
        self._results: list[tuple[str, Compiled | RequestError | None]] = []
        self._cache: OrderedDict[str, Compiled | RequestError] = OrderedDict()
        self._followers: dict[int, Following] = {}
        self._started = False

    def start(self) -> None:
        """Begin to load the compiler; without this the first request does."""
        if self._started:
            return
        self._started = True
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    # ---- the engine's thread -------------------------------------------------------------

    def open(self, request: GenerationRequest) -> bool:
        """Prepare a request's grammar; whether it is ready, else `settled` will name it.

        Raises:
            RequestError: the schema cannot be followed.
            QueueFullError: too many schemas wait for compilation.
        """
        schema = request.grammar
        assert schema is not None
        if schema in self._cache:
            self._cache.move_to_end(schema)
            known = self._cache[schema]
            if isinstance(known, RequestError):
                raise known
            self._begin(request.request_id, known[0])
            return True
        with self._lock:
            if schema in self._waiting:
                self._waiting[schema].add(request.request_id)
                return False
            pending = len(self._waiting)
        if pending >= MAX_PENDING:
            raise QueueFullError(
                f"{pending} JSON schemas wait for compilation, at most {MAX_PENDING} may; "
                "try again in a second"
            )
        check_schema(schema)
        self.start()
        with self._lock:
            self._waiting[schema] = {request.request_id}
        self._schemas.put(schema)
        return False

    def settled(self) -> list[tuple[int, RequestError | None]]:
        """The requests that need not wait any longer, with what is wrong or None."""
        if not self._done.is_set():
            return []
        with self._lock:
            self._done.clear()
            results, self._results = self._results, []
            named = [(result, self._waiting.pop(schema, set())) for schema, result in results]
        settled: list[tuple[int, RequestError | None]] = []
        for (schema, _), (result, requests) in zip(results, named, strict=True):
            if result is None:
                if requests:  # somebody came while it was being dropped
                    self._waiting[schema] = requests
                    self._schemas.put(schema)
                continue
            if isinstance(result, RequestError):
                settled += [(request_id, result) for request_id in sorted(requests)]
                if result.status < 500:
                    self._keep(schema, result)
                continue
            self._keep(schema, result)
            for request_id in sorted(requests):
                self._begin(request_id, result[0])
                settled.append((request_id, None))
        return settled

    def wait(self, seconds: float) -> None:
        """Sleep until `settled` has news, `seconds` at most."""
        self._done.wait(seconds)

    def allowed(self, request_id: int, output: Sequence[int]) -> TokenMask | None:
        """What may follow `output`, packed int32; None allows everything."""
        return self._followers[request_id].allowed(output)

    def close(self, request_id: int) -> None:
        """The request is over, in whatever state it is."""
        if self._followers.pop(request_id, None) is not None:
            return
        with self._lock:
            for requests in self._waiting.values():
                requests.discard(request_id)

    def _begin(self, request_id: int, compiled: Any) -> None:
        if self._grammars is None:
            raise InvariantError("a grammar was compiled before there was a compiler")
        self._followers[request_id] = self._grammars.follow(compiled)

    def _keep(self, schema: str, result: Compiled | RequestError) -> None:
        """Remember a result, a refusal too, and forget the oldest ones beyond the bounds."""
        self._cache[schema] = result
        while len(self._cache) > CACHED_GRAMMARS or self._cached_bytes() > CACHED_BYTES:
            self._cache.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(
            len(schema) + (0 if isinstance(result, RequestError) else result[1])
            for schema, result in self._cache.items()
        )

    # ---- the compiling thread ------------------------------------------------------------

    def _run(self) -> None:
        while True:
            result: Compiled | RequestError | None
            try:
                grammars = self._grammars = self._grammars or self._timed_load()
                schema = self._schemas.get()
                result = self._compiled(grammars, schema)
            except Exception as error:
                # Without a compiler nothing can be followed; the next schema tries again.
                logger.exception("Grammars cannot be loaded")
                schema, result = self._schemas.get(), _failure(error)
            with self._lock:
                self._results.append((schema, result))
                self._done.set()

    def _timed_load(self) -> Grammars:
        began = time.monotonic()
        grammars = self._load()
        logger.info("Grammars are ready after %.1f s", time.monotonic() - began)
        return grammars

    def _compiled(self, grammars: Grammars, schema: str) -> Compiled | RequestError | None:
        with self._lock:
            wanted = bool(self._waiting.get(schema))
        if not wanted:
            return None
        began = time.monotonic()
        try:
            result = grammars.compile(schema)
        except RequestError as error:
            return error
        except Exception as error:
            logger.exception("A schema of %d bytes was not compiled", len(schema))
            return _failure(error)
        logger.debug(
            "Compiled a schema of %d bytes in %.3f s", len(schema), time.monotonic() - began
        )
        return result


def _failure(error: Exception) -> RequestError:
    known = isinstance(error, EngineUnavailableError)
    text = str(error) if known else f"schemas cannot be compiled now ({type(error).__name__})"
    return RequestError(text, param="response_format", status=503)
