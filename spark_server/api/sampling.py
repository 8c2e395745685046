"""From a body's fields to the engine's `SamplingParams`: defaults, clamps, known token ids.

One rule for every endpoint: a prompt needs room for at least one token (else 400,
`context_length_exceeded`), and the output is clamped to what the context leaves, never refused for
being too long. Knows nothing of text but stop strings.
"""

from __future__ import annotations

import secrets
from typing import NoReturn

from engine.errors import RequestError
from engine.request import SamplingParams
from spark_server.api.options import ApiOptions
from spark_server.api.schemas import SamplingBody
from spark_server.engine_api import ModelInfo
from spark_server.text.model import SamplingDefaults

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
# Below this a temperature sharpens beyond what float32 tells apart: it means greedy.
_GREEDY_BELOW = 1e-3
_U64 = 2**64 - 1


def _refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise RequestError(f"{param}: {message}", param=param, code=code)


def check_id(token_id: int, info: ModelInfo, param: str) -> int:
    """`token_id`, if the model has it.

    Raises:
        RequestError: it lies outside the vocabulary.
    """
    if not 0 <= token_id < info.vocab_size:
        _refuse(f"the id {token_id} is not in 0 to {info.vocab_size - 1}", param)
    return token_id


def check_prompt_length(count: int, info: ModelInfo, param: str) -> None:
    """Refuse a prompt that leaves no room for a token.

    Raises:
        RequestError: `context_length_exceeded` with both counts.
    """
    if count >= info.max_seq_len:
        raise RequestError(
            f"{param}: the prompt has {count} tokens, but the context of {info.max_seq_len} takes "
            f"at most {info.max_seq_len - 1} and one to generate; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if count == 0:
        _refuse("the prompt is empty", param)


def stop_strings(value: object) -> tuple[str, ...]:
    """The stop strings of a request.

    Raises:
        RequestError: not a string or list of strings, one of them empty, or too many or too long.
    """
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            _refuse("must be a string or a list of strings, none of them empty", "stop")
        if len(stop) > MAX_STOP_CHARS:
            _refuse(f"a stop string has at most {MAX_STOP_CHARS} characters", "stop")
    if len(stops) > MAX_STOPS:
        _refuse(f"{len(stops)} stop strings given, at most {MAX_STOPS} are accepted", "stop")
    return tuple(stops)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice`: the request's own for the first, then mixed with it.

    The mixing is splitmix64's, whose outputs for neighbouring inputs are unrelated.
    """
    if choice == 0:
        return seed & _U64
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _U64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64
    return mixed ^ (mixed >> 31)


def request_seed(body: SamplingBody) -> int:
    """The request's seed, or a random one; unsigned 64-bit."""
    return secrets.randbits(64) if body.seed is None else body.seed & _U64


def _logit_bias(body: SamplingBody, info: ModelInfo) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not key.isascii() or not key.removeprefix("-").isdigit() or len(key) > 20:
            _refuse(f"the key {key[:32]!r} is not a token id", "logit_bias")
        pairs[check_id(int(key), info, "logit_bias")] = bias
    return tuple(pairs.items())


def sampling_params(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    seed: int,
    prompt_tokens: int,
    info: ModelInfo,
    defaults: SamplingDefaults,
    options: ApiOptions,
) -> SamplingParams:
    """The engine's parameters of one sequence.

    Args:
        max_tokens: what the request asks for, or None for as much as there is room.
        logprobs: alternatives beside the chosen token, or None for no log-probabilities.
        seed: the sequence's own seed.
        prompt_tokens: length of its prompt, already checked.

    Raises:
        RequestError: naming the field that is wrong.
    """
    room = info.max_seq_len - prompt_tokens
    ceilings = [room, max_tokens, options.max_output_tokens]
    limit = min(ceiling for ceiling in ceilings if ceiling is not None)
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        _refuse(f"{min_tokens} is more than the {max_tokens} of max_tokens", "min_tokens")

    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    temperature = pick(body.temperature, defaults.temperature)
    top_k = defaults.top_k if body.top_k is None else body.top_k
    stop_ids = [check_id(i, info, "stop_token_ids") for i in body.stop_token_ids or ()]
    return SamplingParams(
        max_tokens=limit,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(top_k, 0),
        top_p=pick(body.top_p, defaults.top_p),
        min_p=pick(body.min_p, defaults.min_p),
        presence_penalty=pick(body.presence_penalty, 0.0),
        frequency_penalty=pick(body.frequency_penalty, 0.0),
        repetition_penalty=pick(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body, info),
        seed=seed,
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )
