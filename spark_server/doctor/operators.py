"""Checks of the device and of the operators that it gets: which, whether right, whether exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig
from engine.weights.model_config import load_config
from kernels.selftest import OperatorResult, RowsResult, SelfTest
from spark_server.doctor.check import Check, fail, ok, warn
from spark_server.doctor.machine import memory_line


def device_line(config: EngineConfig) -> Iterator[Check]:
    """What `--device` came to; for a GPU its name and memory.

    Args:
        config: device and dtype resolved, with the device's memory.
    """
    if config.device != "cuda":
        yield ok("device", f"{config.device}, {config.dtype}")
        return
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{properties.major}.{properties.minor}"
    yield ok("device", f"{properties.name}, compute capability {capability}, {config.dtype}")
    if config.device_memory is not None:
        yield memory_line("device memory", config.device_memory)


def operators(config: EngineConfig) -> Iterator[Check]:
    """Every operator that an engine of `config` would get, then whether rows depend on company.

    Raises:
        ConfigError: the operators do not run here, or lack a size that the model has.
    """
    import torch

    from engine.build import DTYPES, check_supported, choose_ops

    ops = choose_ops(config)
    check_supported(ops, load_config(Path(config.model_dir)), config)
    test = SelfTest(ops, torch.device(config.device), DTYPES[config.dtype])
    with torch.inference_mode():
        for result in test.operators():
            yield operator_line(result)
        for rows in test.rows():
            yield rows_line(rows, config)


def operator_line(result: OperatorResult) -> Check:
    """One operator against naive.py."""
    name = f"kernel {result.operator}"
    found = f"{result.form}, error {result.error:.1e}, at most {result.tolerance:.0e}"
    if result.right:
        return ok(name, found)
    return fail(name, found, "use --kernels naive, and report this with the lines above")


def rows_line(result: RowsResult, config: EngineConfig) -> Check:
    """Whether rows have the same bits alone and among others."""
    name = f"rows of {result.what}"
    if not result.different:
        return ok(name, "the same bits alone and among others")
    found = f"other bits with {', '.join(result.different)}"
    if config.device == "cuda":
        way = "use --batch-invariant if a request must not depend on its company"
    else:
        way = "use --kernels cpu --dtype float32 if a request must not depend on its company"
    return warn(name, found, way)
