"""The GDN mixer in Triton: against float64, and bit for bit across rows, modes and neighbours."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.cases import relative_error
from kernels.errors import UnsupportedKernelError
from kernels.gdn import naive
from kernels.gdn.cases import in_float64, read_part
from kernels.gdn.triton import gdn_mixer
from kernels.gdn.triton_chunk import chunk_places, chunked_prefill
from kernels.gdn.triton_inputs import gdn_inputs
from kernels.gdn.types import GdnParams, GdnState
from tests.kernels import scenes
from tests.kernels.poison import DEVICE, poisoned_empty
from tests.kernels.scenes import Rows, clone_state, expect_states_set_aside

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make_params(*geometry: int) -> GdnParams:
    return scenes.moved(scenes.gdn_params(*geometry), DEVICE)


def make_state(params: GdnParams, slots: int) -> GdnState:
    return scenes.moved(scenes.gdn_state(params, slots), DEVICE)


def make_proj(params: GdnParams, rows: int, seed: int = 2) -> Tensor:
    return scenes.gdn_proj(params, rows, seed).to(DEVICE)


def make_batch(*rows: Rows) -> RaggedBatch:
    return scenes.moved(scenes.make_batch(list(rows)), DEVICE)


def check(params: GdnParams, dtype: torch.dtype, *rows: Rows) -> None:
    """Output and every part of the state, slot by slot, against naive in float64."""
    batch = make_batch(*rows)
    proj = make_proj(params, sum(r.count for r in rows)).to(dtype)
    state = make_state(params, 5)
    before, truth = clone_state(state), in_float64(state)
    got = gdn_mixer(proj, params, state, batch)
    want = naive.gdn_mixer(proj.double(), in_float64(params), truth, batch)
    assert got.dtype == dtype
    # Only the chunked form rounds operands of sums that reach the state.
    tolerance = TOLERANCE[dtype] if batch.prefills else 1e-5
    assert relative_error([got], [want]) < TOLERANCE[dtype]
    for mine, right, old in zip(read_part(state), read_part(truth), read_part(before), strict=True):
        for slot in range(mine.shape[0]):
            if torch.equal(right[slot], old[slot].double()):
                assert torch.equal(mine[slot], old[slot])
            else:
                assert relative_error([mine[slot]], [right[slot]]) < tolerance


GEOMETRIES = [(2, 2, 16, 16), (1, 2, 64, 32), (1, 3, 16, 64), (1, 4, 32, 16)]
STEPS = {
    "plain": [Rows(0, 0, 1), Rows(3, 7, 1)],
    "carry": [Rows(2, 0, 3), Rows(0, 5, 1), Rows(1, 9, 4, committed=1, pending=2)],
    "prompt": [Rows(1, 3, 2), Rows(3, 1, 1, pending=3)],
    # Replay leaves all rows but the last, snapshot the state after each; a fold has no rows.
    "replay": [Rows(1, 6, 4, ring=(0, 3)), Rows(2, 8, 3, snapshot=2), Rows(0, 9, 0, pending=2)],
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("step", list(STEPS))
def test_rows_against_float64(
    geometry: tuple[int, int, int, int], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = make_params(*geometry)
    poisoned_empty(monkeypatch)
    check(params, torch.float32, *STEPS[step])


@pytest.mark.parametrize("geometry", [(1, 1, 256, 16), (1, 1, 16, 256), (1, 1, 128, 128)])
def test_the_largest_heads(geometry: tuple[int, int, int, int]) -> None:
    check(make_params(*geometry), torch.float32, Rows(1, 9, 2, committed=1, pending=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_activations(dtype: torch.dtype) -> None:
    check(make_params(1, 2, 32, 32), dtype, *STEPS["carry"])


def plain_rows(params: GdnParams, state: GdnState, proj: Tensor, start: int) -> Tensor:
    """One committed row at a time in slot 0."""
    out = [
        gdn_mixer(proj[t : t + 1], params, state, make_batch(Rows(0, start + t, 1)))
        for t in range(len(proj))
    ]
    return torch.cat(out)


@pytest.mark.parametrize("emitted", [[4, 4], [2, 1, 3]])
def test_carry_gives_the_bits_of_plain_steps(emitted: list[int]) -> None:
    """Verify rows whose drafts are partly accepted, against one plain row at a time."""
    params = make_params(1, 2, 32, 32)
    plain, carry = make_state(params, 2), make_state(params, 2)
    total = sum(emitted)
    right, wrong = make_proj(params, total + 1), make_proj(params, 4, seed=9)
    want = plain_rows(params, plain, right, 5)
    got, start, pending = [], 0, 0
    for count in emitted:
        rows = torch.cat((right[start : start + count], wrong[count:]))
        batch = make_batch(Rows(0, 5 + start, 4, committed=1, pending=pending))
        got.append(gdn_mixer(rows, params, carry, batch)[:count])
        start, pending = start + count, count - 1
    # One more plain row folds what is pending: then the states agree as well.
    last = make_batch(Rows(0, 5 + total, 1, pending=pending))
    got.append(gdn_mixer(right[total:], params, carry, last))
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(carry.h[0], plain.h[0])
    assert torch.equal(carry.conv[0, :, 1:], plain.conv[0, :, 1:])


def test_a_float16_pool_is_rounded_behind_every_row() -> None:
    params = make_params(1, 1, 16, 16)
    plain, carry = (
        replace(s, h=s.h.half()) for s in (make_state(params, 1), make_state(params, 1))
    )
    proj = make_proj(params, 4)
    want = plain_rows(params, plain, proj, 5)
    assert torch.equal(gdn_mixer(proj, params, carry, make_batch(Rows(0, 5, 4, committed=1))), want)
    gdn_mixer(proj[:0], params, carry, make_batch(Rows(0, 6, 0, pending=3)))
    assert torch.equal(carry.h, plain.h)


def test_a_float16_pool_against_naive() -> None:
    """Both round behind every row, or behind every chunk of a prompt."""
    params = make_params(1, 2, 16, 16)
    state = make_state(params, 2)
    state = replace(state, h=state.h.half(), snapshot_h=state.snapshot_h.half())
    truth, proj = clone_state(state), make_proj(params, 68)
    batch = make_batch(Rows(0, 64, 65, chunked=True), Rows(1, 9, 3, snapshot=1))
    got = gdn_mixer(proj, params, state, batch)
    want = naive.gdn_mixer(proj, params, truth, batch)
    assert state.h.dtype == torch.float16
    # A sum that falls on the other side of a tie differs by 2^-11.
    assert relative_error([got], [want]) < 2e-4
    assert relative_error([state.h, state.snapshot_h], [truth.h, truth.snapshot_h]) < 2e-4


def test_a_float16_pool_is_cut_at_its_largest_and_keeps_what_is_not_finite() -> None:
    params = make_params(1, 1, 16, 16)
    params.decay.fill_(-1e-9)
    state = make_state(params, 1)
    state = replace(state, h=torch.full_like(state.h, 60000.0, dtype=torch.float16))
    proj = make_proj(params, 1)
    proj[:, -2] = 30.0
    proj[:, 32:48] *= 1e7
    gdn_mixer(proj, params, state, make_batch(Rows(0, 5, 1)))
    assert torch.isfinite(state.h).all()
    assert (state.h.abs() == 65504).any()
    state.h[0, 0, 0, 0] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gdn_mixer(proj, params, state, make_batch(Rows(0, 6, 1)))
    assert state.h.isnan().any()


@pytest.mark.parametrize("accepted", [1, 3])
@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_undoing_rejected_rows_gives_the_bits_of_plain_steps(mode: str, accepted: int) -> None:
    params = make_params(1, 2, 32, 32)
    plain, state = make_state(params, 2), make_state(params, 2)
    proj = make_proj(params, 4)
    want = plain_rows(params, plain, proj[:accepted], 5)
    before = clone_state(state)
    how = Rows(0, 5, 4, snapshot=1) if mode == "snapshot" else Rows(0, 5, 4, ring=(0, 3))
    got = gdn_mixer(proj, params, state, make_batch(how))
    if mode == "snapshot":
        state.h[0] = state.snapshot_h[1 + accepted - 1]
        state.conv[0] = state.snapshot_conv[0, accepted - 1]
    else:
        state.h[0], state.conv[0] = before.h[0], before.conv[0]
        fold = make_batch(Rows(0, 5, 0, pending=accepted))
        gdn_mixer(proj[:0], params, state, fold)
    assert torch.equal(got[:accepted], want)
    assert torch.equal(state.h[0], plain.h[0])
    assert torch.equal(state.conv[0, :, 1:], plain.conv[0, :, 1:])


def test_neighbours_do_not_change_a_bit() -> None:
    params = make_params(1, 2, 32, 32)
    alone, among = make_state(params, 5), make_state(params, 5)
    proj = make_proj(params, 9)
    want = gdn_mixer(proj[4:5], params, alone, make_batch(Rows(2, 6, 1)))
    batch = make_batch(Rows(0, 0, 4), Rows(2, 6, 1), Rows(1, 4, 4, committed=1))
    got = gdn_mixer(proj, params, among, batch)
    assert torch.equal(got[4:5], want)
    assert torch.equal(among.h[2], alone.h[2])
    assert torch.equal(among.h[3:], alone.h[3:])


@pytest.mark.parametrize("length", [1, 3])
def test_first_rows_ignore_what_the_slot_holds(length: int) -> None:
    params = make_params(1, 2, 16, 16)
    clean = make_state(params, 1)
    dirty = clone_state(clean)
    for tensor in (dirty.h, dirty.conv, dirty.ring_inputs, dirty.ring_gates):
        tensor.fill_(torch.nan)
    proj, batch = make_proj(params, length), make_batch(Rows(0, 0, length))
    want = gdn_mixer(proj, params, clean, batch)
    assert torch.equal(gdn_mixer(proj, params, dirty, batch), want)
    assert torch.isfinite(dirty.h).all()
    assert torch.isfinite(dirty.conv).all()


def test_padding_touches_only_the_dummy_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that fill a graph's bucket share a slot; rows that nobody owns become zero."""
    params = make_params(1, 2, 16, 16)
    state, exact = make_state(params, 4), make_state(params, 4)
    proj = make_proj(params, 7)
    want = gdn_mixer(proj[:2], params, exact, make_batch(Rows(0, 5, 1), Rows(2, 3, 1, pending=1)))
    poisoned_empty(monkeypatch)
    padded = make_batch(
        Rows(0, 5, 1), Rows(2, 3, 1, pending=1), Rows(3, 0, 1), Rows(3, 0, 1), Rows(1, 0, 0)
    )
    owners = torch.cat((padded.row_segment, padded.row_segment.new_full((3,), 4)))
    got = gdn_mixer(proj, params, state, replace(padded, row_segment=owners))
    assert torch.equal(got[:2], want)
    assert torch.equal(got[4:], torch.zeros_like(got[4:]))
    for mine, right in zip(read_part(state)[:4], read_part(exact)[:4], strict=True):
        assert torch.equal(mine[:3], right[:3])
        assert torch.isfinite(mine[3]).all()


