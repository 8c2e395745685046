"""The calls into xgrammar: a schema to a grammar's text, and that to tables of allowed tokens.

xgrammar is imported when a compiler is made: that takes seconds and belongs on no engine thread.
"""

from __future__ import annotations

from typing import Any

from engine.grammar.vocabulary import Vocabulary

# White space between two JSON tokens. Without a bound a model may write it for ever; sixteen leave
# a line break and seven levels of indentation by two.
MAX_WHITESPACE = 16

# Strings with a length are written with a class that lets raw control characters through (xgrammar
# 0.2.9); JSON forbids them in strings. No literal of a schema can look like this: the text of a
# grammar writes its backslashes twice.
_LOOSE_CHARACTERS = r"[^\"\\\r\n]"
_JSON_CHARACTERS = r"[^\0-\x1f\"\\]"


class GrammarCompiler:
    """Compiles for one vocabulary, in the calling thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._xgrammar: Any = xgrammar
        info = xgrammar.TokenizerInfo(
            list(vocabulary.pieces),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.pieces),
            stop_token_ids=list(vocabulary.end_ids),
        )
        self._vocab_size = len(vocabulary.pieces)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def grammar_text(self, schema: str) -> str:
        """The grammar of a JSON schema as text; may take very long or end the process."""
        grammar = self._xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
        return str(grammar).replace(_LOOSE_CHARACTERS, _JSON_CHARACTERS)

    def first_mask(self, compiled: Any) -> None:
        """Make the mask of an empty output, which for an ambiguous grammar may take very long."""
        mask = self._xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self._xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)

    def compile(self, grammar_text: str) -> Any:
        """An `xgrammar.CompiledGrammar`; does not hold the interpreter while it works."""
        return self._compiler.compile_grammar(grammar_text)
