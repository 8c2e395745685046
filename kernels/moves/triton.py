"""All rows of up to four pairs of tensors in one launch: what a slot holds is in several pools."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_guard import guard

BLOCK = 2048
PAIRS = 4
LARGEST = 1 << 26


@triton.jit
def _copy(
    p_source: tl.tensor,
    p_target: tl.tensor,
    source_offset: tl.tensor,
    target_offset: tl.tensor,
    chunk: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    o_word = chunk * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < width
    b_row = tl.load(p_source + source_offset + o_word, mask=m_word)
    tl.store(p_target + target_offset + o_word, b_row, mask=m_word)


# Indices are pieces of one transfer: their alignment must not make another kernel.
@triton.jit(do_not_specialize_on_alignment=["p_src", "p_dst"])
def _move_rows(
    p_source0: tl.tensor,
    p_source1: tl.tensor,
    p_source2: tl.tensor,
    p_source3: tl.tensor,
    p_target0: tl.tensor,
    p_target1: tl.tensor,
    p_target2: tl.tensor,
    p_target3: tl.tensor,
    p_src: tl.tensor,
    p_dst: tl.tensor,
    layers: tl.tensor,
    source_layer0: tl.tensor,
    source_layer1: tl.tensor,
    source_layer2: tl.tensor,
    source_layer3: tl.tensor,
    source_slot0: tl.tensor,
    source_slot1: tl.tensor,
    source_slot2: tl.tensor,
    source_slot3: tl.tensor,
    target_layer0: tl.tensor,
    target_layer1: tl.tensor,
    target_layer2: tl.tensor,
    target_layer3: tl.tensor,
    target_slot0: tl.tensor,
    target_slot1: tl.tensor,
    target_slot2: tl.tensor,
    target_slot3: tl.tensor,
    width0: tl.tensor,
    width1: tl.tensor,
    width2: tl.tensor,
    width3: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    move = tl.program_id(0) // layers
    layer = (tl.program_id(0) % layers).to(tl.int64)
    src = tl.load(p_src + move)
    dst = tl.load(p_dst + move)
    chunk = tl.program_id(1)
    end0 = tl.cdiv(width0, BLOCK)
    end1 = end0 + tl.cdiv(width1, BLOCK)
    end2 = end1 + tl.cdiv(width2, BLOCK)
    if chunk < end0:
        source = layer * source_layer0 + src * source_slot0
        target = layer * target_layer0 + dst * target_slot0
        _copy(p_source0, p_target0, source, target, chunk, width0, BLOCK)
    elif chunk < end1:
        source = layer * source_layer1 + src * source_slot1
        target = layer * target_layer1 + dst * target_slot1
        _copy(p_source1, p_target1, source, target, chunk - end0, width1, BLOCK)
    elif chunk < end2:
        source = layer * source_layer2 + src * source_slot2
        target = layer * target_layer2 + dst * target_slot2
        _copy(p_source2, p_target2, source, target, chunk - end1, width2, BLOCK)
    else:
        source = layer * source_layer3 + src * source_slot3
        target = layer * target_layer3 + dst * target_slot3
        _copy(p_source3, p_target3, source, target, chunk - end2, width3, BLOCK)


def move_rows(
    sources: Sequence[Tensor], targets: Sequence[Tensor], src: Tensor, dst: Tensor
) -> None:
    """As naive.move_rows; a row lies in one piece, and rows and slots may be apart.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, row or device.
    """
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s[0, 0].numel()]
    for source, target in pairs:
        guard("move_rows", source, source[0, 0].numel(), LARGEST, "numbers in a row")
        assert source.dtype == target.dtype
        assert source.shape[2:] == target.shape[2:]
        assert source.shape[0] == target.shape[0] == pairs[0][0].shape[0]
        assert source[0, 0].is_contiguous()
        assert target[0, 0].is_contiguous()
    if src.numel():
        for first in range(0, len(pairs), PAIRS):
            _launch(pairs[first : first + PAIRS], src, dst)


def _launch(pairs: list[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor) -> None:
    # Absent pairs are the first one again with rows of no numbers: one compiled kernel for all.
    widths = [s[0, 0].numel() for s, _ in pairs] + [0] * (PAIRS - len(pairs))
    filled = pairs + pairs[:1] * (PAIRS - len(pairs))
    layers = filled[0][0].shape[0]
    chunks = sum(triton.cdiv(width, BLOCK) for width in widths)
    _move_rows[src.numel() * layers, chunks](
        *(s for s, _ in filled),
        *(t for _, t in filled),
        src,
        dst,
        layers,
        *(s.stride(0) for s, _ in filled),
        *(s.stride(1) for s, _ in filled),
        *(t.stride(0) for _, t in filled),
        *(t.stride(1) for _, t in filled),
        *widths,
        BLOCK=BLOCK,
        num_warps=8,
    )
