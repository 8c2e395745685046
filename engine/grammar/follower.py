"""Follows one request's output through its grammar and says what may come next. Knows no queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import RequestError
from engine.grammar.vocabulary import Vocabulary

Words = npt.NDArray[np.int32]

# Lead bytes after which not every continuation byte makes a character (RFC 3629, table of section
# 4), and those that do. xgrammar 0.2.9 takes any.
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


class Utf8Rules:
    """Masks that keep output UTF-8 where tokens end inside a character.

    A token's bytes inside itself are checked once; between two tokens the last byte decides.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        sound = [_sound(piece) for piece in self._pieces]
        self._after = {
            lead: pack_mask(
                [
                    ok and bool(p) and low <= p[0] <= high
                    for ok, p in zip(sound, self._pieces, strict=True)
                ]
            )
            for lead, (low, high) in _SECOND_BYTES.items()
        }
        ends = set(vocabulary.end_ids)
        self._anywhere = pack_mask([ok or i in ends for i, ok in enumerate(sound)])

    def after(self, token: int | None) -> Words:
        """What may follow `token`, packed; None at the start."""
        piece = self._pieces[token] if token is not None else b""
        return self._after.get(piece[-1], self._anywhere) if piece else self._anywhere


def pack_mask(allowed: Sequence[bool]) -> Words:
    """Bit i % 32 of int32 word i // 32 says whether token i is allowed."""
    bits = np.packbits(np.asarray(allowed, np.bool_), bitorder="little")
    words = np.zeros(-(-len(allowed) // 32), np.int32)
    words.view(np.uint8)[: bits.size] = bits
    return words


def _sound(piece: bytes) -> bool:
    """Whether a token's bytes can be part of UTF-8, whatever comes before and after."""
    for lead, byte in pairwise(piece):
        low, high = _SECOND_BYTES.get(lead, (0, 255))
        if not low <= byte <= high:
            return False
    return not any(byte in (0xC0, 0xC1) or byte > 0xF4 for byte in piece)


# Processor seconds of this thread that a grammar may take: for one mask, and per mask on average.
# A usual one takes 0.1 to 1 ms; an ambiguous one may take longer with every token.
MAX_SECONDS = 0.1
MEAN_SECONDS = 0.02
_SECONDS_AHEAD = 0.1


class Follower:
    """The state of one request's grammar after some output; moves forward and back as asked.

    Args:
        compiled: an `xgrammar.CompiledGrammar`.
        vocab_size: tokens of a mask.
        end_ids: what alone may follow a complete output.
    """

    def __init__(
        self, compiled: Any, rules: Utf8Rules, vocab_size: int, end_ids: tuple[int, ...]
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._rules = rules
        self._words = -(-vocab_size // 32)
        self._end_ids = frozenset(end_ids)
        ends = np.zeros(vocab_size, np.bool_)
        ends[list(end_ids)] = True
        self._ends_only = pack_mask(list(ends))
        self._accepted: list[int] = []
        self._masks = 0
        self._seconds = 0.0

    def allowed(self, output: Sequence[int]) -> Words | None:
        """What may follow `output`, packed int32.

        None when `output` breaks the grammar or goes on after its end: then it is a row behind a
        draft that will be refused, and its target never counts.

        Raises:
            RequestError: the grammar takes too long.
        """
        began = time.thread_time()
        mask = self._mask(output)
        self._charge(time.thread_time() - began)
        return mask

    def _charge(self, seconds: float) -> None:
        self._masks += 1
        self._seconds += seconds
        if seconds > MAX_SECONDS or self._seconds > _SECONDS_AHEAD + MEAN_SECONDS * self._masks:
            raise RequestError(
                f"the JSON schema is too ambiguous to follow: {1000 * seconds:.0f} ms for token "
                f"{self._masks}; use patterns in which one thing can be matched in one way",
                param="response_format",
                code="invalid_schema",
            )

    def _mask(self, output: Sequence[int]) -> Words | None:
        self._back(_common(self._accepted, output))
        for token in output[len(self._accepted) :]:
            if token in self._end_ids:
                return self._ends_only if self._matcher.is_completed() else None
            if not self._matcher.accept_token(token):
                return None
            self._accepted.append(token)
        mask = torch.zeros((1, self._words), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        words: Words = mask.numpy()[0]
        words &= self._rules.after(output[-1] if output else None)
        return words

    def _back(self, length: int) -> None:
        surplus = len(self._accepted) - length
        if surplus > 0:
            self._matcher.rollback(surplus)
            del self._accepted[length:]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix; the usual case, one continues the other, is one comparison."""
    size = min(len(first), len(second))
    if list(first[:size]) == list(second[:size]):
        return size
    return next(i for i in range(size) if first[i] != second[i])
