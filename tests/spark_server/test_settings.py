"""Settings: layering, spellings, presence rule, refusals in one line, documentation in step."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from pydantic import ValidationError

import spark_server
from engine.errors import ConfigError
from spark_server.settings import LoadedSettings, load_settings, read_api_keys
from spark_server.settings.fields import all_settings
from spark_server.settings.markdown import settings_markdown

REPO = Path(spark_server.__file__).parent.parent


def load(*argv: str, env: dict[str, str] | None = None) -> LoadedSettings:
    return load_settings(argv, env or {})


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, env=env)
    text = str(caught.value)
    assert "\n" not in text
    return text


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spark.toml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    settings = load().settings
    assert settings.model.model == "spark-tiny"
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.batching.max_batch_size == 32
    assert settings.batching.max_seq_len is None
    assert settings.server.stuck_timeout == 20
    assert settings.auth.api_key == ()


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = toml(tmp_path, "[server]\nport = 1\nhost = '::1'\n[batching]\nmax_batch_size = 3\n")
    loaded = load(
        "--config",
        path,
        "--port",
        "4",
        env={"SPARK_PORT": "2", "SPARK_MAX_BATCH_SIZE": "5"},
    )
    assert loaded.settings.server.port == 4
    assert loaded.settings.batching.max_batch_size == 5
    assert loaded.settings.server.host == "::1"
    assert loaded.settings.server.drain_timeout == 30
    assert loaded.origins["server.port"] == "--port"
    assert loaded.origins["batching.max_batch_size"] == "SPARK_MAX_BATCH_SIZE"
    assert "[server] host" in loaded.origins["server.host"]


def test_the_file_may_come_from_the_environment(tmp_path: Path) -> None:
    path = toml(tmp_path, "[server]\nport = 9\n")
    assert load(env={"SPARK_CONFIG": path}).settings.server.port == 9


def test_settings_are_frozen() -> None:
    settings = load().settings
    with pytest.raises(ValidationError):
        settings.server.port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.server = load().settings.server  # type: ignore[misc]


@pytest.mark.parametrize("argv", [("m",), ("--model", "m"), ("m", "--model", "m"), ("--model=m",)])
def test_the_model_is_an_argument_or_a_flag(argv: tuple[str, ...]) -> None:
    assert load(*argv).settings.model.model == "m"


def test_both_spellings_of_utilization() -> None:
    for flag in ("--gpu-memory-utilization", "--memory-utilization"):
        assert load(flag, "0.7").settings.memory.gpu_memory_utilization == 0.7
    for name in ("SPARK_GPU_MEMORY_UTILIZATION", "SPARK_MEMORY_UTILIZATION"):
        assert load(env={name: "0.7"}).settings.memory.gpu_memory_utilization == 0.7


def test_sizes_and_auto() -> None:
    assert load("--memory-budget", "1.5GiB").settings.memory.memory_budget == 3 * 2**29
    assert load("--memory-budget", "auto").settings.memory.memory_budget is None
    assert load("--max-body-size", "2MiB").settings.limits.max_body_size == 2**21
    assert load("--threads", "auto").settings.model.threads is None
    assert load("--max-seq-len", "Auto").settings.batching.max_seq_len is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--port", "x"), ["--port", "'x'"]),
        (("--port", "65536"), ["--port", "65535", "'65536'"]),
        (("--port", "1", "--port", "2"), ["--port", "1 and 2"]),
        (("a", "b"), ["--model", "a and b"]),
        (("--prot", "1"), ["--prot", "did you mean --port"]),
        (("--max-batch", "1"), ["--max-batch is no setting", "--max-batch-size"]),
        (("--mtp-max-seqs", "1"), ["--mtp-max-seqs is no setting"]),
        (("--device", "gpu"), ["--device", "'cuda'", "'gpu'"]),
        (("--threads", "0"), ["--threads", "1 or auto"]),
        (("--max-prefill-tokens", "63"), ["--max-prefill-tokens", "64", "'63'"]),
        (("--gpu-memory-utilization", "nan"), ["--gpu-memory-utilization", "finite"]),
        (("--gpu-memory-utilization", "1.01"), ["--gpu-memory-utilization", "1"]),
        (("--memory-budget", "80%"), ["--memory-budget", "--gpu-memory-utilization 0.8"]),
        (("--memory-budget", "-1GiB"), ["--memory-budget"]),
        (("--drain-timeout", "inf"), ["--drain-timeout"]),
        (("--port",), ["--port"]),
        (("--config", "/nowhere/at/all.toml"), ["/nowhere/at/all.toml"]),
        (
            ("--memory-budget", "1GiB", "--memory-utilization", "0.5"),
            ["--memory-budget", "--gpu-memory-utilization", "only one"],
        ),
    ],
)
def test_a_mistake_is_named_with_its_value(argv: tuple[str, ...], words: list[str]) -> None:
    text = refusal(*argv)
    assert all(word in text for word in words), text


def test_the_mistake_names_the_layer_it_came_from(tmp_path: Path) -> None:
    assert refusal(env={"SPARK_PORT": ""}).startswith("SPARK_PORT ")
    path = toml(tmp_path, "[server]\nport = 'x'\n")
    assert "[server] port" in refusal("--config", path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sever]\nport = 1\n", ["[sever]", "server"]),
        ("[server]\nprot = 1\n", ["prot", "did you mean port"]),
        ("port = 1\n", ["[port]"]),
        ("server = 1\n", ["[server]"]),
        ("[server\n", ["TOML"]),
    ],
)
def test_a_mistake_in_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal("--config", toml(tmp_path, text))
    assert all(word in message for word in words), message


def test_the_higher_layer_decides_between_budget_and_share(tmp_path: Path) -> None:
    path = toml(tmp_path, "[memory]\ngpu_memory_utilization = 0.7\n")
    memory = load("--config", path, "--memory-budget", "1GiB").settings.memory
    assert (memory.memory_budget, memory.gpu_memory_utilization) == (2**30, None)
    memory = load(
        "--gpu-memory-utilization", "0.6", env={"SPARK_MEMORY_BUDGET": "1GiB"}
    ).settings.memory
    assert (memory.memory_budget, memory.gpu_memory_utilization) == (None, 0.6)


@pytest.mark.parametrize("value", ["", "0", "false", "1", "anything"])
@pytest.mark.parametrize("prefix", ["ATLAS_", "METRALE_"])
def test_presence_is_on_whatever_the_value(prefix: str, value: str) -> None:
    loaded = load(env={f"{prefix}NO_MTP_K_LADDER": value})
    assert loaded.settings.speculation.no_mtp_k_ladder is True
    assert load().settings.speculation.no_mtp_k_ladder is False


def test_value_variables_keep_their_value() -> None:
    loaded = load(
        env={
            "ATLAS_MTP_MAX_SEQS": "40",
            "METRALE_MTP_K_LADDER": "4:3,8:2",
            "ATLAS_SSM_DECODE_RING": "junk",
            "ATLAS_DISABLE_WATCHDOGS": " TRUE ",
        }
    )
    speculation = loaded.settings.speculation
    assert speculation.mtp_max_seqs == 40
    assert speculation.mtp_k_ladder == "4:3,8:2"
    assert loaded.settings.watchdogs.ssm_decode_ring == "junk"
    assert loaded.settings.watchdogs.disable_watchdogs == " TRUE "
    assert refusal(env={"ATLAS_MTP_MAX_SEQS": "many"}).startswith("ATLAS_MTP_MAX_SEQS ")


def test_both_prefixes_must_agree() -> None:
    same = {"ATLAS_MTP_MAX_SEQS": "4", "METRALE_MTP_MAX_SEQS": "4"}
    assert load(env=same).settings.speculation.mtp_max_seqs == 4
    text = refusal(env=same | {"METRALE_MTP_MAX_SEQS": "5"})
    assert "ATLAS_MTP_MAX_SEQS=4" in text
    assert "METRALE_MTP_MAX_SEQS=5" in text


def test_an_unknown_environment_name_warns_once_and_others_are_left_alone() -> None:
    loaded = load(
        env={"SPARK_PROT": "1", "ATLAS_X": "", "METRALE_Y": "1", "PORT": "1", "NO_COLOR": "1"}
    )
    assert len(loaded.warnings) == 3
    assert any("SPARK_PROT" in w and "SPARK_PORT" in w for w in loaded.warnings)


def test_unbuilt_settings_are_refused_by_name_and_hidden() -> None:
    unbuilt = [s for s in all_settings() if not s.knob.built and s.knob.flags]
    for setting in unbuilt:
        flag = setting.knob.flags[0]
        words = {"bool": [flag]}.get(
            getattr(setting.annotation, "__name__", ""),
            [flag, "snapshot" if "mode" in flag else "f16-pool" if "dtype" in flag else "2"],
        )
        assert f"{flag} is not available" in refusal(*words)
        assert flag not in settings_markdown()


def test_prefill_tokens_are_rounded_with_a_note() -> None:
    loaded = load("--max-prefill-tokens", "100")
    assert loaded.notes == ("max-prefill-tokens 100 is rounded down to 64, a multiple of 64",)
    assert load("--max-prefill-tokens", "128").notes == ()


def test_api_keys_come_from_flags_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nsk-b\n sk-c \n")
    loaded = load("--api-key", "sk-a", "--api-key", "sk-d", "--api-key-file", str(path))
    assert read_api_keys(loaded.settings.auth) == {"sk-a", "sk-b", "sk-c", "sk-d"}
    assert "sk-a" not in repr(loaded)
    assert read_api_keys(load(env={"SPARK_API_KEY": "k"}).settings.auth) == {"k"}
    assert read_api_keys(load().settings.auth) == frozenset()


@pytest.mark.parametrize("text", ["", "# only\n", "a b\n", "kä\n"])
def test_a_useless_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    auth = load("--api-key-file", str(path)).settings.auth
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_api_keys(auth)
    missing = load("--api-key-file", str(tmp_path / "none")).settings.auth
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(missing)


def test_a_bad_key_is_refused_without_showing_it() -> None:
    for key in ("", "se cret", "secrét"):
        text = refusal("--api-key", key)
        assert "--api-key" in text
        assert "cr" not in text


def test_help_is_grouped_and_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    page = capsys.readouterr().out
    for setting in all_settings():
        for flag in setting.knob.flags:
            assert (flag in page) is setting.knob.built, flag
    for title in ("model", "server", "batching", "memory", "speculation", "auth", "logging"):
        assert f"\n{title}:\n" in page
    assert max(map(len, page.splitlines())) <= 100


def test_names_are_unique() -> None:
    flags = [flag for s in all_settings() for flag in s.knob.flags]
    names = [name for s in all_settings() for name in s.knob.env]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names)
    for setting in all_settings():
        assert not any(n.startswith("ATLAS_") for n in setting.knob.env) or not setting.knob.flags


def test_the_documented_table_is_up_to_date() -> None:
    committed = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
    assert committed == settings_markdown(), (
        "run python -m spark_server.settings --markdown > docs/settings.md"
    )


def test_importing_settings_imports_no_torch() -> None:
    code = (
        "import sys; import spark_server.settings as s; s.load_settings(['m'], {}); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numba', 'transformers', 'fastapi')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0


def test_the_packaged_model_is_where_the_default_says() -> None:
    from spark_server.model_source import locate_model

    found = locate_model("spark-tiny", download=False)
    assert Path(found.folder) == Path(str(files("spark_server"))) / "assets" / "spark-tiny"
    assert found.name == "spark-tiny"
