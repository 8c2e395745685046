"""The inner loop of a product as LLVM's instructions: rows of numbers times tiles of a matrix.

numba's own loops sum up along a row and across a register at its end, a quarter of the time; here a
register holds sums of sixteen rows of the matrix, and pairs of bfloat16 or fours of bytes are
multiplied as such where the CPU can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_features import FEATURES, TILE_ROW_BYTES, TILE_ROWS
from kernels.tile_registers import bytes_at, instruct
from kernels.tiles import LANES

# Vectors of sums at a time: more than the registers hold halves the speed.
_SUMS = 8 if "+avx512f" in FEATURES else 4

_I32 = ir.IntType(32)
_WORDS = ir.VectorType(_I32, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


def _everywhere(builder: Any, pointer: Any) -> Any:
    """The number at a pointer in all lanes."""
    number = builder.load(pointer)
    vector = ir.VectorType(number.type, LANES)
    lone = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _I32(0))
    first = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(lone, ir.Constant(vector, ir.Undefined), first)


def _add_rounded(builder: Any, total: Any, words: Any, pair: Any) -> Any:
    """total + words times one pair of bfloat16.

    Operands are declared as older LLVMs know them, before they had the type; newer ones convert.
    """
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, words, _everywhere(builder, pair)])


def _add_exact(builder: Any, total: Any, words: Any, pair: Any) -> Any:
    """total + words times two float32: a bfloat16 is the upper half of one."""
    second = builder.gep(pair, [_I32(1)])
    low = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    high = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    for bits, pointer in ((low, pair), (high, second)):
        wide, fused = builder.bitcast(bits, _FLOATS), ("contract",)
        product = builder.fmul(wide, _everywhere(builder, pointer), flags=fused)
        total = builder.fadd(total, product, flags=fused)
    return total


def _add_bytes(builder: Any, total: Any, words: Any, four: Any) -> Any:
    """total + four unsigned bytes of each word times four signed ones, in int32."""
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS, _WORDS])
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, words, _everywhere(builder, four)])


@dataclass(frozen=True)
class _Form:
    """How one kind of numbers is multiplied.

    Attributes:
        add: (builder, sums, words of the matrix, pointer into x) to sums.
        step: numbers of x that go with one word.
        sums: their type.
        ends: see `multiply`: words behind the numbers in a tile, which are its scales, and in x.
    """

    add: Callable[..., Any]
    step: int
    sums: Any
    ends: int


_FORMS = {
    types.float32: _Form(_add_exact, 2, _FLOATS, 0),
    types.uint32: _Form(_add_rounded, 1, _FLOATS, 0),
    types.int32: _Form(_add_bytes, 1, _WORDS, 1),
}


@intrinsic(prefer_literal=True)
def multiply(typing_context: Any, weight: Any, first: Any, x: Any, rows: Any, out: Any) -> Any:
    """Put `rows` (a constant) of x times some tiles from `first` on into out; returns how many.

    weight [N / LANES, K / 2, LANES] uint32; x [., K] float32 or [., K / 2] uint32; out [., N].
    Or in bytes, as products.in_byte_tiles and products.take_bytes leave them: weight [N / LANES,
    K / 4 + 1, LANES] int32, the last of it float32 scales; x [., K / 4 + 2] int32, the last two of
    it where sums begin and a float32 scale.
    """
    height = rows.literal_value
    tiles = _SUMS // height
    form = _FORMS[x.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, x, out = (
            context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 4)
        )
        count, lines, _ = cgutils.unpack_tuple(builder, weight.shape, 3)
        x_width = cgutils.unpack_tuple(builder, x.shape, 2)[1]
        out_width = cgutils.unpack_tuple(builder, out.shape, 2)[1]
        size = lines.type
        words_each = builder.sub(lines, size(form.ends))

        def vector_at(pointer: Any, kind: Any) -> Any:
            return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)

        def at(data: Any, row: Any, width: Any, column: Any) -> Any:
            return builder.gep(data, [builder.add(builder.mul(row, width), column)])

        last = builder.sub(count, size(1))
        places = []
        for i in range(tiles):
            place = builder.add(args[1], size(i))
            # Behind the last tile it is multiplied again, to the same sums.
            places.append(builder.select(builder.icmp_signed("<", place, last), place, last))
        begin = [ir.Constant(form.sums, None)] * height
        if form.ends:
            begin = [
                _everywhere(builder, at(x.data, size(r), x_width, words_each))
                for r in range(height)
            ]
        sums = [[cgutils.alloca_once_value(builder, start) for start in begin] for _ in places]
        for tile in sums:
            for vector, start in zip(tile, begin, strict=True):
                builder.store(start, vector)
        tile_size = builder.mul(lines, size(LANES))
        with cgutils.for_range(builder, words_each) as loop:
            column = builder.mul(loop.index, size(LANES))
            held = [
                at(x.data, size(r), x_width, builder.mul(loop.index, size(form.step)))
                for r in range(height)
            ]
            for place, tile in zip(places, sums, strict=True):
                words = vector_at(at(weight.data, place, tile_size, column), _WORDS)
                for vector, numbers in zip(tile, held, strict=True):
                    builder.store(form.add(builder, builder.load(vector), words, numbers), vector)
        for place, tile in zip(places, sums, strict=True):
            for r, vector in enumerate(tile):
                total = builder.load(vector)
                if form.ends:
                    scales = at(weight.data, place, tile_size, builder.mul(words_each, size(LANES)))
                    scale = at(x.data, size(r), x_width, builder.add(words_each, size(1)))
                    scale = builder.bitcast(scale, ir.FloatType().as_pointer())
                    total = builder.fmul(builder.sitofp(total, _FLOATS), vector_at(scales, _FLOATS))
                    total = builder.fmul(total, _everywhere(builder, scale))
                pointer = at(out.data, size(r), out_width, builder.mul(place, size(LANES)))
                pointer = builder.bitcast(pointer, _FLOATS.as_pointer())
                builder.store(total, pointer, align=4)
        return size(tiles)

    return types.intp(weight, types.intp, x, rows, out), generate


# Blocks of sixteen rows, and tiles of a matrix, that `multiply_many` takes at a time: four
# registers hold sums, two x, two the matrix.
HEIGHT, AT_ONCE = 2, 2
_SUM, _X, _MATRIX = 0, 4, 6
_WORD_BYTES = 4
_LINE = ir.IntType(64)(TILE_ROW_BYTES)


@intrinsic
def multiply_many(typing_context: Any, weight: Any, first: Any, x: Any, sums: Any, out: Any) -> Any:
    """Put HEIGHT blocks of x times AT_ONCE tiles from `first` on into out, in tile registers.

    In bytes, as `multiply` takes them; K must be a whole number of lines of 64, x and out have as
    many rows. The registers must be whole ones; sums [16, LANES] int32 is scratch.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight, x, sums, out = (
            context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2, 3, 4)
        )
        count, lines, _ = cgutils.unpack_tuple(builder, weight.shape, 3)
        x_words = cgutils.unpack_tuple(builder, x.shape, 2)[1]
        out_width = cgutils.unpack_tuple(builder, out.shape, 2)[1]
        size, register = lines.type, ir.IntType(8)
        numbers, last = builder.sub(lines, size(1)), builder.sub(count, size(1))

        def vector_at(data: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        places, starts = [], []
        for i in range(AT_ONCE):
            place = builder.add(args[1], size(i))
            # Behind the last tile it is multiplied again, to the same sums.
            place = builder.select(builder.icmp_signed("<", place, last), place, last)
            places.append(place)
            starts.append(builder.mul(builder.mul(place, lines), size(LANES)))
        for i in range(HEIGHT * AT_ONCE):
            instruct(builder, "tilezero", register(_SUM + i))
        x_stride = builder.mul(x_words, size(_WORD_BYTES))
        steps = builder.sdiv(numbers, size(TILE_ROWS))
        with cgutils.for_range(builder, steps) as loop:
            offset = builder.mul(loop.index, size(TILE_ROWS * LANES))
            for i, start in enumerate(starts):
                at = bytes_at(builder, builder.gep(weight.data, [builder.add(start, offset)]))
                instruct(builder, "tileloadd64", register(_MATRIX + i), at, _LINE)
            for m in range(HEIGHT):
                row = builder.mul(x_words, size(m * TILE_ROWS))
                column = builder.mul(loop.index, size(TILE_ROWS))
                at = bytes_at(builder, builder.gep(x.data, [builder.add(row, column)]))
                instruct(builder, "tileloadd64", register(_X + m), at, x_stride)
                for i in range(AT_ONCE):
                    operands = register(_SUM + m * AT_ONCE + i), register(_X + m)
                    instruct(builder, "tdpbsud", *operands, register(_MATRIX + i))
        for i, (place, start) in enumerate(zip(places, starts, strict=True)):
            end = builder.add(start, builder.mul(numbers, size(LANES)))
            scales = builder.load(vector_at(weight.data, end, _FLOATS), align=4)
            column = builder.mul(place, size(LANES))
            for m in range(HEIGHT):
                at = bytes_at(builder, sums.data)
                instruct(builder, "tilestored64", register(_SUM + m * AT_ONCE + i), at, _LINE)
                with cgutils.for_range(builder, size(TILE_ROWS)) as loop:
                    at = builder.mul(loop.index, size(LANES))
                    total = builder.load(vector_at(sums.data, at, _WORDS), align=4)
                    row = builder.add(loop.index, size(m * TILE_ROWS))
                    row_end = builder.add(builder.mul(row, x_words), numbers)
                    begin = _everywhere(builder, builder.gep(x.data, [row_end]))
                    scale_at = builder.gep(x.data, [builder.add(row_end, size(1))])
                    number = ir.FloatType().as_pointer()
                    scale = _everywhere(builder, builder.bitcast(scale_at, number))
                    total = builder.sitofp(builder.add(total, begin), _FLOATS)
                    total = builder.fmul(builder.fmul(total, scales), scale)
                    target = builder.add(builder.mul(row, out_width), column)
                    builder.store(total, vector_at(out.data, target, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(weight, types.intp, x, sums, out), generate
