"""The attention mixer in Triton: two launches before the result for prompts, three for decode.

Knows rows, pages and sequences, not requests. The host learns nothing from the device: every grid
follows from shapes and the batch's plain numbers, and programs with nothing to do end at once.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention.triton_decode import attend_recurrent
from kernels.attention.triton_prefill import attend_chunked
from kernels.attention.triton_queries import largest_power_in, queries
from kernels.attention.triton_write import write_rows
from kernels.attention.types import AttentionParams, KvPages
from kernels.batch import RaggedBatch
from kernels.errors import UnsupportedKernelError
from kernels.triton_guard import DTYPES, runs_on

HEAD_SIZES = (16, 32, 64, 128, 256)
# The matrix units take no fewer keys at once.
SMALLEST_TILE = 16
_SUPPORTED = (
    "float32, bfloat16 and float16 for rows and pages, head sizes 16, 32, 64, 128 and 256, pages "
    "of a multiple of 16 tokens, on CUDA or with TRITON_INTERPRET=1"
)


def attention_mixer(
    qkv: Tensor,
    params: AttentionParams,
    pages: KvPages,
    batch: RaggedBatch,
    wanted: Tensor | None = None,
) -> Tensor:
    """As naive.attention_mixer: qkv [R, 2 nH hd + 2 nKV hd] -> [R, nH hd], qkv's dtype.

    The pages may have another dtype. `wanted` [n] int64 must be ascending.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, head size, page or device.
    """
    _refuse(qkv, params, pages)
    assert params.heads % params.kv_heads == 0
    assert qkv.stride(1) == 1
    assert pages.k.is_contiguous()
    assert pages.v.is_contiguous()
    asked = queries(batch, wanted)
    out = qkv.new_empty(asked.count, params.heads * params.head_dim)
    if qkv.shape[0] == 0:
        return out
    q = write_rows(qkv, params, pages, batch, asked)
    if asked.count == 0:
        return out
    if batch.prefills:
        attend_chunked(qkv, q, params, pages, batch, asked, out)
    attend_recurrent(qkv, q, params, pages, batch, asked, out)
    return out


def _refuse(qkv: Tensor, params: AttentionParams, pages: KvPages) -> None:
    odd_size = params.head_dim not in HEAD_SIZES
    odd_page = largest_power_in(pages.v.shape[2]) < SMALLEST_TILE
    odd_dtype = next((t.dtype for t in (qkv, pages.k, pages.v) if t.dtype not in DTYPES), None)
    if odd_size or odd_page or odd_dtype is not None or not runs_on(qkv.device):
        device = f"{qkv.device}, pages of {pages.v.shape[2]} tokens"
        dtype = odd_dtype or qkv.dtype
        raise UnsupportedKernelError("attention_mixer", dtype, params.head_dim, device, _SUPPORTED)
