"""The settings of watchdogs and ring: what wins, what is refused, what only warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from spark_server.resolve import engine_config
from spark_server.settings import LoadedSettings, load_settings

TINY = Path(__file__).resolve().parents[2] / "spark_server" / "assets" / "spark-tiny"


def load(*words: str, env: dict[str, str] | None = None) -> LoadedSettings:
    return load_settings(words, env or {})


def test_everything_is_off_unless_asked_for() -> None:
    settings = load().settings
    assert (settings.watchdogs.enabled, settings.watchdogs.ssm_decode_ring_slots) == (False, None)
    config, _ = engine_config(settings, str(TINY))
    assert (config.watchdogs, config.decode_ring_slots, config.decode_ring_override) == (
        False,
        None,
        None,
    )


def test_what_is_asked_for_reaches_the_engine() -> None:
    words = ("--watchdogs", "on", "--ssm-decode-ring-slots", "3")
    loaded = load(*words, env={"ATLAS_SSM_DECODE_RING": "1"})
    config, _ = engine_config(loaded.settings, str(TINY))
    assert (config.watchdogs, config.decode_ring_slots, config.decode_ring_override) == (
        True,
        3,
        "1",
    )
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("value", "enabled"), [("1", False), (" TRUE ", False), ("0", True), ("", True), ("yes", True)]
)
def test_the_switch_wins_over_the_flag(value: str, enabled: bool) -> None:
    loaded = load("--watchdogs", "on", env={"ATLAS_DISABLE_WATCHDOGS": value})
    assert loaded.settings.watchdogs.enabled is enabled
    words = "ATLAS_DISABLE_WATCHDOGS switches off what --watchdogs asks for"
    assert loaded.warnings == (() if enabled else (words,))


@pytest.mark.parametrize(("text", "depth"), [("auto", None), ("Auto", None), ("0", 0), ("8", 8)])
def test_a_depth_is_auto_or_a_number(text: str, depth: int | None) -> None:
    assert load("--ssm-decode-ring-slots", text).settings.watchdogs.ssm_decode_ring_slots == depth


@pytest.mark.parametrize("text", ["9", "-1", "2.5", "", "deep"])
def test_other_depths_are_refused_with_what_would_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ssm-decode-ring-slots is '.*'; use auto or a depth"):
        load(f"--ssm-decode-ring-slots={text}")


def test_a_value_that_changes_nothing_warns() -> None:
    assert load(env={"ATLAS_SSM_DECODE_RING": "2"}).warnings == (
        "ATLAS_SSM_DECODE_RING='2' is neither 0 nor 1 and changes nothing",
    )
    assert load(env={"METRALE_SSM_DECODE_RING": "0"}).warnings == ()


def test_the_file_has_a_table_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "spark.toml"
    path.write_text("[watchdogs]\nwatchdogs = 'on'\nssm_decode_ring_slots = 2\n")
    settings = load("--config", str(path)).settings.watchdogs
    assert (settings.enabled, settings.ssm_decode_ring_slots) == (True, 2)
