"""The numba form of the GDN mixer against the truth, and its exactness across splits and modes.

What is exact is so over states in float32 and in float16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.gdn import cpu, naive
from kernels.gdn.types import GdnParams, GdnState
from tests.kernels.scenes import (
    Mixer,
    Rows,
    clone_state,
    expect_states_set_aside,
    gdn_params,
    gdn_proj,
    gdn_state,
    half_state,
    make_batch,
)

MakeState = Callable[[GdnParams, int], GdnState]
of_both_widths = pytest.mark.parametrize(
    "make_state", [gdn_state, half_state], ids=["float32", "float16"]
)
# Hk, Hv, Dk, Dv; the last is no multiple of a vector's width in anything.
GEOMETRIES = [(2, 2, 16, 16), (2, 4, 64, 64), (1, 3, 32, 16), (1, 4, 16, 48), (2, 4, 7, 5)]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    "rows",
    [
        [Rows(0, 0, 1)],
        [Rows(2, 0, 3), Rows(0, 5, 1), Rows(1, 9, 4, committed=1, pending=2)],
        [Rows(1, 64, 65), Rows(0, 0, 2), Rows(3, 7, 1, pending=3)],
        [
            Rows(0, 7, 1),
            Rows(1, 64, 130, saves=((64, 1), (128, 2))),
            Rows(2, 0, 64, saves=((64, 0),)),
        ],
        [Rows(1, 3, 4, committed=4, pending=1), Rows(2, 8, 2, committed=1)],
        # Replay leaves all rows but the last, snapshot the state after each; a fold has no rows.
        [Rows(1, 6, 4, ring=(0, 3)), Rows(2, 8, 3, snapshot=2), Rows(0, 9, 0, pending=2)],
        # More rows that may be rejected than are prepared at once.
        [
            Rows(1, 3, 20, committed=5, ring=(5, 3)),
            Rows(2, 8, 17, committed=8, pending=3, ring=(8, 2)),
        ],
    ],
)
def test_cpu_equals_naive(geometry: tuple[int, int, int, int], rows: list[Rows]) -> None:
    params = gdn_params(*geometry)
    truth, state = gdn_state(params, 5), gdn_state(params, 5)
    batch = make_batch(rows)
    proj = gdn_proj(params, int(batch.row_start[-1]))
    want = naive.gdn_mixer(proj, params, truth, batch)
    got = cpu.gdn_mixer(proj, params, state, batch)
    close(got, want)
    close(state.h, truth.h)
    assert torch.equal(state.conv[:, :, 1:], truth.conv[:, :, 1:])
    assert torch.equal(state.ring_inputs, truth.ring_inputs)
    close(state.ring_gates, truth.ring_gates)
    close(state.snapshot_h, truth.snapshot_h)
    assert torch.equal(state.snapshot_conv[..., 1:], truth.snapshot_conv[..., 1:])
    for mine, right in ((state.saved_h, truth.saved_h), (state.saved_conv, truth.saved_conv)):
        assert mine is not None
        assert right is not None
        close(mine[..., 1:], right[..., 1:])


@of_both_widths
@pytest.mark.parametrize("mixer", [naive.gdn_mixer, cpu.gdn_mixer])
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_undoing_rejected_rows_gives_the_bits_of_plain_steps(
    make_state: MakeState, mixer: Mixer, mode: str, accepted: int
) -> None:
    params = gdn_params(2, 4, 32, 32)
    plain, state = make_state(params, 2), make_state(params, 2)
    proj = gdn_proj(params, 4)
    for t in range(accepted):
        mixer(proj[t : t + 1], params, plain, make_batch([Rows(0, 5 + t, 1)]))
    before = clone_state(state)
    rows = Rows(0, 5, 4, snapshot=1) if mode == "snapshot" else Rows(0, 5, 4, ring=(0, 3))
    mixer(proj, params, state, make_batch([rows]))
    if mode == "snapshot" and accepted < 4:
        state.h[0] = state.snapshot_h[1 + accepted - 1]
        state.conv[0] = state.snapshot_conv[0, accepted - 1]
    if mode == "replay" and accepted < 4:
        state.h[0], state.conv[0] = before.h[0], before.conv[0]
        mixer(proj[:0], params, state, make_batch([Rows(0, 5, 0, pending=accepted)]))
    assert torch.equal(state.h[0], plain.h[0])
    assert torch.equal(state.conv[0, :, 1:], plain.conv[0, :, 1:])


@pytest.mark.parametrize("length", [1, 2, 3, 31, 63, 64, 65, 128, 150])
def test_chunked_form_equals_recurrent_form(length: int) -> None:
    params = gdn_params(2, 6, 32, 32)
    one, two = gdn_state(params, 2), gdn_state(params, 2)
    proj = gdn_proj(params, length)
    recurrent = naive.gdn_mixer(proj, params, one, make_batch([Rows(0, 64, length)]))
    chunked = naive.gdn_mixer(proj, params, two, make_batch([Rows(0, 64, length, chunked=True)]))
    close(chunked, recurrent)
    close(two.h, one.h)
    assert torch.equal(two.conv, one.conv)


@pytest.mark.parametrize("splits", [[1] * 70, [7] * 10, [64, 6], [3, 67], [69, 1]])
def test_any_split_gives_the_same_bits(splits: list[int]) -> None:
    params = gdn_params(2, 4, 64, 64)
    whole, parts = gdn_state(params, 2), gdn_state(params, 2)
    proj = gdn_proj(params, 70)
    want = cpu.gdn_mixer(proj, params, whole, make_batch([Rows(1, 0, 70)]))
    start, got = 0, []
    for count in splits:
        batch = make_batch([Rows(1, start, count)])
        got.append(cpu.gdn_mixer(proj[start : start + count], params, parts, batch))
        start += count
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(parts.h, whole.h)
    assert torch.equal(parts.conv[:, :, 1:], whole.conv[:, :, 1:])


@of_both_widths
@pytest.mark.parametrize("mixer", [naive.gdn_mixer, cpu.gdn_mixer])
def test_states_set_aside_are_those_of_a_prompt_that_is_split(
    mixer: Mixer, make_state: MakeState
) -> None:
    params = gdn_params(2, 4, 32, 16)
    states = make_state(params, 2), make_state(params, 2)
    expect_states_set_aside(mixer, params, states, gdn_proj(params, 141), make_batch)


@of_both_widths
@pytest.mark.parametrize("emitted", [[1, 1, 1], [4, 4, 4], [2, 1, 4, 3], [3, 4, 1, 1]])
def test_carry_gives_the_bits_of_plain_steps(make_state: MakeState, emitted: list[int]) -> None:
    """Verify rows whose drafts are partly accepted, against one plain row at a time."""
    params = gdn_params(2, 4, 32, 32)
    plain, carry = make_state(params, 2), make_state(params, 2)
    total = sum(emitted)
    truth = gdn_proj(params, total + 1)
    wrong = gdn_proj(params, total + 8, seed=9)
    want = torch.cat(
        [
            cpu.gdn_mixer(truth[t : t + 1], params, plain, make_batch([Rows(0, 5 + t, 1)]))
            for t in range(total)
        ]
    )
    got, start, pending = [], 0, 0
    for count in emitted:
        rows = torch.cat((truth[start : start + count], wrong[start : start + 4 - count]))
        batch = make_batch([Rows(0, 5 + start, 4, committed=1, pending=pending)])
        got.append(cpu.gdn_mixer(rows, params, carry, batch)[:count])
        start, pending = start + count, count - 1
    assert torch.equal(torch.cat(got), want)
    # One more plain row folds what is pending: then the states agree as well.
    cpu.gdn_mixer(truth[total:], params, plain, make_batch([Rows(0, 5 + total, 1)]))
    last = make_batch([Rows(0, 5 + total, 1, pending=pending)])
    cpu.gdn_mixer(truth[total:], params, carry, last)
    assert torch.equal(carry.h[0], plain.h[0])
    assert torch.equal(carry.conv[0, :, 1:], plain.conv[0, :, 1:])


@of_both_widths
def test_neighbours_do_not_change_a_bit(make_state: MakeState) -> None:
    params = gdn_params(2, 4, 64, 64)
    alone, among = make_state(params, 5), make_state(params, 5)
    proj = gdn_proj(params, 9)
    want = cpu.gdn_mixer(proj[4:5], params, alone, make_batch([Rows(2, 6, 1)]))
    batch = make_batch([Rows(0, 0, 4), Rows(2, 6, 1), Rows(1, 4, 4, committed=1)])
    got = cpu.gdn_mixer(proj, params, among, batch)
    assert torch.equal(got[4:5], want)
    assert torch.equal(among.h[2], alone.h[2])


@pytest.mark.parametrize("mixer", [naive.gdn_mixer, cpu.gdn_mixer])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_first_rows_ignore_what_the_slot_holds(mixer: Mixer, length: int) -> None:
    params = gdn_params(1, 2, 16, 16)
    clean = gdn_state(params, 1)
    dirty = clone_state(clean)
    for tensor in (dirty.h, dirty.conv, dirty.ring_inputs, dirty.ring_gates):
        tensor.fill_(torch.nan)
    proj = gdn_proj(params, length)
    batch = make_batch([Rows(0, 0, length)])
    assert torch.equal(mixer(proj, params, dirty, batch), mixer(proj, params, clean, batch))
    assert torch.isfinite(dirty.h).all()
    assert torch.isfinite(dirty.conv).all()


def test_rows_of_a_wider_tensor_give_the_same_bits() -> None:
    params = gdn_params(1, 2, 16, 16)
    one, two = gdn_state(params, 1), gdn_state(params, 1)
    proj = gdn_proj(params, 3)
    wider = torch.cat((proj, torch.ones(3, 5)), 1)[:, :-5]
    assert not wider.is_contiguous()
    batch = make_batch([Rows(0, 5, 3)])
    assert torch.equal(
        cpu.gdn_mixer(wider, params, two, batch), cpu.gdn_mixer(proj, params, one, batch)
    )
    assert torch.equal(one.h, two.h)
