"""Products in the matrix registers of x86 CPUs that have them (AMX), of bfloat16 weights.

A float32 is the sum of two bfloat16, each the nearest to what is left, to 17 bits. Their products
with a bfloat16 weight are exact in float32, and are summed there, so that two multiplications of
tiles are a product with an error of 2.5e-6 of its largest number, where float32 itself has 0.5e-6
and activations in bfloat16 1.8e-3. A number of the result goes through the same operations in the
same order whatever the other rows are.

Instructions and the shape of tiles: Intel, Architectures Software Developer's Manual, volume 1,
chapter 18.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu_features import TILES
from kernels.jit import host, inline, parallel_kernel
from kernels.linear.form import COLUMNS, PIECES, ROWS, pieces_shape
from kernels.tiles import LANES, in_tiles

_ROW_BYTES = 64
_TILE_BYTES = ROWS * _ROW_BYTES
# Blocks of rows, and tiles of the matrix, that are multiplied at a time. Four registers hold sums,
# two rows, two the matrix.
_HEIGHT, _WIDTH = 2, 2
_SUMS, _LEFT, _RIGHT = 0, 4, 6
# Blocks of rows that are multiplied with all of the matrix before the next: they stay in the L2, as
# does the part of the matrix, in bytes, that a pair of blocks meets before the next pair does.
_CHUNK = 8
_PART_BYTES = 2**18
# Up to so many rows one thread takes apart; more are worth waking the others.
_FEW = 32

# Linux gives a process the registers' state only when it asks: ARCH_REQ_XCOMP_PERM, XTILE_DATA.
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18

_VOID, _I8 = ir.VoidType(), ir.IntType(8)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@cache
def usable() -> bool:
    """Whether this CPU multiplies tiles and the system lets this process do so."""
    if not TILES or sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0)


def fits(weight: Tensor) -> bool:
    """Whether weight [N, K] is bfloat16 and K a whole number of tiles."""
    rows, columns = weight.shape
    return weight.dtype == torch.bfloat16 and columns % COLUMNS == 0 and min(rows, columns) > 0


@dataclass(frozen=True, slots=True)
class TileLinear:
    """weight [N, K] bfloat16 in tiles, one after another; float32 inputs and sums."""

    weight: Tensor
    outputs: int
    shapes: Any
    nbytes: int
    form: str = "amx"

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N] float32."""
        rows, columns = x.shape
        out = torch.empty(rows, self.outputs)
        if not rows:
            return out
        # As torch.empty, since that begins at a line of the cache, which rows of tiles must do too.
        pieces = torch.empty(pieces_shape(rows, columns), dtype=torch.int16)
        _linear(
            x.contiguous().numpy(),
            host(self.weight),
            pieces.numpy(),
            self.shapes,
            numba.get_num_threads(),
            out.numpy(),
        )
        return out