def test_views_of_wider_tensors_give_the_same_bits() -> None:
    """Layers are views of one pool, and a projection may be a slice of a wider one."""
    params = make_params(1, 2, 16, 16)
    state, pool = make_state(params, 3), make_state(params, 6)
    view = GdnState(
        *(x[::2] for x in (pool.h, pool.conv, pool.ring_inputs, pool.ring_gates)),
        pool.snapshot_h[:6],
        pool.snapshot_conv[::2],
    )
    names = [f.name for f in fields(view) if getattr(view, f.name) is not None]
    for name in names:
        getattr(view, name).copy_(getattr(state, name))
    proj = make_proj(params, 4)
    wide = torch.full((4, proj.shape[1] + 5), torch.nan, device=DEVICE)
    wide[:, 3:-2] = proj
    batch = make_batch(Rows(1, 9, 4, committed=1, pending=2))
    want = gdn_mixer(proj, params, state, batch)
    assert torch.equal(gdn_mixer(wide[:, 3:-2], params, view, batch), want)
    for name in names:
        assert torch.equal(getattr(view, name), getattr(state, name))


def test_a_pool_without_rings_runs() -> None:
    params = make_params(1, 1, 16, 16)
    state = make_state(params, 2)
    none = replace(
        state, ring_inputs=state.ring_inputs[:0, :0], ring_gates=state.ring_gates[:0, :0]
    )
    proj, batch = make_proj(params, 3), make_batch(Rows(1, 4, 3))
    want = gdn_mixer(proj, params, clone_state(state), batch)
    assert torch.equal(gdn_mixer(proj, params, none, batch), want)


