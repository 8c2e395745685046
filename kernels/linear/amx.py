"""Products in the matrix registers of x86 CPUs that have them (AMX), of bfloat16 weights.

A float32 is nearly the sum of two bfloat16, each the nearest to what is left: 16 bits. Their
products with a bfloat16 weight are exact in float32, and are summed there, so that two
multiplications of tiles are a product with an error of 2.5e-6 of its largest number, where float32
itself has 0.5e-6 and activations in bfloat16 1.8e-3. A number of the result goes through the same
operations in the same order whatever the other rows are.
"""

from __future__ import annotations

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

from kernels.cpu_features import TILE_ROW_BYTES, TILE_ROWS
from kernels.jit import host, inline, parallel_kernel
from kernels.linear.form import COLUMNS, PIECES, pieces_shape
from kernels.tile_registers import (
    bytes_at,
    instruct,
    release_registers,
    shape_registers,
    usable,
    whole_registers,
)
from kernels.tiles import LANES, in_tiles

_TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES
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

_I8 = ir.IntType(8)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


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
    """[2, 1 + _HEIGHT * TILE_ROWS, 64] bytes: how many rows the registers have for as many of x.

    First for whole tiles of the matrix, then for its last _WIDTH tiles: the last has `rest` rows if
    that is not 0, and `alone` says that it stands in for the one before it too.
    """
    shapes = np.tile(whole_registers(), (2, 1 + _HEIGHT * TILE_ROWS, 1))
    for last, by_rows in enumerate(shapes):
        if last and rest:
            for register in range(0 if alone else 1, 8, 1 if alone else _WIDTH):
                if not _LEFT <= register < _RIGHT:
                    by_rows[:, 16 + 2 * register] = 4 * rest
        for rows, shape in enumerate(by_rows):
            # A register of no rows cannot be used, and one that is not used may have any.
            first, second = max(1, min(rows, TILE_ROWS)), max(1, rows - TILE_ROWS)
            shape[48:56] = (first, first, second, second, first, second, TILE_ROWS, TILE_ROWS)
    return shapes


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
            place = builder.add(place, place.type(TILE_ROWS * COLUMNS))
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
        narrow = builder.sub(times(width, 4), times(last, TILE_ROW_BYTES))
        lines = [
            builder.select(builder.icmp_signed("<", place, last), size(TILE_ROW_BYTES), narrow)
            for place in places
        ]
        right = [bytes_at(builder, weight.data, times(p, steps, _TILE_BYTES)) for p in places]
        left = [bytes_at(builder, pieces.data, times(r, steps, PIECES * _TILE_BYTES)) for r in rows]
        line, sums = size(TILE_ROW_BYTES), [_I8(_SUMS + i) for i in range(blocks * _WIDTH)]
        for register in sums:
            instruct(builder, "tilezero", register)
        with cgutils.for_range(builder, steps) as loop:
            for n, (start, wide) in enumerate(zip(right, lines, strict=True)):
                at = bytes_at(builder, start, times(loop.index, TILE_ROWS, wide))
                instruct(builder, "tileloadd64", _I8(_RIGHT + n), at, wide)
            for piece in range(PIECES):
                for m, start in enumerate(left):
                    offset = times(loop.index, PIECES * _TILE_BYTES)
                    at = bytes_at(builder, start, builder.add(offset, size(piece * _TILE_BYTES)))
                    instruct(builder, "tileloadd64", _I8(_LEFT + m), at, line)
                    for n in range(_WIDTH):
                        operands = sums[m * _WIDTH + n], _I8(_LEFT + m), _I8(_RIGHT + n)
                        instruct(builder, "tdpbf16ps", *operands)
        for m, row in enumerate(rows):
            for n, place in enumerate(places):
                first = builder.add(times(row, TILE_ROWS, width), times(place, LANES))
                at = bytes_at(builder, builder.gep(out.data, [first]))
                instruct(builder, "tilestored64", sums[m * _WIDTH + n], at, times(width, 4))
        return context.get_dummy_value()

    return types.void(weight, types.intp, pieces, types.intp, height, out), generate


@inline
def _take_row_apart(x: Any, row: Any, pieces: Any) -> None:
    steps, step = pieces.shape[1], PIECES * TILE_ROWS * COLUMNS
    place = (row // TILE_ROWS) * steps * step + (row % TILE_ROWS) * COLUMNS
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
                here = min(rows - block * TILE_ROWS, _HEIGHT * TILE_ROWS)
                for g in range(group, behind):
                    shape = here + (shapes.shape[1] if g + 1 == groups else 0)
                    if shape != shaped:
                        shape_registers(shapes, shape)
                        shaped = shape
                    if here > TILE_ROWS:
                        _multiply(weight, g * _WIDTH, pieces, block, 2, out)
                    else:
                        _multiply(weight, g * _WIDTH, pieces, block, 1, out)
            item += behind - group
        release_registers()
