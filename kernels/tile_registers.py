"""The matrix registers of x86 CPUs that have them (AMX), as numba kernels use them.

Eight registers of up to sixteen rows of 64 bytes; see Intel, Architectures Software Developer's
Manual, volume 1, chapter 18. A kernel gives them their shapes, multiplies, and releases them.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_features import TILE_ROW_BYTES, TILE_ROWS, TILES

# Linux gives a process the registers' state only when it asks: ARCH_REQ_XCOMP_PERM, XTILE_DATA.
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18

_VOID, _I8 = ir.VoidType(), ir.IntType(8)


@cache
def usable() -> bool:
    """Whether this CPU multiplies tiles and the system lets this process do so.

    Where it does not, the first of these instructions is an illegal one.
    """
    if not TILES or sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0)


def instruct(builder: Any, name: str, *operands: Any) -> None:
    """Emit an instruction by its name among LLVM's of x86."""
    kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, operands)


def bytes_at(builder: Any, pointer: Any, *offset: Any) -> Any:
    """The pointer as one to bytes, moved on."""
    at = builder.bitcast(pointer, _I8.as_pointer())
    return builder.gep(at, offset) if offset else at


def whole_registers() -> Any:
    """[64] bytes of shape_registers: every register has sixteen rows of 64 bytes."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1
    shape[16:32:2] = TILE_ROW_BYTES
    shape[48:56] = TILE_ROWS
    return shape


@intrinsic
def shape_registers(typing_context: Any, shapes: Any, rows: Any) -> Any:
    """Give this thread's registers the shapes of a line of shapes [n, 64] bytes, flat."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        offset = builder.mul(args[1], args[1].type(TILE_ROW_BYTES))
        instruct(builder, "ldtilecfg", bytes_at(builder, array.data, offset))
        return context.get_dummy_value()

    return types.void(shapes, types.intp), generate


@intrinsic
def release_registers(typing_context: Any) -> Any:
    """This thread needs no registers any more, so that the system need not keep them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate
