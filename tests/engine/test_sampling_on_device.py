"""Draws by tensor operations give the host's tokens, and a row does not feel its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.on_device import draw_on_device
from engine.sampling.sampler import Sampler
from engine.sampling.state import SamplingRow, SamplingState

VOCAB = 300


def row(seed: int, position: int = 0, **params: Any) -> SamplingRow:
    settings = SamplingParams(**({"max_tokens": 9, "temperature": 0.8, "seed": seed} | params))
    return SamplingRow(SamplingState(settings, (1, 2), [5, 5], frozenset({7})), position)


def noise(rows: int, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, vocab, generator=generator) * 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1e-2},
        {"temperature": 100.0},
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": VOCAB + 1},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    ],
)
def test_the_same_tokens_as_on_the_host(params: dict[str, Any]) -> None:
    rows = [row(seed, seed % 5, **params) for seed in range(400)]
    logits = noise(400)
    found, failed, _ = draw_on_device(logits, rows, [])
    assert found == Sampler(VOCAB).sample(logits, rows).tokens
    assert failed == []


def test_equal_tokens_are_cut_by_rising_id() -> None:
    logits = torch.zeros(200, 8)
    rows = [row(seed, top_k=3, top_p=0.6) for seed in range(200)]
    found, _, _ = draw_on_device(logits, rows, [])
    assert set(found) == {0, 1}
    assert found == Sampler(8).sample(logits, rows).tokens


def test_a_row_is_the_same_alone_and_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"temperature": 0.0}, {"top_k": 9}]
    rows = [row(seed, **kinds[seed % 4]) for seed in range(33)]
    logits = noise(33)
    whole, _, _ = draw_on_device(logits, rows, [])
    alone = [draw_on_device(logits[i : i + 1], rows[i : i + 1], [])[0][0] for i in range(33)]
    assert whole == alone
    monkeypatch.setattr("engine.sampling.on_device._CHUNK_ELEMENTS", 5 * VOCAB)
    assert draw_on_device(logits, rows, [])[0] == whole


def test_draws_follow_the_weights() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).repeat(8000, 1)
    rows = [row(3, position, temperature=1.0) for position in range(8000)]
    found, _, _ = draw_on_device(logits, rows, [])
    shares = np.bincount(found, minlength=4) / 8000
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.02)


def test_rows_that_a_request_shapes_go_to_the_host() -> None:
    mask = np.zeros(VOCAB, np.bool_)
    mask[[3, 4]] = True
    rows = [
        row(0),
        row(1, presence_penalty=0.5, temperature=0.0),
        row(2, logprobs=2),
        row(3, temperature=0.0),
        row(4, temperature=0.0),
        row(5, logit_bias=((9, 100.0),), logprobs=0),
    ]
    logits = noise(6)
    logits[3, 0] = torch.nan
    sampler = Sampler(VOCAB)
    host = sampler.sample(logits, rows, {4: mask})
    found = sampler._sample_on_device(logits, rows, {4: mask}, [1, 2, 4, 5])
    assert found.failed == host.failed == {3}
    assert [t for i, t in enumerate(found.tokens) if i != 3] == [
        t for i, t in enumerate(host.tokens) if i != 3
    ]
    assert found.logprobs == host.logprobs
    assert found.tokens[5] == 9
