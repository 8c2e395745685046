"""What a checkpoint holds, from safetensors headers alone. Reads no tensor, imports no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFormatError

INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
# A header of more than this is no header; safetensors itself refuses above 100 MB.
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where one tensor lies: its file, dtype as safetensors spells it, and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: those of the index, else every one; () if none.

    Raises:
        ModelFormatError: the index cannot be read or names a file that is not there.
    """
    places = _index(folder)
    if places is None:
        return tuple(sorted(folder.glob("*.safetensors")))
    files = tuple(folder / name for name in sorted(set(places.values())))
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ModelFormatError(
            f"{folder} lacks {len(absent)} of {len(files)} files that its index names, "
            f"first {absent[0]}; download the model again"
        )
    return files


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the checkpoint by name; empty when there is no safetensors file.

    Raises:
        ModelFormatError: a header is corrupt, a file is shorter than its header says, or lacks a
            tensor that the index places there.
    """
    found: dict[str, TensorHeader] = {}
    for path in checkpoint_files(folder):
        for name, entry in _read_header(path).items():
            if name in found:
                raise ModelFormatError(f"{name} is in {found[name].file.name} and in {path.name}")
            found[name] = entry
    for name, file in (_index(folder) or {}).items():
        if name not in found or found[name].file != folder / file:
            raise ModelFormatError(
                f"the index places {name} in {file} and it is not there; download the model again"
            )
    return found


def _index(folder: Path) -> dict[str, str] | None:
    """File name by tensor name, or None when the checkpoint has no index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        places = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(name, str) for name in places.values()):
            raise TypeError("weight_map holds something else than names of files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error!r}") from error
    return places


def tensor_names(folder: Path) -> tuple[str, ...]:
    """Names of all tensors of the checkpoint."""
    return tuple(tensor_headers(folder))


def _read_header(path: Path) -> dict[str, TensorHeader]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
            if length > min(_HEADER_LIMIT, size - 8):
                raise ModelFormatError(f"{path} has no safetensors header; download it again")
            raw = file.read(length)
    except OSError as error:
        raise ModelFormatError(
            f"{path} cannot be read: {error.strerror}; download it again"
        ) from error
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        headers = {name: _header(path, name, entry) for name, entry in entries.items()}
        end = _end_of_data({name: entry["data_offsets"] for name, entry in entries.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFormatError(
            f"{path} has a corrupt safetensors header ({_reason(error)}); download it again"
        ) from error
    if 8 + length + end != size:
        raise ModelFormatError(
            f"{path} has {size} bytes and its header promises {8 + length + end}; download it again"
        )
    return headers


def _end_of_data(places: Mapping[str, Any]) -> int:
    """Where the last tensor ends; raises unless each one begins where the one before it ended."""
    end = 0
    before = "the header"
    for name, (begin, stop) in sorted(places.items(), key=lambda item: tuple(item[1])):
        if begin != end:
            how = "overlaps" if begin < end else "leaves a gap behind"
            raise ValueError(f"{name} begins at {begin} and {how} {before}, which ends at {end}")
        before, end = name, stop
    return end


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _header(path: Path, name: str, entry: Mapping[str, Any]) -> TensorHeader:
    """One entry of a header; raises what a corrupt one leads to."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise TypeError(f"{name} has dtype {dtype!r}, shape {shape} and place {begin}, {end}")
    if dtype not in _DTYPE_BYTES:
        raise ModelFormatError(f"{path}: {name} has dtype {dtype}, which is not served")
    header = TensorHeader(path, dtype, shape)
    if header.nbytes != end - begin:
        raise ValueError(f"{name} takes {header.nbytes} bytes and has {end - begin}")
    return header
