"""The one definition of every setting: name, type, default, spellings and help text.

Knows nothing of where values come from (`sources`) and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from engine.config import GRID
from spark_server.settings.knobs import (
    AutoFloat,
    AutoInt,
    Knob,
    Secrets,
    SettingsGroup,
    Size,
    SizeInt,
    auto_none,
)
from spark_server.settings.prefix_cache import PrefixCacheSettings
from spark_server.settings.speculation import SpeculationSettings
from spark_server.settings.watchdogs import WatchdogSettings


class ModelSettings(SettingsGroup):
    """What is served and on what."""

    model: Annotated[
        str,
        Knob(
            "Folder with config.json and safetensors, or a Hugging Face id; "
            "spark-tiny comes with the package",
            ("--model",),
            ("SPARK_MODEL",),
            "MODEL",
            positional=True,
        ),
    ] = Field(default="spark-tiny", min_length=1)
    served_model_name: Annotated[
        str | None,
        Knob(
            "Name under which clients ask for the model",
            ("--served-model-name",),
            ("SPARK_SERVED_MODEL_NAME",),
            "NAME",
            auto="the folder's name, or the Hugging Face id",
        ),
        BeforeValidator(auto_none),
    ] = Field(default=None, min_length=1)
    chat_template: Annotated[
        str | None,
        Knob(
            "Jinja file to render chats with; none serves a model that has no template, without "
            "chats",
            ("--chat-template",),
            ("SPARK_CHAT_TEMPLATE",),
            "FILE",
            auto="the model's own",
        ),
        BeforeValidator(auto_none),
    ] = Field(default=None, min_length=1)
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Knob(
            "Where the model runs",
            ("--device",),
            ("SPARK_DEVICE",),
            auto="cuda when torch finds a GPU, else cpu",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Knob(
            "Type of the activations",
            ("--dtype",),
            ("SPARK_DTYPE",),
            auto="float32 on a CPU, bfloat16 on a GPU",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "naive", "cpu", "triton"],
        Knob(
            "Which implementation of the operators runs",
            ("--kernels",),
            ("SPARK_KERNELS",),
            auto="cpu on a CPU in float32, triton on a GPU, else naive",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Knob(
            "Give a request bitwise the same tokens in any company and with speculation on a GPU "
            "too, at some cost; on a CPU it is always so",
            ("--batch-invariant",),
            ("SPARK_BATCH_INVARIANT",),
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Knob(
            "Launch every kernel one by one instead of replaying CUDA graphs, for debugging",
            ("--enforce-eager",),
            ("SPARK_ENFORCE_EAGER",),
        ),
    ] = False
    threads: Annotated[
        AutoInt,
        Knob(
            "CPU threads that a pass may use, where they make it faster than one does",
            ("--threads",),
            ("SPARK_THREADS",),
            "N",
            auto="the CPUs that this process may use",
        ),
    ] = Field(default=None, ge=1, le=1024)


class ServerSettings(SettingsGroup):
    """The HTTP server and its life."""

    host: Annotated[str, Knob("Address to listen on", ("--host",), ("SPARK_HOST",), "ADDRESS")] = (
        Field(default="127.0.0.1", min_length=1)
    )
    port: Annotated[
        int, Knob("Port to listen on; 0 takes a free one", ("--port",), ("SPARK_PORT",), "N")
    ] = Field(default=8000, ge=0, le=65535)
    drain_timeout: Annotated[
        float,
        Knob(
            "Seconds that running requests may take after SIGTERM before they are aborted",
            ("--drain-timeout",),
            ("SPARK_DRAIN_TIMEOUT",),
            "SECONDS",
        ),
    ] = Field(default=30.0, ge=0, le=86400, allow_inf_nan=False)
    stuck_timeout: Annotated[
        float,
        Knob(
            "Seconds without progress after which the engine is ended and started anew",
            ("--stuck-timeout",),
            ("SPARK_STUCK_TIMEOUT",),
            "SECONDS",
        ),
    ] = Field(default=20.0, ge=1, le=86400, allow_inf_nan=False)


class BatchingSettings(SettingsGroup):
    """How many requests run together, and how long they may be."""

    max_batch_size: Annotated[
        int,
        Knob(
            "Sequences that run at once",
            ("--max-batch-size",),
            ("SPARK_MAX_BATCH_SIZE",),
            "N",
        ),
    ] = Field(default=32, ge=1, le=4096)
    max_seq_len: Annotated[
        AutoInt,
        Knob(
            "Tokens of prompt and output together, per sequence",
            ("--max-seq-len",),
            ("SPARK_MAX_SEQ_LEN",),
            "TOKENS",
            auto="what the model allows, at most 4096",
        ),
    ] = Field(default=None, ge=16)
    max_prefill_tokens: Annotated[
        int,
        Knob(
            f"Prompt tokens that one step may carry; rounded down to a multiple of {GRID}",
            ("--max-prefill-tokens",),
            ("SPARK_MAX_PREFILL_TOKENS",),
            "TOKENS",
        ),
    ] = Field(default=512, ge=GRID)
    max_waiting: Annotated[
        int,
        Knob(
            "Requests that may queue beyond those that run, before a new one gets 429",
            ("--max-waiting",),
            ("SPARK_MAX_WAITING",),
            "N",
        ),
    ] = Field(default=1024, ge=0)


class MemorySettings(SettingsGroup):
    """What the engine may take of the device's memory."""

    gpu_memory_utilization: Annotated[
        AutoFloat,
        Knob(
            "Share of the device's memory that the engine may take",
            ("--gpu-memory-utilization", "--memory-utilization"),
            ("SPARK_GPU_MEMORY_UTILIZATION", "SPARK_MEMORY_UTILIZATION"),
            "SHARE",
            auto="0.9 on a GPU, 0.5 on a CPU, less if others hold too much",
        ),
    ] = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    memory_budget: Annotated[
        Size,
        Knob(
            "Memory that the engine may take, instead of a share, e.g. 1.5GiB or 800MB",
            ("--memory-budget",),
            ("SPARK_MEMORY_BUDGET",),
            "SIZE",
            auto="the share above",
        ),
    ] = Field(default=None, gt=0)
    host_reserve: Annotated[
        Size,
        Knob(
            "Memory that stays free for the host where the engine shares it: on a CPU, and on a "
            "GPU without memory of its own",
            ("--host-reserve",),
            ("SPARK_HOST_RESERVE",),
            "SIZE",
            auto="a 32nd of the memory",
        ),
    ] = Field(default=None, ge=0)
    kv_tokens: Annotated[
        AutoInt,
        Knob(
            "Tokens that the KV pool holds",
            ("--kv-tokens",),
            ("SPARK_KV_TOKENS",),
            "TOKENS",
            auto="what the budget leaves, on a CPU at most max-batch-size x max-seq-len",
        ),
    ] = Field(default=None, ge=GRID)
    ssm_h_dtype: Annotated[
        Literal["f32", "f16-pool"],
        Knob(
            "How recurrent states are stored; f16-pool takes half the memory for h and rounds it "
            "after every token, which changes output",
            ("--ssm-h-dtype",),
            ("SPARK_SSM_H_DTYPE",),
        ),
    ] = "f32"


