"""Starts that cannot work: exit code 2, at once, with a sentence that says what to do."""

from __future__ import annotations

import re
import shutil
import socket
import time
from importlib.resources import files
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.servers import popen

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
