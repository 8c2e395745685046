"""The GDN mixer in Triton: three launches for decode and verify rows, two more for prefill chunks.

Knows rows and slots, not requests. The host learns nothing from the device: every grid follows
from shapes and the batch's plain numbers, and rows that are absent end their programs at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.batch import RaggedBatch
from kernels.errors import UnsupportedKernelError
from kernels.gdn.triton_chunk import chunked_prefill
from kernels.gdn.triton_finish import finish
from kernels.gdn.triton_inputs import gdn_inputs
from kernels.gdn.triton_step import recurrent_step
from kernels.gdn.types import GdnParams, GdnState
from kernels.triton_guard import DTYPES, runs_on

HEAD_SIZES = (16, 32, 64, 128, 256)
_SUPPORTED = (
    "float32, bfloat16 and float16, Dk and Dv one of 16, 32, 64, 128 and 256, "
    "on CUDA or with TRITON_INTERPRET=1"
)


def gdn_mixer(proj: Tensor, params: GdnParams, state: GdnState, batch: RaggedBatch) -> Tensor:
    """As naive.gdn_mixer: proj [R, conv_dim + value_dim + 2 Hv] -> [R, value_dim], proj's dtype.

    Raises:
        UnsupportedKernelError: no kernel for this dtype, head size or device.
    """
    _refuse(proj, params)
    assert params.value_heads % params.key_heads == 0
    inner = (params.key_width * params.value_width, params.value_width, 1)
    assert proj.stride(1) == 1
    assert state.h.stride()[1:] == inner
    assert state.conv.stride()[1:] == (params.conv.shape[0], 1)
    inputs = gdn_inputs(proj, params, state, batch)
    if batch.prefills:
        operand = torch.bfloat16 if proj.dtype == torch.bfloat16 else torch.float32
        chunked_prefill(inputs, state, batch, operand=operand)
        if batch.saves is not None:
            _save_conv(proj, batch.row_start, batch.saves, state)
    recurrent_step(inputs, state, batch)
    return finish(proj, inputs, params, state, batch)


def _save_conv(proj: Tensor, row_start: Tensor, saves: Tensor, state: GdnState) -> None:
    """saved_conv = the inputs of the rows before each of the saves, which are own rows all."""
    assert state.saved_conv is not None, "a state is set aside and there is no room for any"
    _, conv_dim, taps = state.saved_conv.shape
    owner, after, place = saves.unbind(1)
    last = (row_start[owner] + after)[:, None] + torch.arange(-taps, 0, device=proj.device)
    state.saved_conv[place] = proj[last, :conv_dim].mT.to(state.saved_conv.dtype)


def _refuse(proj: Tensor, params: GdnParams) -> None:
    odd = [d for d in (params.key_width, params.value_width) if d not in HEAD_SIZES]
    if odd or proj.dtype not in DTYPES or not runs_on(proj.device):
        size = odd[0] if odd else params.key_width
        raise UnsupportedKernelError("gdn_mixer", proj.dtype, size, str(proj.device), _SUPPORTED)
