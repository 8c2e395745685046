"""Who waits for which compilation, what is remembered, and what happens when a compiler fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.errors import QueueFullError, RequestError
from engine.grammar import masks as module
from engine.grammar.loading import grammar_masks
from engine.grammar.masks import GrammarMasks
from engine.request import GenerationRequest, SamplingParams
from engine.sampling.shaping import TokenMask


class Following:
    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def allowed(self, output: Sequence[int]) -> TokenMask | None:
        return None


class Compiler:
    """Compiles when it is told to; schemas are JSON strings, `"bad"` is refused."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.compiled: list[str] = []
        self.size = 10

    def compile(self, schema: str) -> tuple[Any, int]:
        assert self.go.acquire(timeout=10)
        self.compiled.append(schema)
        if "bad" in schema:
            raise RequestError("the schema is bad")
        if "bug" in schema:
            raise ZeroDivisionError
        return schema, self.size

    def follow(self, compiled: Any) -> Following:
        return Following(compiled)


def schema(name: str) -> str:
    return f'{{"const": "{name}"}}'


def opened(masks: GrammarMasks, request_id: int, name: str) -> bool:
    request = GenerationRequest(request_id, (1,), SamplingParams(5), grammar=schema(name))
    return masks.open(request)


def settle(masks: GrammarMasks, count: int) -> dict[int, RequestError | None]:
    found: dict[int, RequestError | None] = {}
    end = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < end
        masks.wait(0.05)
        found |= dict(masks.settled())
    return found


def test_a_schema_is_compiled_once_for_all_who_wait() -> None:
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    assert [opened(masks, i, "a") for i in range(50)] == [False] * 50
    assert masks.settled() == []
    compiler.go.release(5)
    assert settle(masks, 50) == dict.fromkeys(range(50))
    assert opened(masks, 50, "a") is True
    assert compiler.compiled == [schema("a")]
    assert masks.allowed(7, []) is None
    for request_id in range(51):
        masks.close(request_id)
    with pytest.raises(KeyError):
        masks.allowed(7, [])


def test_refusals_are_remembered_and_failures_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    compiler.go.release(9)
    opened(masks, 1, "bad")
    assert str(settle(masks, 1)[1]) == "the schema is bad"
    with pytest.raises(RequestError, match="the schema is bad"):
        opened(masks, 2, "bad")
    assert opened(masks, 3, "bug") is False
    error = settle(masks, 1)[3]
    assert error is not None
    assert (error.status, "ZeroDivisionError" in error.message) == (503, True)
    assert "was not compiled" in caplog.text
    assert opened(masks, 4, "bug") is False
    with pytest.raises(RequestError, match="uses not"):
        masks.open(GenerationRequest(5, (1,), SamplingParams(5), grammar='{"not": {}}'))
    assert compiler.compiled.count(schema("bad")) == 1


def test_who_has_gone_is_not_compiled_for() -> None:
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    for request_id, name in enumerate("abcd"):
        opened(masks, request_id, name)
    time.sleep(0.05)  # "a" is being compiled
    masks.close(1)
    masks.close(2)
    opened(masks, 9, "c")
    compiler.go.release(9)
    assert settle(masks, 3) == {0: None, 3: None, 9: None}
    assert compiler.compiled == [schema("a"), schema("c"), schema("d")]


def test_somebody_who_comes_while_a_schema_is_dropped_is_served() -> None:
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    masks._started = True  # no thread: its steps are taken here
    opened(masks, 1, "a")
    masks.close(1)
    name = masks._schemas.get()
    masks._results.append((name, masks._compiled(compiler, name)))
    opened(masks, 2, "a")
    masks._done.set()
    assert masks.settled() == []
    assert masks._schemas.get() == name
    compiler.go.release()
    masks._grammars = compiler
    masks._results.append((name, masks._compiled(compiler, name)))
    masks._done.set()
    assert masks.settled() == [(2, None)]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 3)
    monkeypatch.setattr(module, "CACHED_BYTES", 100)
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    compiler.go.release(99)
    for request_id, name in enumerate("abcd"):
        opened(masks, request_id, name)
        settle(masks, 1)
    assert opened(masks, 10, "b")
    assert not opened(masks, 11, "a")
    settle(masks, 1)
    assert opened(masks, 12, "b"), "it was used last but one"
    assert not opened(masks, 13, "c")
    settle(masks, 1)
    compiler.size = 95
    opened(masks, 14, "e")
    settle(masks, 1)
    assert len(masks._cache) == 0
    assert masks.allowed(14, []) is None, "who has it keeps it"


def test_the_queue_of_schemas_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    compiler = Compiler()
    masks = GrammarMasks(lambda: compiler)
    for request_id, name in enumerate("abc"):
        opened(masks, request_id, name)
    with pytest.raises(QueueFullError, match="3 JSON schemas wait"):
        opened(masks, 3, "d")
    assert opened(masks, 4, "c") is False
    compiler.go.release(9)
    settle(masks, 4)
    assert opened(masks, 5, "d") is False
    settle(masks, 1)


@pytest.mark.filterwarnings("error")
def test_a_compiler_that_cannot_be_loaded_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = Compiler()
    compiler.go.release(9)
    loads: list[Callable[[], Compiler]] = [lambda: compiler]

    def load() -> Compiler:
        if len(caplog.records) < 1:
            raise OSError("no memory")
        return loads[0]()

    masks = GrammarMasks(load)
    masks.start()
    masks.start()
    opened(masks, 1, "a")
    error = settle(masks, 1)[1]
    assert error is not None
    assert error.status == 503
    assert "Grammars cannot be loaded" in caplog.text
    opened(masks, 2, "a")
    assert settle(masks, 1) == {2: None}


def test_masks_need_a_tokenizer_and_an_end(tmp_path: Any, tiny_folder: Any) -> None:
    assert grammar_masks(str(tmp_path), 2048, (2041,)) is None
    assert grammar_masks(str(tiny_folder), 2048, ()) is None
    pytest.importorskip("xgrammar")
    assert grammar_masks(str(tiny_folder), 2048, (2041,)) is not None
