"""Every sampling control on rows of logits, and that a row does not feel its batch (C06, C21)."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import InvariantError
from engine.request import SamplingParams
from engine.sampling.sampler import SampledRows, Sampler, accepted_burst
from engine.sampling.state import SamplingRow, SamplingState

VOCAB = 50
END = 7


def row(
    generated: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1, 2),
    drafts: tuple[int, ...] = (),
    *,
    temperature: float = 0.0,
    **params: Any,
) -> SamplingRow:
    settings = SamplingParams(max_tokens=99, temperature=temperature, **params)
    state = SamplingState(settings, prompt, list(generated), frozenset({END}))
    return SamplingRow(state, len(generated) + len(drafts), drafts)


def sample(
    logits: Any, *rows: SamplingRow, allowed: Mapping[int, Any] | None = None
) -> SampledRows:
    tensor = torch.as_tensor(np.asarray(logits, np.float32)).reshape(len(rows), -1)
    return Sampler(tensor.shape[1]).sample(tensor, rows, allowed)


def noise(rows: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def frequencies(logits: np.ndarray, draws: int = 4000, **params: Any) -> np.ndarray:
    """How often each token is drawn over many positions of one seed."""
    rows = []
    for position in range(draws):
        state = SamplingState(SamplingParams(999, **params), (1,), [], frozenset())
        rows.append(SamplingRow(state, position))
    tokens = sample(np.repeat(logits[None], draws, 0), *rows).tokens
    return np.bincount(tokens, minlength=logits.size) / draws


def softmax(logits: np.ndarray) -> np.ndarray:
    exact = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exact / exact.sum())


# ---- greedy and temperature ------------------------------------------------------------------


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert sample([[0, 3, 3, 1], [5, 5, 5, 5]], row(), row()).tokens == [1, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-4])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = noise(64) * 1000
    rows = [row(temperature=temperature, seed=i) for i in range(64)]
    assert sample(logits, *rows).tokens == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.002, 1.0, 1e6])
def test_extreme_logits_and_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([[-3e38, 3e38, 0.0, -np.inf]], np.float32)
    (token,) = sample(logits, row(temperature=temperature, top_p=0.999)).tokens
    assert token == 1


@pytest.mark.parametrize("params", [{}, {"top_k": VOCAB}, {"min_p": 1e-30}])
def test_draws_follow_the_softmax(params: dict[str, Any]) -> None:
    logits = noise(1)[0] / 3
    for temperature in (0.7, 1.5):
        expected = softmax(logits / temperature)
        seen = frequencies(logits, temperature=temperature, seed=3, **params)
        assert np.abs(seen - expected).max() < 5 * math.sqrt(0.25 / 4000)
        assert np.abs(seen - expected).sum() < 0.15


def test_a_plain_and_a_shaped_row_draw_the_same_token() -> None:
    logits = noise(40)
    plain = [row(temperature=0.9, seed=i) for i in range(40)]
    shaped = [row(temperature=0.9, seed=i, top_k=VOCAB) for i in range(40)]
    assert sample(logits, *plain).tokens == sample(logits, *shaped).tokens


# ---- filters ---------------------------------------------------------------------------------


def test_top_k_keeps_k_tokens_and_of_equals_the_lower_ids() -> None:
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    seen = frequencies(logits, temperature=1.0, top_k=2)
    assert (seen > 0).tolist() == [False, True, True, False, False]
    assert frequencies(logits, 50, temperature=5.0, top_k=1)[1] == 1.0
    assert (frequencies(logits, temperature=9.0, top_k=99) > 0).all()


def test_top_p_keeps_the_smallest_set_with_the_mass() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    for top_p, kept in ((0.39, {1}), (0.6, {1, 2}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        seen = frequencies(logits, temperature=1.0, top_p=top_p)
        assert set(np.flatnonzero(seen).tolist()) == kept
    # The mass counts after the temperature.
    assert set(np.flatnonzero(frequencies(logits, temperature=0.05, top_p=0.9))) == {1}
    assert set(np.flatnonzero(frequencies(logits, 50, temperature=1.0, top_p=1e-9))) == {1}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.999999])
def test_top_p_agrees_with_a_full_sort(top_p: float) -> None:
    from engine.sampling.shaping import filter_weights

    for seed in range(20):
        logits = noise(1, 400, seed)[0]
        weights = np.exp(logits - logits.max())
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order].astype(np.float64))
        expected = set(order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1].tolist())
        filter_weights(weights, logits, row(temperature=1.0, top_p=top_p))
        assert set(np.flatnonzero(weights).tolist()) == expected


def test_min_p_drops_what_is_unlikely_beside_the_best() -> None:
    logits = np.log(np.array([0.02, 0.5, 0.28, 0.2], np.float32))
    seen = frequencies(logits, temperature=1.0, min_p=0.5)
    assert set(np.flatnonzero(seen).tolist()) == {1, 2}
    assert set(np.flatnonzero(frequencies(logits, 50, temperature=1.0, min_p=1.0))) == {1}


def test_filters_apply_in_order_top_k_then_top_p() -> None:
    # Of the two best (0.4 and 0.3) the first alone has 0.57 of their mass.
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    seen = frequencies(logits, temperature=1.0, top_k=2, top_p=0.55)
    assert set(np.flatnonzero(seen).tolist()) == {1}


# ---- bias, penalties, masks ------------------------------------------------------------------


def test_logit_bias_bans_and_forces_at_every_position_of_a_burst() -> None:
    logits = noise(4)
    best = logits.argmax(1)
    bursts = [row(drafts=(9,) * i, logit_bias=((int(best[i]), -100.0),)) for i in range(4)]
    second = np.argsort(-logits, axis=1)[:, 1].tolist()
    assert sample(logits, *bursts).tokens == second
    forced = [row(drafts=(9,) * i, logit_bias=((13, 100.0),)) for i in range(4)]
    assert sample(logits, *forced).tokens == [13] * 4


def test_penalties_by_their_formulas() -> None:
    logits = np.array([[2.0, -1.0, 0.5, 1.0]], np.float32)
    history = (0, 0, 2)  # 0 twice, 2 once; the prompt has 1

    def adjusted(**params: Any) -> list[float]:
        item = row(history, (1, 1), logprobs=4, **params)
        top = dict(sample(logits, item).logprobs[0].top)
        return [top[i] - top[3] + 1.0 for i in range(4)]  # token 3 is in neither

    assert adjusted(presence_penalty=0.5) == pytest.approx([1.5, -1.0, 0.0, 1.0])
    assert adjusted(frequency_penalty=0.5) == pytest.approx([1.0, -1.0, 0.0, 1.0])
    assert adjusted(repetition_penalty=2.0) == pytest.approx([1.0, -2.0, 0.25, 1.0])
    assert adjusted(presence_penalty=-1.0) == pytest.approx([3.0, -1.0, 1.5, 1.0])
    assert adjusted(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((0, 2.0),)) == (
        pytest.approx([0.0, -2.0, -0.75, 1.0])
    )


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 3},
        {"temperature": 0.9, "seed": 5, "frequency_penalty": 1.0, "top_p": 0.9},
        {"temperature": 0.9, "seed": 5},
    ],
)
def test_a_burst_row_equals_the_plain_row_of_the_same_prefix(params: dict[str, Any]) -> None:
    logits = noise(6) / 3
    logits[:, END] += 4.0
    history, drafts = (4, 4), (9, 4, 13)
    burst = [row(history, drafts=drafts[:i], logprobs=3, **params) for i in range(4)]
    plain = [row(history + drafts[:i], logprobs=3, **params) for i in range(4)]
    assert sample(logits[:4], *burst) == sample(logits[:4], *plain)


def test_penalty_counts_follow_the_generated_list() -> None:
    item = row((), frequency_penalty=1.0)
    logits = np.zeros((1, 4), np.float32)
    seen = []
    for _ in range(8):
        state = item.state
        (token,) = sample(logits, SamplingRow(state, len(state.generated))).tokens
        seen.append(token)
        state.generated.append(token)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_end_ids_are_masked_until_min_tokens_and_not_longer() -> None:
    logits = noise(12)
    logits[:, END] = 50.0
    rows = [row((3,) * i, min_tokens=10) for i in range(12)]
    tokens = sample(logits, *rows).tokens
    assert END not in tokens[:10]
    assert tokens[10:] == [END, END]


def test_masks_allow_only_their_tokens_in_both_forms() -> None:
    logits = noise(3, 70)
    mask = np.zeros(70, np.bool_)
    mask[[3, 40, 69]] = True
    packed = np.zeros(3, np.int32)
    for token in (3, 40, 69):
        packed[token // 32] |= np.int32(1 << (token % 32))
    expected = np.where(mask, logits[:2], -np.inf).argmax(1).tolist()
    result = sample(logits, row(logprobs=5), row(), row(), allowed={0: mask, 1: packed})
    assert result.tokens == [*expected, int(logits[2].argmax())]
    assert {token for token, _ in result.logprobs[0].top} == {3, 40, 69}
    drawn = [
        sample(logits[:1], row(temperature=2.0, seed=i), allowed={0: mask}).tokens[0]
        for i in range(50)
    ]
    assert set(drawn) == {3, 40, 69}


def test_a_complete_grammar_ends_before_min_tokens() -> None:
    mask = np.zeros(VOCAB, np.bool_)
    mask[END] = True
    assert sample(noise(1), row(min_tokens=5), allowed={0: mask}).tokens == [END]


# ---- logprobs --------------------------------------------------------------------------------


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = noise(2)
    expected = np.log(softmax(logits[0]))
    rows = (row(temperature=0.3, seed=1, logprobs=4, top_k=3), row(logprobs=0))
    result = sample(logits, *rows)
    entry = result.logprobs[0]
    assert entry.logprob == pytest.approx(expected[result.tokens[0]], abs=1e-9)
    order = np.argsort(-logits[0], kind="stable")[:4]
    assert [token for token, _ in entry.top] == order.tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected[order].tolist(), abs=1e-9)
    assert result.logprobs[1].top == ()
    best = float(np.log(softmax(logits[1])).max())
    assert result.logprobs[1].logprob == pytest.approx(best, abs=1e-9)


def test_equal_logprobs_come_by_rising_id_and_more_than_all_is_all() -> None:
    result = sample([[1.0, 2.0, 2.0, 2.0]], row(logprobs=2))
    assert [token for token, _ in result.logprobs[0].top] == [1, 2]
    result = sample([[1.0, 2.0, 2.0, 2.0]], row(logprobs=20))
    assert [token for token, _ in result.logprobs[0].top] == [1, 2, 3, 0]


# ---- batches ---------------------------------------------------------------------------------


def every_kind() -> list[SamplingRow]:
    return [
        row(),
        row(temperature=0.8, seed=11),
        row(temperature=0.8, seed=12, top_p=0.9),
        row(temperature=1.3, seed=13, top_k=7, min_p=0.01, logprobs=5),
        row((4, 4, 9), frequency_penalty=1.0, repetition_penalty=1.2, logprobs=0),
        row((4,), temperature=2.0, seed=14),
        row((), min_tokens=4, logprobs=2),
        row(temperature=0.7, seed=15, logit_bias=((3, 5.0),)),
    ]


@pytest.mark.parametrize("vocab", [50, 97, 2047, 2048])
def test_a_row_is_bitwise_the_same_in_any_batch(vocab: int) -> None:
    kinds = every_kind() * 16
    logits = noise(len(kinds), vocab, seed=vocab)
    together = sample(logits, *kinds)
    order = np.random.default_rng(1).permutation(len(kinds))
    shuffled = sample(logits[order], *[kinds[i] for i in order])
    for place, index in enumerate(order.tolist()):
        alone = sample(logits[index : index + 1], kinds[index])
        assert alone.tokens[0] == together.tokens[index] == shuffled.tokens[place]
        assert alone.logprobs.get(0) == together.logprobs.get(index) == shuffled.logprobs.get(place)


def test_seed_and_position_alone_choose_the_draw() -> None:
    logits = np.repeat(noise(1), 200, 0) / 3
    rows = [row((1,) * (i % 100), temperature=1.0, seed=i // 100) for i in range(200)]
    first, again = sample(logits, *rows).tokens, sample(logits, *rows).tokens
    assert first == again
    assert first[:100] != first[100:]
    assert len(set(first)) > 10


def test_rows_without_a_finite_maximum_fail_alone() -> None:
    logits = noise(5)
    logits[1, 4] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    rows = [row(temperature=t, seed=2) for t in (1.0, 1.0, 0.0, 1.0, 1.0)]
    result = sample(logits, *rows)
    assert result.failed == {1, 2, 3}
    assert result.tokens[0] == sample(logits[:1], rows[0]).tokens[0]
    assert result.tokens[4] == sample(logits[4:], rows[4]).tokens[0]
    nothing = np.zeros(VOCAB, np.bool_)
    assert sample(noise(1), row(), allowed={0: nothing}).failed == {0}


def test_logits_must_match_their_rows() -> None:
    with pytest.raises(InvariantError, match=r"shape \(2, 50\) for 1 rows"):
        Sampler(50).sample(torch.zeros(2, 50), [row()])
    assert Sampler(50).sample(torch.zeros(0, 50), []) == SampledRows([], {}, frozenset())


def test_a_burst_ends_behind_the_first_wrong_draft() -> None:
    assert accepted_burst((), [4]) == [4]
    assert accepted_burst((5, 6), [5, 6, 7]) == [5, 6, 7]
    assert accepted_burst((5, 6), [5, 9, 7]) == [5, 9]
    assert accepted_burst((5, 6), [8, 6, 7]) == [8]


@pytest.mark.parametrize(("temperature", "limit_ms"), [(0.0, 1.0), (0.8, 3.0)])
def test_128_plain_rows_are_drawn_in_little_time(temperature: float, limit_ms: float) -> None:
    logits = torch.from_numpy(noise(128, 2048))
    rows = [row((1,) * 20, temperature=temperature, seed=i) for i in range(128)]
    sampler = Sampler(2048)
    best = math.inf
    for _ in range(30):
        start = time.thread_time()
        sampler.sample(logits, rows)
        best = min(best, time.thread_time() - start)
    assert best * 1e3 < limit_ms
