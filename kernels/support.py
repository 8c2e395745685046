"""Whether the Triton kernels have what a model asks for, before anything is loaded. Knows sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import UnsupportedKernelError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What decides whether there is a kernel; 0 where a model has no such layer.

    Attributes:
        key_width, value_width: of a GDN head.
        head_dim: of an attention head.
        hidden: width of the model.
        experts: of a mixture.
        vocabulary: logits of a row.
    """

    key_width: int
    value_width: int
    head_dim: int
    hidden: int
    experts: int
    vocabulary: int


def check_triton(sizes: ModelSizes, dtype: torch.dtype, device: torch.device) -> None:
    """Ask every operator by its own limits.

    Raises:
        UnsupportedKernelError: names operator, dtype, size and device, and what is supported.
    """
    from kernels.attention.triton import HEAD_SIZES as ATTENTION_SIZES
    from kernels.gdn.triton import HEAD_SIZES as GDN_SIZES
    from kernels.moe.triton_route import MOST_EXPERTS
    from kernels.rms_norm.triton import LARGEST as WIDEST_NORM
    from kernels.top1.triton import LARGEST as LARGEST_VOCABULARY
    from kernels.triton_guard import DTYPE_NAMES, DTYPES, runs_on

    runs = dtype in DTYPES and runs_on(device)

    def expect(operator: str, size: int, fits: bool, what: str) -> None:
        if size and not (fits and runs):
            supported = f"{DTYPE_NAMES}, {what}, on CUDA or with TRITON_INTERPRET=1"
            raise UnsupportedKernelError(operator, dtype, size, str(device), supported)

    heads = ", ".join(str(size) for size in GDN_SIZES)
    for width in (sizes.key_width, sizes.value_width):
        expect("gdn_mixer", width, width in GDN_SIZES, f"Dk and Dv one of {heads}")
    heads = ", ".join(str(size) for size in ATTENTION_SIZES)
    expect("attention_mixer", sizes.head_dim, sizes.head_dim in ATTENTION_SIZES, f"one of {heads}")
    for operator, size, largest, what in (
        ("add_rms_norm", sizes.hidden, WIDEST_NORM, "width H"),
        ("moe_mlp", sizes.experts, MOST_EXPERTS, "experts E"),
        ("top1", sizes.vocabulary, LARGEST_VOCABULARY, "vocabulary V"),
    ):
        expect(operator, size, size <= largest, f"{what} at most {largest}")
