"""What crosses the border of the engine: requests in, token deltas and statistics out.

All types are frozen dataclasses of plain values, so that msgspec can carry them between processes;
this module knows nothing of HTTP or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. `ABORT` is the client's doing, `ERROR` is ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; values are validated by the API before they come here.

    Attributes:
        max_tokens: tokens to generate at most, already clamped to what the context leaves.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest most likely set with at least this mass.
        min_p: drop tokens less likely than this share of the most likely one.
        logit_bias: (token id, bias) pairs, added before everything else.
        seed: unsigned 64-bit; draw number `position` of a request depends on (seed, position) only.
        min_tokens: no stop id ends the sequence before this many tokens.
        stop_token_ids: ids that end the sequence; the id itself is reported, not its text.
        ignore_eos: the model's own end ids do not end the sequence.
        logprobs: None for none, else how many alternatives beside the chosen token (0 allowed).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n` choices are n requests; ids are made by the server only.

    Attributes:
        request_id: unique in the life of the server, never the client's.
        prompt_ids: at least one id, all inside the vocabulary.
        priority: lower runs earlier; equal priorities are first come, first served.
        deadline: seconds after arrival at which a request that still waits is given up, or None.
        grammar: a compiled-grammar source (JSON schema text) that constrains the output, or None.
        cache_salt: requests reuse cached prefixes of those with the same salt only.
        retractable: nothing of it is shown before it ends, so that deltas may take tokens back.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    deadline: float | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    retractable: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely alternatives, best first.

    Taken from the model's own distribution (after bias and penalties, before temperature).
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Per-request numbers, sent with the last delta. Times in seconds.

    `rollbacks` counts how often a watchdog took tokens back, `retracted` how many in all.
    `drafted`/`accepted` count draft tokens; `accepted_per_position[i]` counts accepted drafts at
    position i of a burst, `drafted_per_position[i]` those offered there.
    """

    queue_seconds: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    rollbacks: int = 0
    retracted: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one request.

    Attributes:
        token_ids: the new tokens in order; includes the stop id that ended the sequence, if any.
        logprobs: one entry per token when they were asked for, else empty.
        finish_reason: set on the last delta only.
        stop_token_id: the id that ended the sequence (an end id or a stop id), else None; with
            STOP and without an id a watchdog ended it.
        error: a sentence for the client when finish_reason is ERROR.
        error_status: the HTTP status that fits the error; below 500 it is the client's mistake.
        error_param: the request field to blame, or None.
        error_code: a machine-readable code of the error, or None.
        retract: tokens of earlier deltas, from the end, that no longer count; before token_ids.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_status: int = 500
    error_param: str | None = None
    error_code: str | None = None
    stats: RequestStats | None = None
    retract: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Gauges and counters of speculation; counters only ever rise.

    Attributes:
        verifies: sequences verified with at least one draft.
        draft_tokens, accepted_tokens: over all verifies.
        accepted_per_position: verifies whose draft at this position was accepted.
        accepted_lengths: verifies by number of accepted drafts, 0 first.
        engaged: the last step chose to speculate; engagements: how often that changed to true,
            disengagements: to false.
        covered, uncovered: decoding sequences in slots that may and may not be verified.
        rungs: (decoding sequences, drafts) as last chosen for each width.
        steps_speculative, steps_plain: decode steps with and without drafts, and their seconds.
        reasons: (reason, steps) of decode steps without drafts.
        dcut_tokens: drafts that D-Cut dropped. probes, reprobes: see the controllers.
        state_bytes: recurrent state read and written.
    """

    verifies: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    accepted_lengths: tuple[int, ...] = ()
    engaged: bool = False
    engagements: int = 0
    disengagements: int = 0
    covered: int = 0
    uncovered: int = 0
    rungs: tuple[tuple[int, int], ...] = ()
    steps_speculative: int = 0
    steps_plain: int = 0
    seconds_speculative: float = 0.0
    seconds_plain: float = 0.0
    reasons: tuple[tuple[str, int], ...] = ()
    dcut_tokens: int = 0
    probes: int = 0
    reprobes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Gauges and counters of the prefix cache; counters only ever rise.

    Attributes:
        hits, misses: admissions that reused something, and (reason, admissions) that did not.
        hit_tokens: prompt tokens that were not computed, of the `queried_tokens` of all admissions.
        checkpoint_places, checkpoints: places for states, and those in use.
        checkpoints_saved, checkpoints_evicted: made so far, and overwritten by another one.
        blocks: KV blocks that the cache holds; sequences may hold them too.
        blocks_evicted: KV blocks that it gave up to sequences.
    """

    hits: int = 0
    misses: tuple[tuple[str, int], ...] = ()
    hit_tokens: int = 0
    queried_tokens: int = 0
    checkpoint_places: int = 0
    checkpoints: int = 0
    checkpoints_saved: int = 0
    checkpoints_evicted: int = 0
    blocks: int = 0
    blocks_evicted: int = 0


@dataclass(frozen=True, slots=True)
class WatchdogStats:
    """What the watchdogs did; counters only ever rise.

    Attributes:
        ring_slots: snapshots that the decode-rollback ring holds of each sequence.
        detections: (kind, count).
        rollbacks: how often an output was steered back. retracted: tokens that this took back.
        stops: (cause, count) of outputs that were stopped.
    """

    ring_slots: int = 0
    detections: tuple[tuple[str, int], ...] = ()
    rollbacks: int = 0
    retracted: int = 0
    stops: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of the engine at the end of a step; counters only ever rise.

    `held` of those that wait are there for their grammar, not for room.
    `jit_compiles` are kernel variants that came into being since the start, which makes them all.
    `steps_by_kind` pairs a kind (`decode`, `prefill`, `mixed`, `verify`) with its count.
    `kv_blocks_used` are those that sequences hold; the prefix cache may hold others beside them.
    """

    running: int = 0
    waiting: int = 0
    slots_total: int = 0
    slots_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    steps_by_kind: tuple[tuple[str, int], ...] = ()
    step_seconds_total: float = 0.0
    last_step_seconds: float = 0.0
    last_step_rows: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    speculation: SpeculationStats | None = None
    held: int = 0
    jit_compiles: int = 0
    prefix_cache: PrefixCacheStats | None = None
    watchdogs: WatchdogStats | None = None
