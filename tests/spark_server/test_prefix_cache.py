"""The prefix cache outside of the engine: settings, numbers in answers, metrics."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import EngineStats, PrefixCacheStats
from spark_server.engine_api import ModelInfo
from spark_server.metrics import Metrics
from spark_server.model_source import locate_model
from spark_server.prefix_cache_metrics import PREFIX_CACHE_NAMES
from spark_server.resolve import engine_config
from spark_server.settings import load_settings
from tests.spark_server.api_harness import error_of, events_of, make_api
from tests.spark_server.fake_engine import Script

TINY = locate_model("spark-tiny").folder
INFO = ModelInfo("tiny", 256, 64, 4, (1,))
SOME = PrefixCacheStats(
    hits=5,
    misses=(("short", 1), ("cold", 2), ("no_checkpoint", 3)),
    hit_tokens=640,
    queried_tokens=2000,
    checkpoint_places=16,
    checkpoints=9,
    checkpoints_saved=12,
    checkpoints_evicted=3,
    blocks=40,
    blocks_evicted=7,
)


def config_of(*argv: str, **env: str) -> tuple[EngineConfig, list[str]]:
    return engine_config(load_settings(argv, env).settings, TINY)


@pytest.mark.parametrize(
    ("argv", "env", "active", "slots"),
    [
        ((), {}, True, 16),
        (("--ssm-cache-slots", "3"), {}, True, 3),
        (("--no-enable-prefix-caching",), {}, False, 0),
        (("--no-enable-prefix-caching",), {"ATLAS_SSM_MARCONI_FULL": "0"}, False, 16),
        (("--ssm-cache-slots", "0"), {}, False, 0),
        (("--ssm-cache-slots=0",), {"METRALE_SSM_MARCONI_FULL": ""}, False, 0),
        ((), {"SPARK_ENABLE_PREFIX_CACHING": "false"}, False, 0),
    ],
)
def test_what_is_reserved_and_whether_it_is_used(
    argv: tuple[str, ...], env: dict[str, str], active: bool, slots: int
) -> None:
    config, _ = config_of(*argv, **env)
    assert (config.prefix_caching, config.snapshot_slots) == (active, slots)
    assert config.prefix_cache_exact


def test_what_is_not_reserved_is_said() -> None:
    assert any("no prefix cache is active" in n for n in config_of("--no-enable-prefix-caching")[1])
    assert any("keeps no state" in note for note in config_of("--ssm-cache-slots", "0")[1])
    assert not config_of("--no-prefix-cache-exact")[0].prefix_cache_exact


@pytest.mark.parametrize("slots", ["-1", "65537", "many", "1.5"])
def test_slots_that_are_no_number_are_refused(slots: str) -> None:
    with pytest.raises(ConfigError, match="--ssm-cache-slots"):
        load_settings((f"--ssm-cache-slots={slots}",), {})


def test_cached_tokens_count_once_for_a_prompt_and_stream_too() -> None:
    """Of two prompts with two choices each, the first choice of each tells."""
    api = make_api()
    cached = iter([64, 128, 192, 0] * 2)
    api.engine.script = lambda r: Script(api.ids("x"), cached=next(cached))
    body = api.complete([[65] * 300, [66] * 300], n=2).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 64 + 192}
    options = {"include_usage": True}
    events = events_of(
        api.complete([[65] * 300, [66] * 300], n=2, stream=True, stream_options=options)
    )
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 64 + 192}


def test_a_salt_reaches_the_engine_and_must_say_something() -> None:
    api = make_api()
    api.engine.script = lambda r: Script(api.ids("x"))
    api.complete("Hi", cache_salt="tenant")
    api.chat("Hi", cache_salt="other")
    api.complete("Hi")
    assert [r.cache_salt for r in api.engine.seen] == ["tenant", "other", None]
    for wrong in ("", 5, "x" * 257):
        response = api.complete("Hi", cache_salt=wrong)
        assert response.status_code == 400
        assert error_of(response)["param"] == "cache_salt"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"spark_prefix_cache_{name}", labels)


def test_every_count_arrives_and_rises_over_restarts() -> None:
    metrics = Metrics()
    metrics.on_ready(INFO, [], EngineStats(prefix_cache=PrefixCacheStats()))
    metrics.on_step(EngineStats(prefix_cache=SOME), stepped=True)
    metrics.on_step(EngineStats(prefix_cache=SOME), stepped=True)
    metrics.on_engine_lost()
    assert value(metrics, "checkpoints") == value(metrics, "blocks") == 0
    metrics.on_ready(INFO, [], EngineStats(prefix_cache=PrefixCacheStats()))
    metrics.on_step(EngineStats(prefix_cache=SOME), stepped=True)
    for name in ("hits", "hit_tokens", "queried_tokens", "checkpoints_saved"):
        assert value(metrics, f"{name}_total") == 2 * getattr(SOME, name)
    assert value(metrics, "checkpoints_evicted_total") == 6
    assert value(metrics, "blocks_evicted_total") == 14
    for reason, count in SOME.misses:
        assert value(metrics, "misses_total", reason=reason) == 2 * count
    gauges = [value(metrics, n) for n in ("checkpoint_places", "checkpoints", "blocks")]
    assert gauges == [16, 9, 40]


def test_without_a_cache_all_is_there_and_zero() -> None:
    metrics = Metrics()
    metrics.on_step(EngineStats(), stepped=True)
    found = [
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("spark_prefix_cache_")
    ]
    assert len(found) == len(PREFIX_CACHE_NAMES) + 2
    assert not any(found)