@pytest.mark.parametrize(
    ("geometry", "dtype", "message"),
    [
        (
            (1, 1, 16, 16),
            torch.float64,
            r"gdn_mixer .* torch.float64, head size 16, device \w+.*bfloat16",
        ),
        ((1, 1, 48, 16), torch.float32, "head size 48.*16, 32, 64, 128 and 256"),
        ((1, 1, 16, 512), torch.bfloat16, "head size 512"),
    ],
)
def test_what_has_no_kernel_is_refused(
    geometry: tuple[int, int, int, int], dtype: torch.dtype, message: str
) -> None:
    params = make_params(*geometry)
    proj = make_proj(params, 1).to(dtype)
    with pytest.raises(UnsupportedKernelError, match=message):
        gdn_mixer(proj, params, make_state(params, 1), make_batch(Rows(0, 0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_against_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts beside decode rows; a chunk that is not full must not decay the state."""
    params = make_params(1, 2, 16, 16)
    poisoned_empty(monkeypatch)
    prompts = [Rows(0, 0, 1, chunked=True), Rows(3, 64, 2, chunked=True)]
    decode = Rows(1, 9, 3, committed=1, pending=2)
    check(params, dtype, *prompts, decode, Rows(2, 128, 65, chunked=True))
    check(params, dtype, Rows(4, 0, 64, chunked=True), decode, Rows(0, 64, 3, chunked=True))
    check(params, dtype, Rows(4, 0, 63, chunked=True))


@pytest.mark.parametrize("geometry", [(1, 1, 64, 128), (1, 1, 128, 32), (1, 3, 32, 16)])
def test_chunks_of_other_heads(geometry: tuple[int, int, int, int]) -> None:
    check(make_params(*geometry), torch.float32, Rows(1, 64, 65, chunked=True))


def test_a_long_prompt() -> None:
    check(make_params(1, 1, 16, 16), torch.float32, Rows(1, 0, 500, chunked=True))


def test_equal_keys_without_decay() -> None:
    """A repeated token: the powers of A reach 1e17, its inverse only 1."""
    params = make_params(1, 1, 16, 16)
    params.decay.fill_(-1e-4)
    state, proj = make_state(params, 1), make_proj(params, 1).repeat(70, 1)
    proj[:, -2] = 20.0
    truth = in_float64(state)
    batch = make_batch(Rows(0, 64, 70, chunked=True))
    got = gdn_mixer(proj, params, state, batch)
    want = naive.gdn_mixer(proj.double(), in_float64(params), truth, batch)
    assert relative_error([got, state.h], [want, truth.h]) < 1e-5


def test_a_prompt_split_on_the_grid_gives_the_same_bits() -> None:
    params = make_params(1, 1, 16, 16)
    whole, parts = make_state(params, 2), make_state(params, 2)
    proj = make_proj(params, 130)
    want = gdn_mixer(proj, params, whole, make_batch(Rows(1, 0, 130, chunked=True)))
    start, got = 0, []
    for count in (64, 66):
        batch = make_batch(Rows(1, start, count, chunked=True))
        got.append(gdn_mixer(proj[start : start + count], params, parts, batch))
        start += count
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(parts.h, whole.h)
    assert torch.equal(parts.conv[..., 1:], whole.conv[..., 1:])


def test_states_set_aside_are_those_of_a_prompt_that_is_split() -> None:
    params = make_params(1, 2, 32, 16)
    states = make_state(params, 2), make_state(params, 2)
    expect_states_set_aside(
        gdn_mixer, params, states, make_proj(params, 141), lambda rows: make_batch(*rows)
    )


def test_prompts_and_decode_rows_do_not_change_each_other() -> None:
    params = make_params(1, 1, 16, 16)
    proj = make_proj(params, 72)
    prompt, verify = Rows(0, 0, 70, chunked=True), Rows(1, 7, 2, committed=1, pending=1)
    together, prompt_only, verify_only = (make_state(params, 2) for _ in range(3))
    got = gdn_mixer(proj, params, together, make_batch(prompt, verify))
    first = gdn_mixer(proj[:70], params, prompt_only, make_batch(prompt))
    second = gdn_mixer(proj[70:], params, verify_only, make_batch(verify))
    assert torch.equal(got, torch.cat((first, second)))
    assert torch.equal(together.h[0], prompt_only.h[0])
    assert torch.equal(together.h[1], verify_only.h[1])


def test_states_after_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(1, 1, 16, 16)
    prompts = [Rows(0, 0, 65, chunked=True), Rows(1, 64, 64, chunked=True)]
    state, proj, batch = make_state(params, 2), make_proj(params, 129), make_batch(*prompts)
    stopped = clone_state(state)
    states = torch.full((chunk_places(129, 2), *state.h.shape[1:]), torch.nan, device=DEVICE)
    inputs = gdn_inputs(proj, params, state, batch)
    chunked_prefill(inputs, state, batch, operand=torch.float32, states=states)
    gdn_mixer(proj[:64], params, stopped, make_batch(Rows(0, 0, 64, chunked=True)))
    assert torch.equal(states[0], stopped.h[0])
    assert torch.equal(states[1], state.h[0])
    # The second prompt begins at row 65: its places begin at 65 // 64 + 1.
    assert torch.equal(states[2], state.h[1])
    assert torch.isnan(states[3:]).all()


def test_slots_beyond_32_bits() -> None:
    """The second slot begins at element 2^31 of its tensor; only the pages that are used exist."""
    params = make_params(1, 1, 16, 16)
    state, far = make_state(params, 2), 2**31
    try:
        memory = torch.empty(far + 256, device=DEVICE)
    except RuntimeError:
        pytest.skip("8 GiB of address space are not to be had")
    h = memory.as_strided(state.h.shape, (far, *state.h.stride()[1:])).copy_(state.h)
    proj, batch = make_proj(params, 66), make_batch(Rows(1, 7, 1), Rows(0, 64, 65, chunked=True))
    other = replace(clone_state(state), h=h)
    want = gdn_mixer(proj, params, state, batch)
    assert torch.equal(gdn_mixer(proj, params, other, batch), want)
    assert torch.equal(h, state.h)
