"""The command line of `spark doctor`: runs the checks in order, prints each as it is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import SparkError
from spark_server.doctor import machine
from spark_server.doctor.check import Check, Status, guarded, of_error

if TYPE_CHECKING:  # a missing package must not keep the doctor from saying so
    from spark_server.settings import Settings

EXIT_FAILED = 1
_HELP = """usage: spark doctor [MODEL] [--json] [options of serve]

Check this machine, its environment and a model, and print ok, warn or fail with the way out.
The settings are those of serve (--model, --device, --dtype, --kernels, --port ...; see
serve --help), from flags, environment and --config file. Exit code 0, or 1 if a check failed."""
_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
_NAME_WIDTH = 30


def main(words: Sequence[str]) -> int:
    """Print what is found; 1 when a check failed, else 0. Takes the settings of `serve`.

    Raises:
        ConfigError: words that are no settings.
    """
    if "-h" in words or "--help" in words:
        print(_HELP)
        return 0
    rest = [word for word in words if word != "--json"]
    show = _silent if len(rest) < len(words) else _printer()
    found = []
    for check in _all(rest):
        found.append(check)
        show(check)
    failed = [check for check in found if check.status is Status.FAIL]
    warned = [check for check in found if check.status is Status.WARN]
    if show is _silent:
        values = {"ok": not failed, "checks": [check.as_dict() for check in found]}
        print(json.dumps(values, indent=2))
    else:
        print(f"{len(found)} checks, {len(warned)} warnings, {len(failed)} failed")
    return EXIT_FAILED if failed else 0


def _all(words: Sequence[str]) -> Iterator[Check]:
    """The environment first: without its packages the settings cannot be read."""
    found = list(environment())
    yield from found
    if any(check.name == "packages" and check.status is Status.FAIL for check in found):
        return
    from spark_server.settings import load_settings

    yield from checks(load_settings(words, prog="spark doctor").settings)


def environment() -> Iterator[Check]:
    """Interpreter and packages."""
    yield from guarded("python", machine.python)
    yield from guarded("packages", machine.packages)
    yield from guarded("kernels", machine.hub_kernels)


def checks(settings: Settings) -> Iterator[Check]:
    """Machine, port and model, those first that the others need."""
    yield from guarded("torch", machine.torch_build)
    yield from guarded("processor", machine.processor)
    yield from guarded("memory", lambda: machine.memory(settings.memory.host_reserve))
    yield from guarded("kernel cache", machine.numba_cache)
    server = settings.server
    yield from guarded("port", lambda: machine.port(server.host, server.port))
    yield from guarded("model", lambda: _of_model(settings))
    yield from guarded("threads", machine.threads)


def _of_model(settings: Settings) -> Iterator[Check]:
    """Files, device, whether it fits, and the operators that its type and device get."""
    from spark_server.doctor import model
    from spark_server.model_source import locate_model
    from spark_server.resolve import engine_config, finish_config

    folder = Path(locate_model(settings.model.model, download=False).folder)
    yield from guarded("weights", lambda: model.weights(folder))
    yield from guarded("tokenizer", lambda: model.text(folder, settings.model.chat_template))
    try:
        config, _ = engine_config(settings, str(folder))
        memory = settings.memory
        config, _ = finish_config(config, memory.gpu_memory_utilization, memory.host_reserve)
    except SparkError as error:
        yield of_error("device", error)
        return
    from spark_server.doctor import operators

    yield from guarded("triton", lambda: machine.triton_build(config.device))
    yield from guarded("device", lambda: operators.device_line(config))
    yield from guarded("fits", lambda: model.fits(config))
    yield from guarded("kernels", lambda: operators.operators(config))


def _silent(check: Check) -> None:
    """Nothing; the checks are printed as JSON in the end."""


def plain(check: Check) -> str:
    """One line, and a second one for the way out."""
    line = f"{check.status.value:4}  {check.name:{_NAME_WIDTH}}  {check.found}"
    return f"{line}\n{'':{_NAME_WIDTH + 8}}-> {check.way_out}" if check.way_out else line


def _printer() -> Callable[[Check], None]:
    """How a check is printed as soon as it is found: in colour on a terminal, plain elsewhere."""
    if not sys.stdout.isatty():
        return lambda check: print(plain(check), flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def show(check: Check) -> None:
        line = Text(f"{check.status.value:4}", style=_COLOURS[check.status])
        line.append(f"  {check.name:{_NAME_WIDTH}}  {check.found}", style="default")
        if check.way_out:
            line.append(f"\n{'':{_NAME_WIDTH + 8}}-> {check.way_out}", style="dim")
        console.print(line)

    return show
