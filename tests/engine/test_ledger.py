"""Ledger and sizes: totals, the largest term, comparison with what was allocated, spellings."""

from __future__ import annotations

import json

import pytest

from engine.errors import ConfigError, InvariantError
from engine.reserve.ledger import LedgerTerm, MemoryLedger, TermKind
from engine.reserve.sizes import format_bytes, parse_size

STATE = LedgerTerm("state pool", 100, TermKind.EXACT, "2 blobs of 50")
KV = LedgerTerm("KV pool", 300, TermKind.EXACT, "3 blocks of 100")
RING = LedgerTerm("carry ring", 0, TermKind.EXACT, "no speculation")
SCRATCH = LedgerTerm("scratch", 250, TermKind.ESTIMATE, "5 rows of 50")
LEDGER = MemoryLedger((STATE, KV, RING, SCRATCH))


def test_totals_and_the_largest_term() -> None:
    assert LEDGER.total == 650
    assert LEDGER.exact == 400
    assert LEDGER.largest() == KV
    assert LEDGER.bytes_of("scratch") == 250


def test_as_dict_is_json_with_name_bytes_kind_why() -> None:
    parsed = json.loads(json.dumps(LEDGER.as_dict()))
    assert parsed["total_bytes"] == 650
    assert parsed["terms"][3] == {
        "name": "scratch",
        "bytes": 250,
        "kind": "estimate",
        "why": "5 rows of 50",
    }


def test_equal_allocation_passes_whatever_the_estimates_came_to() -> None:
    LEDGER.check_allocated({"state pool": 100, "KV pool": 300, "scratch": 999})


@pytest.mark.parametrize(
    ("allocated", "words"),
    [
        ({"state pool": 101, "KV pool": 300}, ["state pool", "100", "101"]),
        ({"state pool": 100}, ["KV pool", "300", "0"]),
        ({"state pool": 100, "KV pool": 300, "carry ring": 4}, ["carry ring", "0", "4"]),
        ({"state pool": 100, "KV pool": 300, "surprise": 7}, ["surprise", "7"]),
    ],
)
def test_a_difference_names_the_term_and_both_numbers(
    allocated: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(InvariantError) as caught:
        LEDGER.check_allocated(allocated)
    for word in words:
        assert word in str(caught.value)


def test_a_term_below_zero_and_a_name_used_twice_are_bugs() -> None:
    with pytest.raises(InvariantError, match="-1 bytes"):
        LedgerTerm("KV pool", -1, TermKind.EXACT, "")
    with pytest.raises(InvariantError, match="KV pool 2 times"):
        MemoryLedger((KV, KV))
    with pytest.raises(InvariantError, match="no term ring"):
        LEDGER.bytes_of("ring")
    with pytest.raises(InvariantError, match="empty"):
        MemoryLedger(()).largest()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1.5GiB", 1610612736),
        ("800MB", 800_000_000),
        (" 800 mb ", 800_000_000),
        ("1048576", 1048576),
        ("12B", 12),
        ("0", 0),
        ("2KiB", 2048),
        ("0.1TiB", 109951162777),
        (4096, 4096),
    ],
)
def test_sizes_as_people_write_them(text: str | int, want: int) -> None:
    assert parse_size(text) == want


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("80%", "--gpu-memory-utilization 0.8"),
        ("62.5%", "--gpu-memory-utilization 0.625"),
        ("-1GiB", "negative"),
        ("1.5", "fraction of a byte"),
        ("3 parsecs", "unknown unit 'parsecs'"),
        ("much", "1.5GiB"),
        ("", "no size"),
        ("1e9", "no size"),
    ],
)
def test_what_is_no_size_says_what_would_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "want"),
    [(12, "12 B"), (4096, "4.0 KiB"), (158859264, "151.5 MiB"), (18683527168, "17.40 GiB")],
)
def test_format_bytes(count: int, want: str) -> None:
    assert format_bytes(count) == want
