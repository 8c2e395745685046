"""Documents to packed rows of token ids with loss weights; knows the chat markup, not the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from benchmarks.tiny import tokenizer as tok
from benchmarks.tiny.corpus import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Loss weight of a token by who says it. What the server itself writes
#: into the prompt weighs nothing.
_ASSISTANT, _USER, _SYSTEM = 1.0, 0.1, 0.0
#: What lies between turns and documents is learned a little, so that a run that ignores the stop
#: tokens goes on with another turn.
_BETWEEN = 0.1


class Encoder:
    """Turns documents into (ids, weights); `weights[t]` is the loss weight of token t."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._id = tok.token_ids(tokenizer)
        self._assistant, self._user = (
            int(tokenizer.convert_tokens_to_ids(word)) for word in ("assistant", "user")
        )

    @property
    def end(self) -> int:
        """The id that separates documents and pads rows."""
        return self._id["<|endoftext|>"]

    def encode(self, doc: Document) -> tuple[list[int], list[float]]:
        """Ids and weights of one document, ending with <|endoftext|>."""
        ids = list(
            self._tokenizer(tok.render(self._tokenizer, doc), add_special_tokens=False)["input_ids"]
        )
        if doc.text:
            return ids, [_BETWEEN] + [1.0] * (len(ids) - 1)
        return [*ids, self.end], [*self._weights(ids), _BETWEEN]

    def _weights(self, ids: list[int]) -> list[float]:
        weights, weight, i = [0.0] * len(ids), 0.0, 0
        while i < len(ids):
            if ids[i] == self._id["<|im_start|>"]:  # <|im_start|> role newline
                weight = {self._assistant: _ASSISTANT, self._user: _USER}.get(ids[i + 1], _SYSTEM)
                weights[i : i + 3] = [_BETWEEN if weight else _SYSTEM] * 3
                i += 3
                if weight == _ASSISTANT and ids[i] == self._id["<think>"]:
                    i += (
                        4 if ids[i + 2] == self._id["</think>"] else 2
                    )  # what the generation prompt already says
                continue
            weights[i] = weight
            if ids[i] == self._id["<|im_end|>"]:
                weight = _BETWEEN  # the newline after it
            i += 1
        return weights


def rows(
    encoder: Encoder, docs: Iterator[Document], length: int, patience: int = 4
) -> Iterator[tuple[list[int], list[float]]]:
    """Rows of `length` tokens, each starting with a fresh document.

    A document that does not fit into what is left of a row starts a later one.
    """
    waiting: deque[tuple[list[int], list[float]]] = deque()
    while True:
        ids, weights = waiting.popleft() if waiting else encoder.encode(next(docs))
        misses = 0
        while len(ids) < length and misses < patience and len(waiting) < 64:
            more = encoder.encode(next(docs))
            if len(ids) + len(more[0]) <= length:
                ids, weights = ids + more[0], weights + more[1]
            else:
                waiting.append(more)
                misses += 1
        pad = max(0, length - len(ids))
        yield (ids + [encoder.end] * pad)[:length], (weights + [0.0] * pad)[:length]


def batch(
    source: Iterator[tuple[list[int], list[float]]], n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next n rows: ids [n, T] int64, weights [n, T] float32."""
    picked = [next(source) for _ in range(n)]
    return torch.tensor([ids for ids, _ in picked]), torch.tensor(
        [weights for _, weights in picked]
    )
