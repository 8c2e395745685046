"""Starts that cannot work: exit code 2, at once, with a sentence that says what to do."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.servers import ROOT, popen
from tests.engine.tiny_weights import write_shards

pytestmark = pytest.mark.server
PACKAGED = Path(str(files("spark_server") / "assets" / "spark-tiny"))
CPU = ("--port", "0", "--device", "cpu", "--threads", "1")


def refused(*words: str, code: int = 2) -> tuple[str, float]:
    """What a start that must fail printed, and its seconds."""
    began = time.monotonic()
    with popen(*words) as process:
        try:
            _, text = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, text
    assert "Traceback" not in text, text
    assert "Warning" not in text, text
    assert "Spark serves" not in text
    return text, time.monotonic() - began


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the packaged model that a test may break."""
    return Path(shutil.copytree(PACKAGED, tmp_path / "model"))


def test_a_model_that_does_not_fit_names_the_largest_term_and_a_way_out() -> None:
    text, _ = refused(*CPU, "--memory-budget", "100MB")
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert re.search(r"needs \d+ bytes .* budget is 100000000 bytes", line)
    assert re.search(r"the largest term is \w+ with \d", line)
    way = re.search(r"--memory-budget (\d+)MiB", line)
    assert way is not None
    assert "weights" not in text.split("error: ")[0], "refused before a weight byte was read"


def test_the_advice_of_a_refusal_is_enough() -> None:
    """The batch size that the refusal names fits; one more does not."""
    words = (*CPU, "--memory-budget", "1020MiB", "--max-seq-len", "2048")
    text, _ = refused(*words, "--max-batch-size", "4096")
    advice = re.search(r"--max-batch-size (\d+) at this length", text)
    assert advice is not None, text
    batch = int(advice[1])
    assert 1 <= batch < 4096
    text, _ = refused(*words, "--max-batch-size", str(batch + 1))
    assert f"--max-batch-size {batch} at this length" in text


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text, _ = refused("--port", str(port), "--device", "cpu")
    assert f"error: port {port} on 127.0.0.1 is taken" in text


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--max-batch", "4"), "--max-batch-size"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--max-batch-size", "none"), "max-batch-size"),
        (("--max-batch-size", "0"), "max-batch-size"),
        (("--memory-budget", "lots"), "memory-budget"),
        (("--memory-budget", "80%"), "--memory-budget '80%' is a share.*--gpu-memory-utiliz.* 0.8"),
        (("--memory-budget", "-1"), "--memory-budget .*'-1' is negative; write 1.5GiB"),
        (("--memory-budget", "12 apples"), "--memory-budget .*unknown unit 'apples'; write 1.5GiB"),
        (("--memory-budget", "1000TiB"), "--memory-budget .* is more than the .* that can be had"),
        (("--host-reserve", "1000TiB"), "no memory can be had: .*lower --host-reserve"),
        (("--gpu-memory-utilization", "1.5"), "utilization .*less than or equal to 1"),
        (("--kv-tokens", "640"), "--kv-tokens 640 is less than one sequence of --max-seq-len 4096"),
        (("--kv-tokens", "9999999999"), "largest term is kv_pool .*what would fit: .*--kv-tokens"),
        (("--max-seq-len", "100000"), "--max-seq-len 100000 exceeds the 4096"),
        (("no-such-model",), "model no-such-model is no folder here"),
        (("--kernels", "cpu", "--dtype", "bfloat16"), "--kernels cpu runs float32"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_words_that_cannot_work(words: tuple[str, ...], match: str) -> None:
    text, _ = refused(*CPU, *words)
    assert re.search(rf"^.*error: .*{match}", text, re.M), text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    text, _ = refused(str(folder), *CPU)
    words = {"model.safetensors": "safetensors"}.get(name, name)
    assert re.search(rf"^error: .*{re.escape(words)}", text, re.M), text


def test_a_file_of_weights_that_was_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    text, _ = refused(str(folder), *CPU)
    assert re.search(
        r"^error: .*model\.safetensors has \d+ bytes and its header promises", text, re.M
    )


def header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of a safetensors file, and leaves the data as it is."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def overlap(entries: dict[str, Any]) -> None:
    last = max(
        (e for e in entries if e != "__metadata__"), key=lambda e: entries[e]["data_offsets"]
    )
    begin, end = entries[last]["data_offsets"]
    entries[last]["data_offsets"] = [begin - 2, end - 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:30]), "has no safetensors header"),
        (
            lambda f: f.write_bytes(struct.pack("<Q", 2**60) + f.read_bytes()[8:]),
            "has no safetensors header",
        ),
        (
            lambda f: f.write_bytes(f.read_bytes()[:8] + b"}" + f.read_bytes()[9:]),
            "has a corrupt safetensors header",
        ),
        (lambda f: header(f, overlap), "has a corrupt safetensors header .* overlaps"),
        (
            lambda f: f.write_bytes(f.read_bytes() + b"more"),
            r"has \d+ bytes and its header promises",
        ),
    ],
    ids=["cut", "huge", "no JSON", "overlap", "longer"],
)
def test_a_corrupt_header(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    file = folder / "model.safetensors"
    spoil(file)
    for command in (lambda *rest: refused(*rest, *CPU)[0], planned):
        text = command(str(folder))
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert re.search(rf"{re.escape(str(file))} {words}.*download it again", line), line
        assert "imports" not in text, "the engine's process was not started"


def planned(*words: str) -> str:
    """What a plan that must be refused printed."""
    command = [sys.executable, "-W", "error", "-m", "spark_server.cli", "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_shard_that_is_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    files = write_shards(folder, json.loads((folder / "config.json").read_text()), tensors)
    files[1].unlink()
    words = (
        r"lacks 1 of 2 files that its index names, first model-00002-of-00002\.safetensors; down"
    )
    text, _ = refused(str(folder), *CPU)
    assert re.search(rf"^error: {re.escape(str(folder))} {words}", text, re.M), text
    text = planned(str(folder))
    assert re.search(words, text), text
    assert f"or plan without its weights from {folder / 'config.json'}" in text


def test_a_chat_template_that_is_missing(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text, seconds = refused(str(folder), *CPU)
    words = "has no chat template, neither chat_template.jinja nor chat_template in tokenizer_conf"
    assert re.search(rf"^error: {re.escape(str(folder))} {words}", text, re.M), text
    assert "--chat-template FILE, or serve /v1/completions alone with --chat-template none" in text
    assert seconds < 10
    text, _ = refused(str(folder), *CPU, "--chat-template", str(folder / "no.jinja"))
    assert re.search(r"^error: --chat-template .*no\.jinja: No such file", text, re.M), text


def test_a_tensor_that_is_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.linear_attn.A_log"
    del tensors[next(key for key in tensors if key.endswith("layers.1.linear_attn.A_log"))]
    save_file(tensors, file)
    text, _ = refused(str(folder), *CPU)
    assert re.search(rf"^error: the checkpoint lacks .*{name.split('model.')[1]}", text, re.M), text


def test_a_weight_that_is_nan_ends_the_start_and_not_the_first_request(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = next(key for key in tensors if key.endswith("layers.2.input_layernorm.weight"))
    tensors[norm].fill_(float("nan"))
    save_file(tensors, file)
    began = time.monotonic()
    with popen(str(folder), *CPU) as process:
        try:
            _, text = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1, text
    assert "no finite logits" in text
    assert time.monotonic() - began < 60
