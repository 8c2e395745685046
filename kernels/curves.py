"""exp, sigmoid and silu of lanes, for loops that LLVM would compile to registers half as wide.

As kernels.jit's exp32 and sigmoid32 of one number, but for the reciprocal: a CPU with AVX-512
estimates it and takes one step of Newton's, which costs less than its division.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kernels import jit
from kernels.cpu_features import FEATURES
from kernels.lanes import CONTRACT, NARROW, WIDE, places, splat

_ESTIMATES = "+avx512f" in FEATURES


def _exp(builder: Any, x: Any) -> Any:
    """exp of a vector, clamped as exp32; of what is no number, no number."""
    width = x.type.count

    def every(value: Any) -> Any:
        return ir.Constant(x.type, [float(value)] * width)

    def fused(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=CONTRACT), c, flags=CONTRACT)

    def apply(name: str, value: Any) -> Any:
        kind = ir.FunctionType(x.type, [x.type])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{width}f32")
        return builder.call(function, [value])

    low, high = every(jit.EXP_LEAST), every(jit.EXP_MOST)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    n = apply("floor", fused(x, every(jit.LOG2E), every(0.5)))
    rest = fused(n, every(-jit.LN2_HIGH), x)
    rest = fused(n, every(-jit.LN2_LOW), rest)
    terms = every(jit.EXP_TERMS[0])
    for term in jit.EXP_TERMS[1:]:
        terms = fused(terms, rest, every(term))
    square = builder.fmul(rest, rest, flags=CONTRACT)
    result = builder.fadd(fused(terms, square, rest), every(1.0), flags=CONTRACT)
    words = ir.VectorType(ir.IntType(32), width)
    biased = builder.add(builder.fptosi(n, words), ir.Constant(words, [127] * width))
    power = builder.shl(biased, ir.Constant(words, [23] * width))
    return builder.fmul(result, builder.bitcast(power, x.type), flags=CONTRACT)


def _reciprocal(builder: Any, x: Any) -> Any:
    """1 / x; the estimate is good to 2^-14, one step of Newton's doubles that."""
    width = x.type.count
    if not _ESTIMATES or width % NARROW:
        return builder.fdiv(ir.Constant(x.type, [1.0] * width), x)
    narrow, mask = ir.VectorType(ir.FloatType(), NARROW), ir.IntType(16)
    kind = ir.FunctionType(narrow, [narrow, narrow, mask])
    name = "llvm.x86.avx512.rcp14.ps.512"
    estimate = cgutils.get_or_insert_function(builder.module, kind, name)
    two, nothing = ir.Constant(narrow, [2.0] * NARROW), ir.Constant(narrow, None)
    parts = []
    for first in range(0, width, NARROW):
        part = builder.shuffle_vector(x, x, places(list(range(first, first + NARROW))))
        near = builder.call(estimate, [part, nothing, mask(0xFFFF)])
        error = builder.fsub(two, builder.fmul(part, near, flags=CONTRACT), flags=CONTRACT)
        parts.append(builder.fmul(near, error, flags=CONTRACT))
    if width == NARROW:
        return parts[0]
    assert width == WIDE
    return builder.shuffle_vector(*parts, places(list(range(WIDE))))


def _sigmoid(builder: Any, x: Any) -> Any:
    one = ir.Constant(x.type, [1.0] * x.type.count)
    power = _exp(builder, builder.fneg(x))
    return _reciprocal(builder, builder.fadd(one, power, flags=CONTRACT))


@intrinsic
def exp_less(typing: Any, lanes: Any, number: Any) -> Any:
    """exp(lanes - a float32)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        less = builder.fsub(args[0], splat(builder, args[1], lanes.width), flags=CONTRACT)
        return _exp(builder, less)

    return lanes(lanes, number), code


@intrinsic
def sigmoid_of(typing: Any, lanes: Any) -> Any:
    """1 / (1 + exp(-lanes))."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _sigmoid(builder, args[0])

    return lanes(lanes), code


@intrinsic
def silu_of(typing: Any, lanes: Any) -> Any:
    """Lanes times their sigmoid."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], _sigmoid(builder, args[0]), flags=CONTRACT)

    return lanes(lanes), code
