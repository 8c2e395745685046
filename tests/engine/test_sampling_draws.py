"""The counter-based generator against published values, and the inverse CDF's edges."""

import numpy as np
import pytest

from engine.sampling.draws import inverse_cdf, philox4x32, uniforms


def words(*values: int) -> list[np.ndarray]:
    return [np.array([value], np.uint64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known-answer vectors of philox4x32-10 that the Random123 library publishes.
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c, k = words(*counter), words(*key)
    result = philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert tuple(int(word[0]) for word in result) == expected


def test_a_uniform_is_the_top_53_bits_of_the_first_two_words() -> None:
    (u,) = uniforms(*words(0, 0))
    assert u == (0x6627E8D5E169C58D >> 11) * 2.0**-53


def test_uniforms_depend_on_their_own_pair_only() -> None:
    seeds = np.array([0, 1, 1, 2**64 - 1, 2**32], np.uint64)
    positions = np.array([0, 0, 1, 2**40, 0], np.uint64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5


def test_uniforms_are_uniform() -> None:
    n = 100_000
    u = uniforms(np.full(n, 42, np.uint64), np.arange(n, dtype=np.uint64))
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    chi_square = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    assert chi_square < 50  # 19 degrees of freedom: 43.8 has probability 0.001
    assert abs(float(np.corrcoef(u[:-1], u[1:])[0, 1])) < 0.02


def test_the_draw_never_takes_a_token_of_weight_zero() -> None:
    weights = np.array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 1e-30]], np.float32)
    largest = np.nextafter(1.0, 0.0)
    assert inverse_cdf(weights, np.array([0.0, 0.0])).tolist() == [1, 4]
    assert inverse_cdf(weights, np.array([largest, largest])).tolist() == [3, 4]
    assert inverse_cdf(weights[:1], np.array([1 / 3 - 1e-9])).tolist() == [1]
    assert inverse_cdf(weights[:1], np.array([1 / 3 + 1e-9])).tolist() == [3]
