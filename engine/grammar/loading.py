"""Puts the grammar's parts together for one checkpoint: sandbox, compiler, followers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.follower import Follower, Utf8Rules
from engine.grammar.masks import GrammarMasks
from engine.grammar.trial import Sandbox
from engine.grammar.vocabulary import Vocabulary, load_vocabulary

MAX_COMPILED_BYTES = 32 << 20

# While xgrammar is imported, a step that runs beside takes the interpreter back after this many
# seconds; with Python's own 5 ms each of its many calls into torch would wait that long.
_SWITCH_SECONDS = 2e-4


def grammar_masks(folder: str, vocab_size: int, end_ids: tuple[int, ...]) -> GrammarMasks | None:
    """Masks for a checkpoint; None when its output cannot be constrained here.

    That takes xgrammar, a tokenizer beside the weights, and an id that ends a sequence.
    """
    usable = importlib.util.find_spec("xgrammar") and (Path(folder) / "tokenizer.json").is_file()
    if not usable or not end_ids:
        return None
    return GrammarMasks(lambda: SandboxedGrammars.load(folder, vocab_size, end_ids))


class SandboxedGrammars:
    """Compiles here what the sandbox found to be harmless."""

    def __init__(self, sandbox: Sandbox, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
        self._sandbox = sandbox
        self._compiler = compiler
        self._vocabulary = vocabulary
        self._rules = Utf8Rules(vocabulary)

    @classmethod
    def load(cls, folder: str, vocab_size: int, end_ids: tuple[int, ...]) -> SandboxedGrammars:
        """Start the sandbox and import xgrammar; takes seconds."""
        sandbox = Sandbox(folder, vocab_size, end_ids)
        sandbox.start()
        with _yielding():
            vocabulary = load_vocabulary(Path(folder), vocab_size, end_ids)
            return cls(sandbox, GrammarCompiler(vocabulary), vocabulary)

    def compile(self, schema: str) -> tuple[Any, int]:
        """A compiled grammar and its bytes.

        Raises:
            RequestError: the schema cannot be followed, or not within the limits.
            EngineUnavailableError: the sandbox does not work.
        """
        compiled = self._compiler.compile(self._sandbox.grammar_text(schema))
        size = int(compiled.memory_size_bytes)
        if size > MAX_COMPILED_BYTES:
            raise RequestError(
                f"the JSON schema takes {size >> 20} MiB when it is compiled, at most "
                f"{MAX_COMPILED_BYTES >> 20} are accepted; make it smaller",
                param="response_format",
                code="invalid_schema",
            )
        return compiled, size

    def follow(self, compiled: Any) -> Follower:
        """A follower at the start of a grammar."""
        vocabulary = self._vocabulary
        return Follower(compiled, self._rules, len(vocabulary.pieces), vocabulary.end_ids)


@contextmanager
def _yielding() -> Iterator[None]:
    """Let other threads have the interpreter more often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
