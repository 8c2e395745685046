"""Speculation's settings: each flag and variable reaches the policy, contradictions are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.reserve.ladder import DEFAULT_LADDER, LadderStep
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.speculation.policy import ControllerMode, PolicySettings
from spark_server.settings import LoadedSettings, load_settings
from spark_server.settings.speculation import MAX_NUM_DRAFTS


def load(*argv: str, env: dict[str, str] | None = None) -> LoadedSettings:
    return load_settings(argv, env or {})


def policy(*argv: str, env: dict[str, str] | None = None) -> PolicySettings:
    """With --speculative, which must give no warning."""
    loaded = load("--speculative", *argv, env=env)
    assert loaded.warnings == ()
    found = loaded.settings.speculation.policy(recurrent=True)
    assert found is not None
    return found


def test_off_is_no_policy() -> None:
    assert load().settings.speculation.policy(recurrent=True) is None
    assert load("--no-speculative").settings.speculation.policy(recurrent=True) is None


def test_defaults() -> None:
    found = policy()
    assert found == PolicySettings(num_drafts=3)
    assert found.rollback is SsmRollbackMode.CARRY
    assert found.controller is ControllerMode.AUTO
    assert found.ladder == DEFAULT_LADDER
    assert (found.mtp_max_seqs, found.full_width, found.dcut_width_cap) == (32, False, 8)
    assert found.recurrent
    without = load("--speculative").settings.speculation.policy(recurrent=False)
    assert without is not None
    assert not without.recurrent


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (("--num-drafts", "1"), "num_drafts", 1),
        (("--num-drafts", "7"), "num_drafts", 7),
        (("--ssm-rollback-mode", "snapshot"), "rollback", SsmRollbackMode.SNAPSHOT),
        (("--ssm-rollback-mode", "replay"), "rollback", SsmRollbackMode.REPLAY),
        (("--ssm-rollback-mode", "carry"), "rollback", SsmRollbackMode.CARRY),
        (("--spec-controller", "on"), "controller", ControllerMode.ON),
        (("--spec-controller", "off"), "controller", ControllerMode.OFF),
        (("--spec-controller", "auto"), "controller", ControllerMode.AUTO),
    ],
)
def test_flags(argv: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(policy(*argv), name) == value
    spelled = "SPARK_" + argv[0].removeprefix("--").upper().replace("-", "_")
    assert getattr(policy(env={spelled: argv[1]}), name) == value


@pytest.mark.parametrize("text", ["", "0", "false", "1"])
@pytest.mark.parametrize(
    ("variable", "changes"),
    [
        ("NO_MTP_K_LADDER", {"ladder": None, "mtp_max_seqs": 4, "controller_acts": False}),
        ("MTP_STATIC_RUNG", {"static_rung": True, "adaptive_rung_acts": False}),
        ("MTP_POOL_FULL_WIDTH", {"full_width": True, "pinned_slots": False}),
        ("NO_MTP_DCUT", {"dcut_width_cap": 0}),
    ],
)
@pytest.mark.parametrize("prefix", ["ATLAS_", "METRALE_"])
def test_presence_variables(prefix: str, variable: str, changes: dict[str, Any], text: str) -> None:
    found = policy(env={prefix + variable: text})
    assert {name: getattr(found, name) for name in changes} == changes
    assert all(getattr(policy(), name) != value for name, value in changes.items()
               if name != "pinned_slots")  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("MTP_K_LADDER", "4:2,2:3", "ladder", (LadderStep(2, 3), LadderStep(4, 2))),
        ("MTP_MAX_SEQS", "64", "mtp_max_seqs", 64),
        ("MTP_MAX_SEQS", "4", "mtp_max_seqs", 4),
        ("MTP_DCUT_MAX_SEQS", "16", "dcut_width_cap", 16),
        ("MTP_DCUT_MAX_SEQS", "0", "dcut_width_cap", 0),
        ("EP_PROTOCOL", "v2", "full_width", True),
        ("EP_PROTOCOL", "v1", "full_width", False),
        ("EP_PROTOCOL", "", "full_width", False),
    ],
)
@pytest.mark.parametrize("prefix", ["ATLAS_", "METRALE_"])
def test_value_variables(prefix: str, variable: str, text: str, name: str, value: object) -> None:
    assert getattr(policy(env={prefix + variable: text}), name) == value


def test_max_seqs_wins_over_what_no_ladder_implies() -> None:
    env = {"ATLAS_NO_MTP_K_LADDER": "0", "ATLAS_MTP_MAX_SEQS": "64"}
    assert policy(env=env).mtp_max_seqs == 64


def test_a_pinned_rung_stops_the_controller_unless_its_flag_asks_for_it() -> None:
    for name, text in (("ATLAS_MTP_STATIC_RUNG", ""), ("ATLAS_MTP_K_LADDER", "4:4")):
        assert not policy(env={name: text}).controller_acts
        assert policy("--spec-controller", "on", env={name: text}).controller_acts
    assert policy().controller_acts
    assert not policy("--spec-controller", "off").controller_acts


@pytest.mark.parametrize("count", ["0", "-1", "8", "100"])
def test_drafts_that_no_verify_takes(count: str) -> None:
    for argv, env in ((("--num-drafts", count), {}), ((), {"SPARK_NUM_DRAFTS": count})):
        with pytest.raises(ConfigError) as caught:
            load("--speculative", *argv, env=env)
        origin = argv[0] if argv else "SPARK_NUM_DRAFTS"
        assert str(caught.value) == (
            f"{origin} is {count}; a verify takes 1 to {MAX_NUM_DRAFTS} drafts, "
            "and none is what --no-speculative is for"
        )


@pytest.mark.parametrize(
    ("argv", "env", "start"),
    [
        (("--num-drafts", "many"), {}, "--num-drafts should be a valid integer"),
        (("--ssm-rollback-mode", "undo"), {}, "--ssm-rollback-mode should be 'snapshot'"),
        (("--spec-controller", "maybe"), {}, "--spec-controller should be 'auto'"),
        ((), {"ATLAS_MTP_MAX_SEQS": "-1"}, "ATLAS_MTP_MAX_SEQS should be greater than"),
        ((), {"ATLAS_MTP_MAX_SEQS": ""}, "ATLAS_MTP_MAX_SEQS should be a valid integer"),
        ((), {"METRALE_MTP_DCUT_MAX_SEQS": "x"}, "METRALE_MTP_DCUT_MAX_SEQS should be"),
    ],
)
def test_values_that_mean_nothing(argv: tuple[str, ...], env: dict[str, str], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--speculative", *argv, env=env)
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("text", ["", "4", "4:x", "4:3;8:2", "4:-1", "4:3,", "four:3"])
def test_a_ladder_that_does_not_parse_is_the_default_with_one_warning(text: str) -> None:
    loaded = load("--speculative", env={"ATLAS_MTP_K_LADDER": text})
    assert loaded.warnings == (
        f"ATLAS_MTP_K_LADDER={text!r} is not a list of n_max:drafts, "
        "so that the default 4:3,8:3,16:1,32:1 is used",
    )
    found = loaded.settings.speculation.policy(recurrent=True)
    assert found is not None
    assert found.ladder == DEFAULT_LADDER
    assert found.controller_acts, "a ladder that is not in force pins nothing"


@pytest.mark.parametrize(
    ("env", "warning", "effect"),
    [
        (
            {"ATLAS_NO_MTP_K_LADDER": "", "ATLAS_MTP_K_LADDER": "4:2"},
            "ATLAS_NO_MTP_K_LADDER is set, so that ATLAS_MTP_K_LADDER is not used",
            {"ladder": None},
        ),
        (
            {"ATLAS_NO_MTP_DCUT": "0", "ATLAS_MTP_DCUT_MAX_SEQS": "4"},
            "ATLAS_NO_MTP_DCUT is set, so that ATLAS_MTP_DCUT_MAX_SEQS is not used",
            {"dcut_width_cap": 0},
        ),
        (
            {"ATLAS_MTP_MAX_SEQS": "0"},
            "ATLAS_MTP_MAX_SEQS is 0, so that no batch speculates",
            {"mtp_max_seqs": 0},
        ),
        (
            {"ATLAS_EP_PROTOCOL": "V2"},
            "ATLAS_EP_PROTOCOL='V2' is not v2 and changes nothing",
            {"pinned_slots": False},
        ),
    ],
)
def test_variables_that_contradict_each_other_warn_once(
    env: dict[str, str], warning: str, effect: dict[str, Any]
) -> None:
    loaded = load("--speculative", env=env)
    assert loaded.warnings == (warning,)
    found = loaded.settings.speculation.policy(recurrent=True)
    assert {name: getattr(found, name) for name in effect} == effect


@pytest.mark.parametrize(
    "argv",
    [("--num-drafts", "2"), ("--ssm-rollback-mode", "replay"), ("--spec-controller", "off")],
)
def test_a_flag_that_needs_speculation_is_refused_without(
    argv: tuple[str, ...], tmp_path: Path
) -> None:
    for also in ((), ("--no-speculative",)):
        with pytest.raises(ConfigError) as caught:
            load(*argv, *also)
        assert str(caught.value) == (
            f"{argv[0]} needs --speculative; add --speculative or leave {argv[0]} out"
        )
    path = tmp_path / "spark.toml"
    path.write_text("[speculation]\nspeculative = true\n")
    assert load(*argv, "--config", str(path)).settings.speculation.speculative


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SPARK_NUM_DRAFTS", "2"),
        ("SPARK_SPEC_CONTROLLER", "on"),
        ("ATLAS_MTP_K_LADDER", "4:2"),
        ("ATLAS_NO_MTP_K_LADDER", ""),
        ("ATLAS_MTP_MAX_SEQS", "8"),
        ("ATLAS_MTP_STATIC_RUNG", ""),
        ("METRALE_MTP_POOL_FULL_WIDTH", ""),
        ("ATLAS_MTP_DCUT_MAX_SEQS", "4"),
        ("ATLAS_NO_MTP_DCUT", ""),
    ],
)
def test_a_variable_without_speculation_warns(name: str, text: str) -> None:
    assert load(env={name: text}).warnings == (f"{name} has no effect without --speculative",)


def test_the_file_names_everything_too(tmp_path: Path) -> None:
    path = tmp_path / "spark.toml"
    path.write_text(
        "[speculation]\nspeculative = true\nnum_drafts = 2\nmtp_k_ladder = '8:2'\n"
        "no_mtp_dcut = true\nmtp_static_rung = false\n"
    )
    found = policy("--config", str(path))
    assert (found.num_drafts, found.ladder, found.dcut_off) == (2, (LadderStep(8, 2),), True)
    assert not found.static_rung
