"""Which tokens end a sentence or a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.grammar.vocabulary import load_vocabulary
from engine.watchdogs.boundaries import boundary_mask, ends_sentence_or_line

TINY = Path(__file__).resolve().parents[3] / "spark_server" / "assets" / "spark-tiny"


@pytest.mark.parametrize(
    "text", [".", "!", '?"', " end.", "\n", "x\n  ", "。", "...", ".)", "».", ".**", "؟", "…\n"]
)
def test_boundaries(text: str) -> None:
    assert ends_sentence_or_line(text.encode())


@pytest.mark.parametrize("text", ["", " ", "a", ".5", ",", ":", '"', ")", "e.g", "  "])
def test_others(text: str) -> None:
    assert not ends_sentence_or_line(text.encode())


def test_half_a_character_is_no_boundary_and_no_error() -> None:
    full_stop = "。".encode()
    assert [ends_sentence_or_line(full_stop[:n]) for n in range(4)] == [False, False, False, True]
    assert ends_sentence_or_line(full_stop[1:] + b".")
    assert not ends_sentence_or_line(b"\xff\xfe")


def test_the_mask_of_a_real_vocabulary() -> None:
    pieces = load_vocabulary(TINY, 2048, ()).pieces
    mask = boundary_mask(pieces)
    assert len(mask) == 2048
    marked = {pieces[i] for i in range(2048) if mask[i]}
    assert {b".", b"!", b"?", b"\n"} <= marked
    assert b" the" not in marked
    assert 5 < len(marked) < 100
