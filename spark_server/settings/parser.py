"""The command line of `serve`, generated from the fields; turns argv into a layer of raw values.

Knows nothing of the other layers and checks no values.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.errors import ConfigError
from spark_server.settings.fields import GROUPS, Setting, all_settings
from spark_server.version import version

_MANY = ("auth.api_key",)


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigErrors instead of usage text and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Columns(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def is_switch(setting: Setting) -> bool:
    """Whether the setting is on or off and its flag takes no value."""
    return setting.annotation is bool


def default_text(setting: Setting) -> str:
    """The default as people read it."""
    if setting.default is None:
        return "auto" if setting.knob.auto else "none"
    if setting.default == ():
        return "none"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    if setting.knob.metavar == "SIZE":
        return f"{setting.default / 2**20:g}MiB"
    if isinstance(setting.default, float):
        return f"{setting.default:g}"
    return str(setting.default)


def choices(setting: Setting) -> tuple[str, ...]:
    """The words that a closed setting takes, or nothing."""
    args = getattr(setting.annotation, "__args__", ())
    return tuple(args) if args and all(isinstance(arg, str) for arg in args) else ()


def _help(setting: Setting) -> str:
    if not setting.knob.built:
        return argparse.SUPPRESS
    default = default_text(setting)
    if setting.knob.auto and default == "auto":
        default = f"auto: {setting.knob.auto}"
    return f"{setting.knob.help} [default {default}]".replace("%", "%%")


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `serve`: one section of the help per group."""
    parser = OneLineParser(
        prog=prog,
        usage=f"{prog} [MODEL] [options]",
        description="Serve a hybrid model over an OpenAI-compatible HTTP API.",
        epilog="Every option is also an environment variable (SPARK_PORT=8080) and a key of the "
        "--config file;\na flag wins over the environment, the environment over the file. "
        "docs/settings.md lists all of them.",
        formatter_class=_Columns,
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="Show this text and end")
    general.add_argument(
        "--version", action="version", version=f"Spark {version()}", help="Show the version"
    )
    general.add_argument("--config", metavar="FILE", help="TOML file with a table per group")
    sections = {
        name: parser.add_argument_group(name, (cls.__doc__ or "").strip())
        for name, cls in GROUPS.items()
        if any(s.knob.built and s.knob.flags for s in all_settings() if s.group == name)
    }
    for setting in all_settings():
        if setting.knob.flags:
            _add(sections.get(setting.group, parser), setting)
    return parser


def _add(section: argparse._ActionsContainer, setting: Setting) -> None:
    knob, shown = setting.knob, _help(setting)
    common: dict[str, Any] = {"dest": setting.path, "default": argparse.SUPPRESS, "help": shown}
    if is_switch(setting):
        section.add_argument(*knob.flags, action="append_const", const=True, **common)
        off = [f"--no-{flag.removeprefix('--')}" for flag in knob.flags]
        common["help"] = argparse.SUPPRESS
        section.add_argument(*off, action="append_const", const=False, **common)
        return
    words = choices(setting)
    metavar = knob.metavar or ("{" + ",".join(words) + "}" if words else "VALUE")
    section.add_argument(*knob.flags, action="append", metavar=metavar, **common)


def parse_flags(argv: Sequence[str], prog: str) -> tuple[dict[str, Any], str | None]:
    """Raw values by path, and the `--config` file.

    Raises:
        ConfigError: an unknown flag, or one setting given two different values.
        SystemExit: after --help or --version.
    """
    parser = build_parser(prog)
    known, rest = parser.parse_known_args(list(argv))
    values: dict[str, Any] = dict(vars(known))
    config = values.pop("config")
    for word in rest:
        if word.startswith("-") and word != "-":
            raise ConfigError(_unknown(word, parser))
        values.setdefault("model.model", []).append(word)
    return {path: _single(path, given) for path, given in values.items()}, config


def _single(path: str, given: list[Any]) -> Any:
    if path in _MANY:
        return tuple(given)
    different = list(dict.fromkeys(given))
    if len(different) > 1:
        name = next(s for s in all_settings() if s.path == path).knob.flags[0]
        shown = " and ".join(str(value) for value in different)
        raise ConfigError(f"{name} is given as {shown}; give it once")
    return different[0]


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.split("=", 1)[0]
    hidden = {flag for s in all_settings() if not s.knob.built for flag in s.knob.flags}
    flags = [flag for flag in parser._option_string_actions if flag not in hidden]
    close = difflib.get_close_matches(name, flags, n=1)
    hint = f"did you mean {close[0]}" if close else "see --help"
    return f"{name} is no setting of Spark; {hint}"
