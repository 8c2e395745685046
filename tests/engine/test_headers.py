"""safetensors headers: single files, shards with an index, and everything that can be broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelFormatError
from engine.weights.headers import INDEX, checkpoint_files, tensor_headers, tensor_names
from tests.engine.tiny_weights import write_shards


def raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
        "d": torch.zeros(0, 5),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    headers = tensor_headers(tmp_path)
    got = {name: (h.file, h.dtype, h.shape, h.nbytes) for name, h in headers.items()}
    assert got == {
        "a": (file, "F32", (2, 3), 24),
        "b": (file, "BF16", (4,), 8),
        "c": (file, "I64", (), 8),
        "d": (file, "F32", (0, 5), 0),
    }
    assert set(tensor_names(tmp_path)) == set("abcd")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert checkpoint_files(tmp_path) == ()
    assert tensor_headers(tmp_path) == {}


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    files = write_shards(tmp_path, {}, {name: torch.ones(2) for name in "abc"})
    save_file({"z": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert checkpoint_files(tmp_path) == tuple(files)
    assert {n: h.file.name[6:11] for n, h in tensor_headers(tmp_path).items()} == {
        "a": "00001",
        "b": "00002",
        "c": "00001",
    }


def test_without_an_index_every_file_counts_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    assert set(tensor_headers(tmp_path)) == {"a", "b"}
    save_file({"a": torch.ones(2)}, tmp_path / "3.safetensors")
    with pytest.raises(ModelFormatError, match=r"a is in 1\.safetensors and in 3\.safetensors"):
        tensor_headers(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, {}, {name: torch.ones(2) for name in "abc"})
    files[1].unlink()
    with pytest.raises(ModelFormatError, match=r"lacks 1 of 2 files.*model-00002-of-00002"):
        tensor_headers(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    files = write_shards(tmp_path, {}, {name: torch.ones(2) for name in "abc"})
    save_file({"a": torch.ones(2)}, files[0])
    with pytest.raises(ModelFormatError, match=r"index .*c .*00001-of-00002.*download"):
        tensor_headers(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": []}}'],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelFormatError, match=rf"{INDEX} cannot be read"):
        tensor_headers(tmp_path)


def test_a_truncated_file_says_both_sizes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    words = f"has {len(whole) - 7} bytes and its header promises {len(whole)}"
    with pytest.raises(ModelFormatError, match=words):
        tensor_headers(tmp_path)
    file.write_bytes(whole[:60])
    with pytest.raises(ModelFormatError, match="has no safetensors header"):
        tensor_headers(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"abc", b"\0" * 8, b"<!DOCTYPE html><html>not found</html>"],
    ids=["empty", "short", "zeros", "page"],
)
def test_a_file_of_something_else(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors has .* safetensors header"):
        tensor_headers(tmp_path)


def test_a_git_lfs_pointer_is_no_checkpoint(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ModelFormatError, match="no safetensors header"):
        tensor_headers(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        {"a": 3},
        {"a": {}},
        {"a": entry(dtype=["F32"])},
        {"a": entry(shape=None)},
        {"a": entry(shape=["2"])},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(offsets=[0])},
        {"a": entry(offsets=["0", "8"])},
        {"a": entry(offsets=[0, 4])},
        {"a": entry(offsets=[8, 0])},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(offsets=[4, 12])},
        {"a": entry(offsets=[8, 16])},
        {"a": entry(), "b": entry(offsets=[16, 24])},
        b"[" * 100_000,
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_corrupt_header_is_named(tmp_path: Path, header: Any) -> None:
    raw(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors has a corrupt safetensors"):
        tensor_headers(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 50])
def test_a_header_longer_than_its_file(tmp_path: Path, length: int) -> None:
    raw(tmp_path / "model.safetensors", {}, length=length)
    with pytest.raises(ModelFormatError, match="no safetensors header"):
        tensor_headers(tmp_path)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    raw(tmp_path / "model.safetensors", {"a": entry(dtype="Q4")}, b"\0" * 8)
    with pytest.raises(ModelFormatError, match="a has dtype Q4"):
        tensor_headers(tmp_path)


def test_overlapping_tensors_are_named_with_their_places(tmp_path: Path) -> None:
    header = {"a": entry(), "b": entry(offsets=[4, 12])}
    raw(tmp_path / "model.safetensors", header, b"\0" * 12)
    words = r"corrupt .*b begins at 4 and overlaps a, which ends at 8\); download it again"
    with pytest.raises(ModelFormatError, match=words):
        tensor_headers(tmp_path)


def test_bytes_behind_the_last_tensor_are_refused_with_both_sizes(tmp_path: Path) -> None:
    raw(tmp_path / "model.safetensors", {"a": entry()}, b"\0" * 9)
    size = (tmp_path / "model.safetensors").stat().st_size
    with pytest.raises(ModelFormatError, match=f"has {size} bytes .* promises {size - 1}"):
        tensor_headers(tmp_path)


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(ModelFormatError, match=r"model\.safetensors cannot be read: No such file"):
        tensor_headers(tmp_path)
