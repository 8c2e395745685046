"""How a setting is spelled outside of Python, and the types that settings have.

Knows no setting by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr

from engine.errors import ConfigError
from engine.reserve.sizes import parse_size


class SettingsGroup(BaseModel):
    """Settings that stand together in the help, the documentation and the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Knob:
    """How a setting is spelled outside of Python.

    Attributes:
        help: one sentence for `--help` and docs/settings.md, no trailing period.
        flags: command line spellings, the first is the preferred one; empty for environment only.
        env: environment names, the first is the preferred one.
        metavar: what the help shows in place of the value.
        positional: may also be given as the bare argument of `serve`.
        secret: the value is never printed.
        built: False refuses the setting by name, because what it switches does not exist yet.
        auto: what the default `auto` stands for, in words.
    """

    help: str
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    metavar: str | None = None
    positional: bool = False
    secret: bool = False
    built: bool = True
    auto: str | None = None


def _presence(value: object) -> object:
    """The seeds' house rule: set to anything at all, also to nothing or 0, is on."""
    return value if isinstance(value, bool) else value is not None


Presence = Annotated[bool, BeforeValidator(_presence)]


def auto_none(value: object) -> object:
    """The word `auto` means None: to be decided when the machine and the model are known."""
    return None if isinstance(value, str) and value.strip().lower() == "auto" else value


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


AutoInt = Annotated[int | None, BeforeValidator(auto_none)]
AutoFloat = Annotated[float | None, BeforeValidator(auto_none)]
Size = Annotated[int | None, BeforeValidator(_size), BeforeValidator(auto_none)]
SizeInt = Annotated[int, BeforeValidator(_size)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_one_or_many)]
