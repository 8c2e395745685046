"""Random traffic with speculation on, on a model of arithmetic: slots, capacities and tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import FinishReason, GenerationRequest
from engine.reserve.ssm_reserve import SsmRollbackMode
from engine.runner import DraftRows, ForwardResult, PlainRows, Proposal, Segment, Verified
from engine.scheduler import Scheduler
from engine.speculation.policy import ControllerMode, PolicySettings
from tests.engine.fake_model import FakeModel, request

SLOTS, BLOCKS, VOCAB = 40, 70, 97
COVERED = 32


class SpeculatingModel(FakeModel):
    """Drafts the right token three times in four, and checks what it is asked to verify."""

    state_bytes = 0

    def __init__(self, policy: PolicySettings, truth: dict[int, list[int]], seed: int) -> None:
        super().__init__(SLOTS, BLOCKS, VOCAB)
        self.policy = policy
        self.truth = truth
        self.rng = random.Random(seed)
        self.scheduler: Scheduler | None = None
        self.verified = self.uncovered = self.accepted = 0

    def forward(self, segments: Sequence[Segment]) -> ForwardResult:
        rows = [len(s.token_ids) for s in segments if s.committed < len(s.token_ids)]
        assert sum(rows) <= 96
        assert len(rows) <= 32
        for segment in segments:
            drafts = len(segment.token_ids) - segment.committed
            if drafts:
                self.verified += 1
                assert segment.slot < self.policy.state_slots(SLOTS)
                assert drafts <= self.policy.slot_capacity(segment.slot)
                assert drafts <= self.policy.num_drafts
        return super().forward(segments)

    def accept(self, verified: Sequence[Verified]) -> None:
        for _, rows, emitted in verified:
            assert 1 <= emitted <= rows
            self.accepted += emitted - 1

    def remember(self, rows: PlainRows, hidden: Tensor) -> None:
        assert self.scheduler is not None
        owners = {s.slot: s for s in self.scheduler.holdings.running()}
        for slot, position, token in zip(rows.slots, rows.positions, rows.next_tokens, strict=True):
            assert position + 1 == owners[slot].computed
            assert token == owners[slot].token_at(position + 1)
            self.uncovered += slot >= self.policy.state_slots(SLOTS)

    def draft(self, rows: Sequence[DraftRows], hidden: Tensor) -> list[Proposal]:
        assert self.scheduler is not None
        owners = {s.slot: s for s in self.scheduler.holdings.running()}
        assert len({entry.slot for entry in rows}) == len(rows)
        out = []
        for entry in rows:
            sequence = owners[entry.slot]
            assert entry.start + len(entry.next_tokens) == sequence.computed
            assert entry.next_tokens[-1] == sequence.token_at(sequence.computed)
            assert entry.block_table == sequence.block_table
            assert not entry.engaged or entry.slot < self.policy.state_slots(SLOTS)
            done = len(sequence.generated)
            right = self.truth[sequence.request_id][done : done + entry.drafts]
            right += [0] * (entry.drafts - len(right))
            guess = [t if self.rng.random() < 0.75 else self.rng.randrange(VOCAB) for t in right]
            # Pages for re-fed rows must be there.
            assert sequence.computed + max(entry.drafts - 1, 0) <= sequence.capacity
            out.append(Proposal(tuple(guess), tuple(-self.rng.random() for _ in guess)))
        return out


def random_request(rng: random.Random, request_id: int) -> GenerationRequest:
    options = {"temperature": 1.0, "seed": rng.getrandbits(60)} if rng.random() < 0.5 else {}
    length, tokens = rng.choice([1, 3, 40, 64, 65, 130]), rng.choice([1, 4, 20, 60])
    return request(
        request_id,
        [rng.randrange(VOCAB) for _ in range(length)],
        tokens,
        ignore_eos=rng.random() < 0.7,
        frequency_penalty=1.0 if rng.random() < 0.2 else 0.0,
        **options,  # type: ignore[arg-type]
    )


def engine(policy: PolicySettings | None, runner: FakeModel, *, compaction: bool) -> EngineCore:
    config = EngineConfig(
        "fake",
        max_batch_size=SLOTS,
        max_seq_len=512,
        slot_compaction=compaction,
        speculation=policy,
    )
    return EngineCore(config, runner, kv_blocks=BLOCKS, eos_ids=frozenset({5}))


def alone(item: GenerationRequest) -> list[int]:
    core = engine(None, FakeModel(SLOTS, BLOCKS, VOCAB), compaction=True)
    core.add(item)
    tokens: list[int] = []
    while core.has_work():
        for delta in core.step():
            tokens.extend(delta.token_ids)
    return tokens


def churn(seed: int, policy: PolicySettings, *, compaction: bool) -> SpeculatingModel:
    rng = random.Random(seed)
    items = [random_request(rng, i) for i in range(90)]
    truth = {item.request_id: alone(item) for item in items}
    model = SpeculatingModel(policy, truth, seed)
    core = engine(policy, model, compaction=compaction)
    model.scheduler = core.scheduler
    waiting, aborted = list(items), set()
    seen: dict[int, list[int]] = {item.request_id: [] for item in items}
    finished: dict[int, FinishReason] = {}
    while waiting or core.has_work():
        # Waves, so that the width crosses the dispatch cap in both directions.
        while waiting and rng.random() < 0.9 and len(core.scheduler.requests()) < 60:
            core.add(waiting.pop(0))
        if rng.random() < 0.05:
            victim = rng.randrange(90)
            if victim in core.scheduler.requests():
                aborted.add(victim)
            core.abort(victim)
        for delta in core.step():
            seen[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                finished[delta.request_id] = delta.finish_reason
        core.scheduler.check()
        if rng.random() < 0.5:
            core.prepare()  # else with the next step, after more requests ended
    for request_id, want in truth.items():
        cut = len(seen[request_id]) if request_id in aborted else len(want)
        assert seen[request_id] == want[:cut]
        assert (finished[request_id] is FinishReason.ABORT) == (request_id in aborted)
    stats = core.stats().speculation
    assert stats is not None
    assert stats.verifies == model.verified
    assert stats.accepted_tokens <= model.accepted <= stats.draft_tokens
    assert stats.engagements - stats.disengagements in (0, 1)
    return model


POLICIES = st.builds(
    PolicySettings,
    num_drafts=st.integers(1, 4),
    rollback=st.sampled_from(SsmRollbackMode),
    ladder_text=st.sampled_from([None, "4:4", "1:1", "8:2,40:1"]),
    ladder_disabled=st.booleans(),
    mtp_max_seqs_override=st.sampled_from([None, 4, 36]),
    pool_full_width=st.booleans(),
    controller=st.sampled_from(ControllerMode),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), policy=POLICIES, compaction=st.booleans())
def test_no_slot_token_or_capacity_goes_wrong(
    seed: int, policy: PolicySettings, compaction: bool
) -> None:
    churn(seed, policy, compaction=compaction)


def test_pinned_slots_above_the_cap_are_seen_and_never_verified() -> None:
    policy = PolicySettings(num_drafts=3, controller=ControllerMode.OFF)
    assert policy.state_slots(SLOTS) == COVERED
    model = churn(1, policy, compaction=False)
    assert model.verified > 100
    assert model.accepted > 50
    assert model.uncovered > 0
