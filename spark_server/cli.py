"""`serve` and `spark`: find the command, run it, turn its errors into exit codes.

Imports a command's module only when it is asked for. Exit codes: 0, 2 for a user's mistake, 1 for
ours.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, ModelFormatError
from spark_server.version import version

EXIT_OURS = 1
EXIT_USERS = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand of `spark`; `target` is `module:function`, called with the remaining words."""

    target: str
    help: str


COMMANDS = {
    "serve": Command("spark_server.server:serve", "serve a model over HTTP"),
    "plan": Command("spark_server.plan:main", "print what a model would take"),
    "doctor": Command("spark_server.doctor.cli:main", "check machine, environment and a model"),
    "chat": Command("spark_server.chat:main", "talk to a running server from the terminal"),
    "bench": Command("benchmarks.load:main", "measure a running server under load"),
    "train-tiny": Command("benchmarks.tiny.train:main", "train the model that comes with Spark"),
}


def serve_main(argv: Sequence[str] | None = None) -> int:
    """The console script `serve`."""
    return _run("serve", list(sys.argv[1:] if argv is None else argv))


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `spark`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else EXIT_USERS
    if words[0] in ("-V", "--version"):
        print(f"Spark {version()}")
        return 0
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}" if close else f"there are {', '.join(COMMANDS)}"
        return _mistake(f"{words[0]} is no command of spark; {hint}")
    return _run(words[0], words[1:])


def usage() -> str:
    """The text of `spark --help`."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: spark COMMAND [options]",
            "",
            "commands:",
            *rows,
            "",
            "spark COMMAND --help shows the options of a command.",
        ]
    )


def _run(name: str, words: Sequence[str]) -> int:
    module, _, function = COMMANDS[name].target.partition(":")
    try:
        call: Callable[[Sequence[str]], int | None] = getattr(
            importlib.import_module(module), function
        )
        return call(words) or 0
    except (ConfigError, ModelFormatError) as error:
        return _mistake(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; say nothing more, also not at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OURS


def _mistake(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return EXIT_USERS


if __name__ == "__main__":
    sys.exit(main())
