"""Vectors of float32 in registers, for loops of numba kernels that LLVM would not vectorise.

LLVM vectorises inner loops only and must prove that their arrays are apart, so that a sum over an
outer loop goes through memory at every step. Arrays are float32, C-contiguous and indexed flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

# What kernels.jit allows: a product and a sum may become one fused multiply-add.
CONTRACT = ("contract",)
_FLOAT_BYTES = 4


class _LanesType(types.Type):  # type: ignore[misc]
    """Numba's type of `width` float32 numbers."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"lanes({width})")


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _LanesType) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.FloatType(), kind.width))


NARROW = 16
WIDE = 32
_NARROW = _LanesType(NARROW)
_WIDE = _LanesType(WIDE)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Pointer to the float at a flat index."""
    assert kind.layout == "C", kind
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


def splat(builder: Any, value: Any, width: int) -> Any:
    """A float32 in all lanes; while code is emitted, as `places`."""
    vector = ir.VectorType(ir.FloatType(), width)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), places([0] * width))


def places(order: list[int]) -> Any:
    """The order of a shuffle."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)


def _loader(kind: _LanesType) -> Callable[..., Any]:
    def load(typing: Any, array: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = _address(context, builder, array, *args)
            vector = context.get_value_type(kind)
            return builder.load(builder.bitcast(at, vector.as_pointer()), align=_FLOAT_BYTES)

        return kind(array, index), code

    return load


def _zeros(kind: _LanesType) -> Callable[..., Any]:
    def zeros(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(context.get_value_type(kind), None)

        return kind(), code

    return zeros


# Array, flat index -> its numbers from there on.
load16: Any = intrinsic(_loader(_NARROW))
load32: Any = intrinsic(_loader(_WIDE))
zeros16: Any = intrinsic(_zeros(_NARROW))
zeros32: Any = intrinsic(_zeros(_WIDE))


@intrinsic
def load16_upper(typing: Any, array: Any, index: Any) -> Any:
    """Sixteen bfloat16, seen as uint16, as float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.VectorType(ir.IntType(16), NARROW)
        whole = ir.VectorType(ir.IntType(32), NARROW)
        at = builder.bitcast(_address(context, builder, array, *args), half.as_pointer())
        bits = builder.zext(builder.load(at, align=2), whole)
        upper = builder.shl(bits, ir.Constant(whole, [16] * NARROW))
        return builder.bitcast(upper, context.get_value_type(_NARROW))

    return _NARROW(array, index), code


@intrinsic
def store(typing: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Write the lanes to an array from a flat index on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, array, *args[:2])
        pointer = builder.bitcast(at, context.get_value_type(lanes).as_pointer())
        builder.store(args[2], pointer, align=_FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(array, index, lanes), code


@intrinsic
def number(typing: Any, array: Any, index: Any) -> Any:
    """The number at a flat index."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, array, *args), align=_FLOAT_BYTES)

    return types.float32(array, index), code


@intrinsic
def put(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write one number, a float32, to a flat index."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, array, *args[:2]), align=_FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(array, index, types.float32), code


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """a * b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=CONTRACT)

    return a(a, b), code


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """a - b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args, flags=CONTRACT)

    return a(a, b), code


@intrinsic
def plus(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args, flags=CONTRACT)

    return a(a, b), code


@intrinsic
def scaled(typing: Any, a: Any, factor: Any) -> Any:
    """a * factor, a float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], splat(builder, args[1], a.width), flags=CONTRACT)

    return a(a, types.float32), code


@intrinsic
def plus_product(typing: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a * b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(*args[1:], flags=CONTRACT)
        return builder.fadd(args[0], product, flags=CONTRACT)

    return total(total, a, b), code


@intrinsic
def plus_scaled(typing: Any, total: Any, a: Any, array: Any, index: Any) -> Any:
    """total + a * the number at a flat index of an array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.load(_address(context, builder, array, *args[2:]), align=_FLOAT_BYTES)
        product = builder.fmul(args[1], splat(builder, number, a.width), flags=CONTRACT)
        return builder.fadd(args[0], product, flags=CONTRACT)

    return total(total, a, array, index), code


def _halved(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """What is left of a vector when its halves are combined until one lane is.

    LLVM's own reductions go lane by lane unless any order will do: 50 ns instead of 10.
    """
    width = vector.type.count
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(vector, vector, places(list(range(at, at + width))))
            for at in (0, width)
        ]
        vector = combine(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


@intrinsic
def sum_of(typing: Any, lanes: Any) -> Any:
    """The sum of all lanes, always in the same order: upper halves are added to lower ones."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _halved(builder, args[0], lambda a, b: builder.fadd(a, b, flags=CONTRACT))

    return types.float32(lanes), code


@intrinsic
def copy(typing: Any, source: Any, source_at: Any, target: Any, target_at: Any, count: Any) -> Any:
    """target[target_at:][:count] = source[source_at:][:count], which do not overlap."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_from = _address(context, builder, source, *args[:2])
        target_from = _address(context, builder, target, *args[2:4])
        cgutils.raw_memcpy(builder, target_from, source_from, args[4], _FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(source, source_at, target, target_at, count), code


# Numbers that `split_columns` and `join_columns` move: a vector of channels, four numbers each.
COLUMNS = 4


@intrinsic
def split_columns(
    typing: Any, source: Any, source_at: Any, target: Any, target_at: Any, stride: Any
) -> Any:
    """target[target_at + r * stride + c] = source[source_at + 4 c + r] for r < 4 and c < 16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), COLUMNS * NARROW)
        at = _address(context, builder, source, *args[:2])
        every = builder.load(builder.bitcast(at, vector.as_pointer()), align=_FLOAT_BYTES)
        place = args[3]
        for r in range(COLUMNS):
            picked = [COLUMNS * c + r for c in range(NARROW)]
            row = builder.shuffle_vector(every, ir.Constant(vector, ir.Undefined), places(picked))
            at = _address(context, builder, target, args[2], place)
            builder.store(row, builder.bitcast(at, row.type.as_pointer()), align=_FLOAT_BYTES)
            place = builder.add(place, args[4])
        return context.get_dummy_value()

    return types.void(source, source_at, target, target_at, stride), code


@intrinsic
def join_columns(
    typing: Any, source: Any, source_at: Any, stride: Any, target: Any, target_at: Any
) -> Any:
    """target[target_at + 4 c + r] = source[source_at + r * stride + c] for r < 4 and c < 16."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = ir.VectorType(ir.FloatType(), NARROW)
        place, rows = args[1], []
        for _ in range(COLUMNS):
            at = _address(context, builder, source, args[0], place)
            rows.append(builder.load(builder.bitcast(at, narrow.as_pointer()), align=_FLOAT_BYTES))
            place = builder.add(place, args[2])
        both = places(list(range(2 * NARROW)))
        halves = [builder.shuffle_vector(a, b, both) for a, b in (rows[:2], rows[2:])]
        order = places([r * NARROW + c for c in range(NARROW) for r in range(COLUMNS)])
        every = builder.shuffle_vector(*halves, order)
        at = _address(context, builder, target, *args[3:])
        builder.store(every, builder.bitcast(at, every.type.as_pointer()), align=_FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(source, source_at, stride, target, target_at), code


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where one is no number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, b), code


def _of_one(name: str) -> Callable[..., Any]:
    """What an intrinsic of LLVM makes of every lane."""

    def apply(typing: Any, lanes: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = context.get_value_type(lanes)
            kind = ir.FunctionType(vector, [vector])
            full = f"llvm.{name}.v{lanes.width}f32"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, full), args)

        return lanes(lanes), code

    return apply


sizes: Any = intrinsic(_of_one("fabs"))
# To the nearest whole number, of two the even one.
rounded: Any = intrinsic(_of_one("rint"))


@intrinsic
def store_bytes(typing: Any, array: Any, index: Any, numbers: Any) -> Any:
    """Write lanes or one float32, whole numbers of -128 to 127, as signed bytes.

    index: the byte of the array where they begin.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8)
        if isinstance(numbers, _LanesType):
            word, byte = (ir.VectorType(kind, numbers.width) for kind in (word, byte))
        data = context.make_array(array)(context, builder, args[0]).data
        at = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])
        stored = builder.trunc(builder.fptosi(args[2], word), byte)
        builder.store(stored, builder.bitcast(at, byte.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, index, numbers), code


@intrinsic
def largest(typing: Any, lanes: Any) -> Any:
    """The largest lane, of those that are numbers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger_of(a: Any, b: Any) -> Any:
            kind = ir.FunctionType(a.type, [a.type, b.type])
            name = f"llvm.maxnum.v{a.type.count}f32"
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(function, [a, b])

        return _halved(builder, args[0], larger_of)

    return types.float32(lanes), code


@intrinsic
def first_equal(typing: Any, lanes: Any, number: Any) -> Any:
    """The first lane that is a float32, as many as there are lanes if none is."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = lanes.width
        same = builder.fcmp_ordered("==", args[0], splat(builder, args[1], width))
        mask, wide = ir.IntType(width), ir.IntType(64)
        bits = builder.zext(builder.bitcast(same, mask), wide)
        return builder.cttz(builder.or_(bits, wide(1 << width)), ir.IntType(1)(1))

    return types.int64(lanes, types.float32), code


@intrinsic(prefer_literal=True)
def add_products(
    typing: Any,
    left: Any,
    left_at: Any,
    left_stride: Any,
    rows: Any,
    right: Any,
    right_at: Any,
    right_stride: Any,
    steps: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    lanes: Any,
) -> Any:
    """out[r, j] += left[r, i] * right[i, j] for r < rows, j < lanes (constants) and i in order.

    Each matrix is an array, the flat place where it begins, and from row to row its stride.
    """
    vector = ir.VectorType(ir.FloatType(), lanes.literal_value)
    height = rows.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left_kind, right_kind, out_kind = (signature.args[i] for i in (0, 4, 8))

        def place(at: int, row: Any) -> Any:
            """Where a row of the matrix whose first number is at args[at] begins."""
            return builder.add(args[at], builder.mul(row, args[at + 1]))

        def vector_at(kind: Any, array: Any, index: Any) -> Any:
            return builder.bitcast(
                _address(context, builder, kind, array, index), vector.as_pointer()
            )

        size = args[1].type
        targets = [vector_at(out_kind, args[8], place(9, size(r))) for r in range(height)]
        sums = [
            cgutils.alloca_once_value(builder, builder.load(target, align=_FLOAT_BYTES))
            for target in targets
        ]
        with cgutils.for_range(builder, args[7]) as loop:
            numbers = builder.load(
                vector_at(right_kind, args[4], place(5, loop.index)), align=_FLOAT_BYTES
            )
            for r, total in enumerate(sums):
                index = builder.add(place(1, size(r)), loop.index)
                number = builder.load(
                    _address(context, builder, left_kind, args[0], index), align=_FLOAT_BYTES
                )
                product = builder.fmul(
                    splat(builder, number, vector.count), numbers, flags=CONTRACT
                )
                fused = builder.fadd(builder.load(total), product, flags=CONTRACT)
                builder.store(fused, total)
        for target, total in zip(targets, sums, strict=True):
            builder.store(builder.load(total), target, align=_FLOAT_BYTES)
        return context.get_dummy_value()

    whole = types.intp
    signature = types.void(
        left, whole, whole, rows, right, whole, whole, whole, out, whole, whole, lanes
    )
    return signature, code
