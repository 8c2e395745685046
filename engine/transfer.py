"""Numbers from the host to the model's device in one copy, and back with one wait.

Every read of a device's numbers goes through `fetch`. Does not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64 = npt.NDArray[np.int64]
Index = list[int] | Tensor


def send(device: torch.device, *arrays: Int64) -> tuple[Tensor, ...]:
    """The arrays, int64, as tensors on the device; on a CPU they share the arrays' memory.

    On a card all of them travel in one copy from pinned memory, which the host does not wait for.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array) for array in arrays)
    placed = staged(arrays, device).to(device, non_blocking=True)
    return split(placed, [array.shape for array in arrays])


def indices(device: torch.device, *places: list[int]) -> tuple[Index, ...]:
    """Lists of places as indices into tensors of the device; on a CPU they are fine as they are."""
    if device.type == "cpu":
        return places
    return send(device, *(np.array(each, np.int64) for each in places))


def staged(arrays: Sequence[Int64], device: torch.device) -> Tensor:
    """The arrays one behind the other [n] int64 on the host, pinned for a CUDA device."""
    total = sum(aligned(array.size) for array in arrays)
    flat = torch.empty(total, dtype=torch.int64, pin_memory=_pins(device))
    view, at = flat.numpy(), 0
    for array in arrays:
        view[at : at + array.size] = array.ravel()
        at += aligned(array.size)
    return flat


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Views of flat [n] with these shapes, one behind the other."""
    views, at = [], 0
    for shape in shapes:
        size = prod(shape)
        views.append(flat[at : at + size].view(shape))
        at += aligned(size)
    return tuple(views)


def aligned(count: int) -> int:
    """Numbers that an array takes up, so that the next one begins at a multiple of 16 bytes.

    Triton compiles a variant for pointers that are aligned and one for those that are not.
    """
    return count + count % 2


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Copies of the tensors on the host. The host waits once, for all of them."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    found = []
    for tensor in tensors:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_pins(tensor.device))
        found.append(pinned.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def _pins(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()