def pack(weight: Tensor) -> TileLinear:
    """Put weight [N, K], which fits, into tiles."""
    assert usable(), "without leave the first product is an illegal instruction"
    outputs = weight.shape[0]
    whole = outputs - outputs % LANES
    # What is left is a tile of fewer rows.
    parts = in_tiles(weight[:whole]), in_tiles(weight[whole:], outputs - whole)
    tiles = torch.cat([part.flatten() for part in parts])
    shapes = _shapes(outputs % LANES, -(-outputs // LANES) % _WIDTH)
    return TileLinear(tiles, outputs, shapes, weight.numel() * weight.element_size())


@cache
def _shapes(rest: int, alone: int) -> Any:
    """[2, 1 + _HEIGHT * ROWS, 64] bytes: how many rows the registers have for as many of x.

    First for whole tiles of the matrix, then for its last _WIDTH tiles: the last has `rest` rows if
    that is not 0, and `alone` says that it stands in for the one before it too.
    """
    shapes = np.zeros((2, 1 + _HEIGHT * ROWS, 64), np.uint8)
    shapes[..., 0] = 1
    shapes[..., 16:32:2] = _ROW_BYTES
    for last, by_rows in enumerate(shapes):
        if last and rest:
            for register in range(0 if alone else 1, 8, 1 if alone else _WIDTH):
                if not _LEFT <= register < _RIGHT:
                    by_rows[:, 16 + 2 * register] = 4 * rest
        for rows, shape in enumerate(by_rows):
            # A register of no rows cannot be used, and one that is not used may have any.
            first, second = max(1, min(rows, ROWS)), max(1, rows - ROWS)
            shape[48:56] = (first, first, second, second, first, second, ROWS, ROWS)
    return shapes


def _instruct(builder: Any, name: str, *operands: Any) -> None:
    kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, operands)


def _bytes_at(builder: Any, pointer: Any, *offset: Any) -> Any:
    """The pointer as one to bytes, moved on."""
    at = builder.bitcast(pointer, _I8.as_pointer())
    return builder.gep(at, offset) if offset else at


@intrinsic
def _shape(typing_context: Any, shapes: Any, rows: Any) -> Any:
    """Give this thread's registers the shape of a row of _shapes(), flat."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        offset = builder.mul(args[1], args[1].type(64))
        _instruct(builder, "ldtilecfg", _bytes_at(builder, array.data, offset))
        return context.get_dummy_value()

    return types.void(shapes, types.intp), generate


@intrinsic
def _release(typing_context: Any) -> Any:
    """This thread needs no registers any more, so that the system need not keep them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _take_apart(typing_context: Any, x: Any, index: Any, pieces: Any, place: Any) -> Any:
    """Pieces of LANES numbers from a flat index of x on; a tile lies between two pieces."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, args[0])
        target = context.make_array(signature.args[2])(context, builder, args[2])
        at = builder.bitcast(builder.gep(source.data, [args[1]]), _FLOATS.as_pointer())
        rest, place = builder.load(at, align=4), args[3]
        for _ in range(PIECES):
            bits = builder.add(builder.bitcast(rest, _WORDS), _WORDS([0x8000] * LANES))
            half = builder.trunc(builder.lshr(bits, _WORDS([16] * LANES)), _HALVES)
            at = builder.bitcast(builder.gep(target.data, [place]), _HALVES.as_pointer())
            builder.store(half, at, align=2)
            upper = builder.and_(bits, _WORDS([0xFFFF0000] * LANES))
            rest = builder.fsub(rest, builder.bitcast(upper, _FLOATS))
            place = builder.add(place, place.type(ROWS * COLUMNS))
        return context.get_dummy_value()

    return types.void(x, types.intp, pieces, types.intp), generate


@intrinsic(prefer_literal=True)
def _multiply(
    typing_context: Any, weight: Any, tile: Any, pieces: Any, block: Any, height: Any, out: Any
) -> Any:
    """Write `height` (a constant) blocks of rows times _WIDTH tiles into out.

    weight: tiles [K / 2, 16] uint32, the last perhaps narrower; pieces [M / 16, K / 32, PIECES, 16,
    32]; out [M, N].
    """
    blocks = height.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, pieces, out = (
            context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 5)
        )
        tile, block = args[1], args[3]
        size = tile.type
        steps = cgutils.unpack_tuple(builder, pieces.shape, 5)[1]
        width = cgutils.unpack_tuple(builder, out.shape, 2)[1]
        last = builder.sdiv(builder.sub(width, size(1)), size(LANES))

        def times(*factors: Any) -> Any:
            product = factors[0]
            for factor in factors[1:]:
                product = builder.mul(product, size(factor) if type(factor) is int else factor)
            return product

        places = [tile]
        for i in range(1, _WIDTH):
            # Behind the last tile it is multiplied again, to the same sums.
            place = builder.add(tile, size(i))
            places.append(builder.select(builder.icmp_signed("<", place, last), place, last))
        rows = [builder.add(block, size(i)) for i in range(blocks)]
        narrow = builder.sub(times(width, 4), times(last, _ROW_BYTES))
        lines = [
            builder.select(builder.icmp_signed("<", place, last), size(_ROW_BYTES), narrow)
            for place in places
        ]
        right = [_bytes_at(builder, weight.data, times(p, steps, _TILE_BYTES)) for p in places]
        left = [
            _bytes_at(builder, pieces.data, times(r, steps, PIECES * _TILE_BYTES)) for r in rows
        ]
        line, sums = size(_ROW_BYTES), [_I8(_SUMS + i) for i in range(blocks * _WIDTH)]
        for register in sums:
            _instruct(builder, "tilezero", register)
        with cgutils.for_range(builder, steps) as loop:
            for n, (start, wide) in enumerate(zip(right, lines, strict=True)):
                at = _bytes_at(builder, start, times(loop.index, ROWS, wide))
                _instruct(builder, "tileloadd64", _I8(_RIGHT + n), at, wide)
            for piece in range(PIECES):
                for m, start in enumerate(left):
                    offset = times(loop.index, PIECES * _TILE_BYTES)
                    at = _bytes_at(builder, start, builder.add(offset, size(piece * _TILE_BYTES)))
                    _instruct(builder, "tileloadd64", _I8(_LEFT + m), at, line)
                    for n in range(_WIDTH):
                        operands = sums[m * _WIDTH + n], _I8(_LEFT + m), _I8(_RIGHT + n)
                        _instruct(builder, "tdpbf16ps", *operands)
        for m, row in enumerate(rows):
            for n, place in enumerate(places):
                first = builder.add(times(row, ROWS, width), times(place, LANES))
                at = _bytes_at(builder, builder.gep(out.data, [first]))
                _instruct(builder, "tilestored64", sums[m * _WIDTH + n], at, times(width, 4))
        return context.get_dummy_value()

    return types.void(weight, types.intp, pieces, types.intp, height, out), generate


@inline
def _take_row_apart(x: Any, row: Any, pieces: Any) -> None:
    steps, step = pieces.shape[1], PIECES * ROWS * COLUMNS
    place = (row // ROWS) * steps * step + (row % ROWS) * COLUMNS
    for k in range(steps):
        for half in range(0, COLUMNS, LANES):
            index = row * x.shape[1] + k * COLUMNS + half
            _take_apart(x, index, pieces, place + k * step + half)


@parallel_kernel
def _linear(x: Any, weight: Any, pieces: Any, shapes: Any, threads: Any, out: Any) -> None:
    """out [M, N] = x [M, K] times weight (see _multiply) transposed; `pieces` is scratch."""
    rows = x.shape[0]
    if rows <= _FEW:
        for row in range(rows):
            _take_row_apart(x, row, pieces)
    else:
        for row in prange(rows):
            _take_row_apart(x, row, pieces)
    groups = (out.shape[1] + _WIDTH * LANES - 1) // (_WIDTH * LANES)
    part = max(1, _PART_BYTES // (_WIDTH * LANES * x.shape[1] * 2))
    blocks = pieces.shape[0]
    items = groups * ((blocks + _CHUNK - 1) // _CHUNK)
    for thread in prange(threads):
        shaped = -1
        item, end = items * thread // threads, items * (thread + 1) // threads
        while item < end:
            first, group = item // groups * _CHUNK, item % groups
            behind = min(groups, group + part, group + end - item)
            for block in range(first, min(first + _CHUNK, blocks), _HEIGHT):
                here = min(rows - block * ROWS, _HEIGHT * ROWS)
                for g in range(group, behind):
                    shape = here + (shapes.shape[1] if g + 1 == groups else 0)
                    if shape != shaped:
                        _shape(shapes, shape)
                        shaped = shape
                    if here > ROWS:
                        _multiply(weight, g * _WIDTH, pieces, block, 2, out)
                    else:
                        _multiply(weight, g * _WIDTH, pieces, block, 1, out)
            item += behind - group
        _release()