class LimitsSettings(SettingsGroup):
    """What one request may ask for."""

    max_body_size: Annotated[
        SizeInt,
        Knob("Largest request body", ("--max-body-size",), ("SPARK_MAX_BODY_SIZE",), "SIZE"),
    ] = Field(default=16 * 2**20, ge=1024)
    max_choices: Annotated[
        int,
        Knob(
            "Sequences of one request at most, prompts times n",
            ("--max-choices",),
            ("SPARK_MAX_CHOICES",),
            "N",
        ),
    ] = Field(default=128, ge=1)
    max_output_tokens: Annotated[
        AutoInt,
        Knob(
            "Output tokens of a sequence at most, also when the request names no number",
            ("--max-output-tokens",),
            ("SPARK_MAX_OUTPUT_TOKENS",),
            "TOKENS",
            auto="what the context leaves",
        ),
    ] = Field(default=None, ge=1)
    queue_timeout: Annotated[
        AutoFloat,
        Knob(
            "Seconds after which a request that still waits is given up",
            ("--queue-timeout",),
            ("SPARK_QUEUE_TIMEOUT",),
            "SECONDS",
            auto="never",
        ),
    ] = Field(default=None, gt=0, allow_inf_nan=False)


class AuthSettings(SettingsGroup):
    """Who may ask."""

    api_key: Annotated[
        Secrets,
        Knob(
            "Key that clients must send as a bearer token; may be repeated",
            ("--api-key",),
            ("SPARK_API_KEY",),
            "KEY",
            secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Knob(
            "File with one key a line; blank lines and lines that start with # are skipped",
            ("--api-key-file",),
            ("SPARK_API_KEY_FILE",),
            "FILE",
        ),
    ] = None


class LoggingSettings(SettingsGroup):
    """What is printed."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Knob("Least severe level that is printed", ("--log-level",), ("SPARK_LOG_LEVEL",)),
    ] = "info"
    access_log: Annotated[
        bool,
        Knob("One line per HTTP request", ("--access-log",), ("SPARK_ACCESS_LOG",)),
    ] = False


GROUPS: dict[str, type[SettingsGroup]] = {
    "model": ModelSettings,
    "server": ServerSettings,
    "batching": BatchingSettings,
    "memory": MemorySettings,
    "limits": LimitsSettings,
    "speculation": SpeculationSettings,
    "prefix_cache": PrefixCacheSettings,
    "watchdogs": WatchdogSettings,
    "auth": AuthSettings,
    "logging": LoggingSettings,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field with its knob: `group.name` is its path."""

    group: str
    name: str
    knob: Knob
    annotation: Any
    default: Any

    @property
    def path(self) -> str:
        return f"{self.group}.{self.name}"


def all_settings() -> tuple[Setting, ...]:
    """Every setting in the order of definition."""
    found = []
    for group, cls in GROUPS.items():
        for name, info in cls.model_fields.items():
            knob = next(item for item in info.metadata if isinstance(item, Knob))
            found.append(Setting(group, name, knob, info.annotation, info.default))
    return tuple(found)
