"""Trains spark-tiny, trunk and MTP head together; keeps a resumable state and a usable export.

Time is counted in CPU minutes of the process, so a run that was stopped for a while keeps its
schedule.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.tiny import corpus, data, export, plot, tokenizer
from benchmarks.tiny import model as network

DEPTHS = 3
DEPTH_WEIGHTS = (1.0, 0.6, 0.4)
#: Rows and tokens a row of a short and a long batch; multiples of 64, the chunk of the delta rule.
SHORT, LONG = (5, 384), (2, 832)
#: The MTP head learns in every fourth step; a last phase (--mtp-only) then trains it alone.
MTP_EVERY = 4
#: The first tokens of a run are mostly copying.
COPYING_TOKENS = 1_250_000
MUON_FACTOR = 1.2
LONG_EVERY, MTP_ROWS = 6, {SHORT: 2, LONG: 1}


@dataclass
class Progress:
    """What a resumed run needs to know beside weights and optimizer state."""

    step: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    runs: int = 0
    decay_from_s: float = 0.0
    history: list[tuple[int, float, float]] = field(default_factory=list)


class Schedule:
    """Warm-up by steps, then a constant rate and a linear decay at the end by CPU seconds."""

    def __init__(self, peak: float, budget_s: float, decay_s: float, warmup: int = 100) -> None:
        self.peak, self.budget_s, self.decay_s, self.warmup = peak, budget_s, decay_s, warmup

    def rate(self, p: Progress) -> float:
        """The learning rate for the next step; zero or less means that training is over."""
        start = p.decay_from_s or self.budget_s - self.decay_s
        left = 1.0 - max(0.0, p.cpu_s - start) / self.decay_s
        return self.peak * min(1.0, (p.step + 1) / self.warmup) * min(1.0, left)


class Trainer:
    """Trunk, MTP head, optimizer and data of one run."""

    def __init__(self, out: Path, work: Path, seed: int) -> None:
        self.out, self.work, self.seed = out, work, seed
        self.progress = Progress()
        self.stopped = self.mtp_only = False
        self.mtp_now = [0.0] * DEPTHS
        self.trunk, self.mtp = network.make_trunk(seed), network.make_mtp(seed + 1)
        named = [*self.trunk.named_parameters(), *self.mtp.named_parameters()]
        inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in named if p.ndim != 2 or "embed" in name]
        # Muon needs fewer steps than AdamW alone; its update is scaled to the size of one of AdamW.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.encoder = data.Encoder(tokenizer.load(out))

    def open_data(self) -> None:
        """Fresh documents; a resumed run reads on with other seeds."""
        first = self.seed + 1000 * self.progress.runs
        self.progress.runs += 1
        mix = corpus.COPYING_MIX if self.progress.tokens < COPYING_TOKENS else corpus.MIX
        self.copying = mix is corpus.COPYING_MIX
        self.rows = {
            shape: data.rows(self.encoder, corpus.documents(first + i, mix=mix), shape[1])
            for i, shape in enumerate((SHORT, LONG))
        }

    def step(self, rate: float) -> tuple[float, list[float]]:
        """One optimizer step; returns the loss on assistant and raw text and the MTP losses."""
        if self.copying and self.progress.tokens >= COPYING_TOKENS:
            self.open_data()
        shape = LONG if self.progress.step % LONG_EVERY == LONG_EVERY - 1 else SHORT
        ids, weights = data.batch(self.rows[shape], shape[0])
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(not self.mtp_only):
            hidden = self.trunk.model(input_ids=ids, use_cache=False).last_hidden_state.float()
        head = self.trunk.model.embed_tokens.weight
        # Logits only where the next token has a weight; `place` finds a position's row among them.
        wanted = weights[:, 1:] > 0
        logits = hidden[:, :-1][wanted] @ head.T
        picked = weights[:, 1:][wanted]
        each = F.cross_entropy(logits, ids[:, 1:][wanted], reduction="none")
        loss = (each * picked).sum() / picked.sum()
        place = torch.full(wanted.shape, -1)
        place[wanted] = torch.arange(logits.shape[0])
        if self.mtp_only or self.progress.step % MTP_EVERY == 0:
            losses = self._mtp_losses(
                ids,
                weights,
                hidden.detach(),
                head.detach(),
                logits.detach(),
                place,
                shape[0] if self.mtp_only else MTP_ROWS[shape],
            )
            self.mtp_now = [x.item() for x in losses]
            if self.mtp_only:
                loss = torch.zeros(())
            loss = loss + sum(w * x for w, x in zip(DEPTH_WEIGHTS, losses, strict=True))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trunk.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(self.mtp.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * (
                    MUON_FACTOR if isinstance(optimizer, torch.optim.Muon) else 1.0
                )
            optimizer.step()
        self.progress.step += 1
        self.progress.tokens += ids.numel()
        strong = picked > 0.5
        return each.detach()[strong].mean().item(), self.mtp_now

    def _mtp_losses(
        self,
        ids: Tensor,
        weights: Tensor,
        hidden: Tensor,
        head: Tensor,
        logits: Tensor,
        place: Tensor,
        n: int,
    ) -> list[Tensor]:
        """Cross-entropy by depth against the trunk's own distribution, which a draft has to guess.

        The head gets no gradient into the trunk, so a share of the rows is enough for it.
        """
        ids, weights, hidden, place = ids[:n], weights[:n], hidden[:n], place[:n]
        with torch.autocast("cpu", torch.bfloat16):
            states = self.mtp(ids, hidden, head, DEPTHS)
        losses = []
        for depth, state in enumerate(states):
            t = state.shape[1] - 1
            strong = weights[:, 2 + depth : 2 + depth + t] > 0.5
            where = place[:, 1 + depth : 1 + depth + t][strong]
            target = logits[where].softmax(-1)
            guess = (state[:, :t][strong] @ head.T).log_softmax(-1)
            losses.append(-(target * guess).sum(-1).mean())
        return losses

    def save(self) -> None:
        """The resumable state, the export and the loss plot; every file is replaced whole."""
        state = {"trunk": self.trunk.state_dict(), "mtp": self.mtp.state_dict(),
                 "optimizers": [o.state_dict() for o in self.optimizers],
                 "progress": asdict(self.progress)}  # fmt: skip
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.work.mkdir(parents=True, exist_ok=True)
        export.replace(self.work / "state.pt", buffer.getvalue())
        export.write(self.out, self.trunk, self.mtp)
        plot.losses(self.progress.history, self.out / "loss.png")

    def stop_on_signal(self) -> None:
        """Let SIGTERM end the run after the current step, with everything saved."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", True))

    def load(self) -> None:
        """Take up the state of an earlier run."""
        state = torch.load(self.work / "state.pt")
        self.trunk.load_state_dict(state["trunk"])
        self.mtp.load_state_dict(state["mtp"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.progress = Progress(**state["progress"])


def run(trainer: Trainer, schedule: Schedule, save_every_s: float) -> None:
    """Train until the schedule ends; a file `decay` in the work folder starts the decay at once."""
    progress, report = trainer.progress, plot.Reporter(schedule.budget_s)
    base, saved, cpu_start = progress.cpu_s, time.monotonic(), time.process_time()
    while not trainer.stopped and (rate := schedule.rate(progress)) > 0:
        loss, mtp_losses = trainer.step(rate)
        progress.cpu_s = base + time.process_time() - cpu_start
        if not progress.decay_from_s and (trainer.work / "decay").exists():
            progress.decay_from_s = progress.cpu_s
        if (
            line := report.step(
                progress.step, progress.tokens, progress.cpu_s, loss, mtp_losses, rate
            )
        ) is not None:
            progress.history.append(line)
        if time.monotonic() - saved > save_every_s:
            trainer.save()
            saved = time.monotonic()
    report.close()
    trainer.save()


def main(argv: list[str] | None = None) -> int:
    """Command line; ends with one JSON line."""
    parser = argparse.ArgumentParser(
        prog="spark train-tiny", description="Train the model that comes with the project."
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument(
        "--work", type=Path, help="folder of the resumable state (default: OUT/train)"
    )
    parser.add_argument(
        "--minutes", type=float, default=80.0, help="CPU minutes in all, decay included"
    )
    parser.add_argument(
        "--decay-minutes", type=float, default=16.0, help="CPU minutes of the final decay"
    )
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--save-every", type=float, default=300.0, help="seconds between checkpoints"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the state in the work folder"
    )
    parser.add_argument("--mtp-only", action="store_true", help="leave the trunk as it is")
    parser.add_argument("--new-tokenizer", action="store_true", help="train a new vocabulary too")
    args = parser.parse_args(argv)
    work = args.work or args.out / "train"
    if args.resume and not (work / "state.pt").exists():
        parser.error(f"there is no state to resume in {work}; leave --resume out to start anew")
    torch.set_num_threads(args.threads)
    network.keep_delta_rule_in_float32()
    if args.new_tokenizer:
        tokenizer.build(args.out)
    elif not (args.out / "tokenizer.json").exists():
        tokenizer.copy_shipped(args.out)
    trainer = Trainer(args.out, work, args.seed)
    if args.resume:
        trainer.load()
    if args.mtp_only:
        trainer.mtp_only, trainer.progress.decay_from_s = True, 0.0
    trainer.open_data()
    trainer.stop_on_signal()
    trainer.save()
    run(
        trainer,
        Schedule(args.learning_rate, args.minutes * 60, args.decay_minutes * 60),
        args.save_every,
    )
    p = trainer.progress
    print(
        json.dumps(
            {
                "tokens": p.tokens,
                "steps": p.step,
                "cpu_minutes": round(p.cpu_s / 60, 1),
                "out": str(args.out),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
