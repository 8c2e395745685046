"""Judges a spark-tiny folder: held-out loss, answers, tool calls, accepted drafts, equal logits."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from benchmarks.tiny import chats, corpus, data, export, facts, tokenizer
from benchmarks.tiny.model import END_OF_TEXT, END_OF_TURN, MtpHead

DEPTHS = 3
_QUESTIONS = [
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What is 17 + 25?",
    "Count to ten.",
    "What is the opposite of hot?",
    "Tell me a story about a fox.",
    "Give me a JSON object with the name Mia and the age 7.",
    "Repeat after me: blue stone sing",
    "What does a cow say?",
    "List three fruits.",
    "Who won the world cup?",
]


@dataclass
class Loaded:
    """A model folder, loaded."""

    tokenizer: PreTrainedTokenizerFast
    trunk: Qwen3_5ForCausalLM
    mtp: MtpHead

    def prompt(
        self, messages: list[dict[str, Any]], tools: Any = None, **options: Any
    ) -> list[int]:
        """Ids of a chat with the generation prompt."""
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: list[int], limit: int) -> list[int]:
        """The greedy continuation, with the stop id when one was reached."""
        cache, ids, out = DynamicCache(config=self.trunk.config), prompt, list[int]()
        while len(out) < limit:
            logits = self.trunk(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits
            out.append(int(logits[0, -1].argmax()))
            ids = out[-1:]
            if ids[0] in (END_OF_TEXT, END_OF_TURN):
                break
        return out

    def answer(self, messages: list[dict[str, Any]], limit: int = 160, **options: Any) -> str:
        """The greedy answer as text."""
        out = self.greedy(self.prompt(messages, **options), limit)
        return str(self.tokenizer.decode([i for i in out if i not in (END_OF_TEXT, END_OF_TURN)]))


@dataclass
class Accepts:
    """How often the first n drafts of a chain were all right, over `chains` chains."""

    chains: int = 0
    first: list[int] = field(default_factory=lambda: [0] * DEPTHS)

    def rates(self) -> dict[str, float]:
        """Unconditional p1, p2, p3 and the conditional p2_1, p3_2."""
        n, (a, b, c) = max(self.chains, 1), self.first
        values = {
            "p1": a / n,
            "p2": b / n,
            "p3": c / n,
            "p2_1": b / max(a, 1),
            "p3_2": c / max(b, 1),
        }
        return {name: round(value, 4) for name, value in values.items()}


@torch.inference_mode()
def count_accepts(model: Loaded, prompt: list[int], limit: int, counts: Accepts) -> None:
    """Add a chain of three drafts for every token of the model's own greedy continuation.

    Tokens past the end of the continuation do not count, so a chain near the end is left out.
    """
    continuation = model.greedy(prompt, limit)
    ids = torch.tensor([prompt + continuation])
    hidden = model.trunk.model(input_ids=ids, use_cache=False).last_hidden_state
    embedding = model.trunk.model.embed_tokens.weight
    states = model.mtp(ids, hidden, embedding, DEPTHS)
    # Row p has seen token p + 1 and drafts from token p + 2 on; all drafts lie in the continuation.
    rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1 - DEPTHS)
    right = torch.ones(len(rows), dtype=torch.bool)
    for depth, state in enumerate(states):
        draft = (state[0, rows] @ embedding.T).argmax(-1)
        right &= draft == ids[0, rows + 2 + depth]
        counts.first[depth] += int(right.sum())
    counts.chains += len(rows)


@torch.inference_mode()
def held_out_loss(model: Loaded, n: int) -> dict[str, float]:
    """Mean loss, nats a token, on n held-out documents: what the model has to say, and all."""
    encoder, sums = data.Encoder(model.tokenizer), [0.0, 0.0, 0.0, 0.0]
    for doc in itertools.islice(corpus.documents(999, held_out=True), n):
        ids, weights = encoder.encode(doc)
        ids_t, strong = torch.tensor([ids[:-1]]), torch.tensor(weights[1:-1]) > 0.5
        each = F.cross_entropy(
            model.trunk(input_ids=ids_t).logits[0, :-1], ids_t[0, 1:], reduction="none"
        )
        sums = [
            a + b
            for a, b in zip(
                sums,
                [each[strong].sum().item(), int(strong.sum()), each.sum().item(), len(each)],
                strict=True,
            )
        ]
    return {
        "held_out_loss": round(sums[0] / sums[1], 4),
        "held_out_loss_all": round(sums[2] / sums[3], 4),
    }


def tool_calls(model: Loaded, n: int) -> dict[str, float]:
    """Shares of held-out tool questions whose call parses, and whose call is right."""
    parsed = right = 0
    chosen = (
        d
        for d in corpus.documents(998, held_out=True)
        if d.kind == "tool" and any("tool_calls" in m for m in d.messages)
    )
    for doc in itertools.islice(chosen, n):
        at = next(i for i, m in enumerate(doc.messages) if "tool_calls" in m)
        want = [
            (
                c["function"]["name"],
                {
                    k: v if isinstance(v, str) else json.dumps(v)
                    for k, v in c["function"]["arguments"].items()
                },
            )
            for c in doc.messages[at]["tool_calls"]
        ]
        text = model.answer(doc.messages[:at], tools=doc.tools)
        try:
            got = corpus.parse_call(text)
        except ValueError:
            continue
        parsed += bool(got)
        right += got == want
    return {"tool_call_parses": round(parsed / n, 3), "tool_call_right": round(right / n, 3)}


def exact_answers(model: Loaded, n: int) -> dict[str, float]:
    """Shares of right answers to n facts (seen in training), sums and echoes."""
    from random import Random

    out = {}
    for name, make in (("facts", facts.fact), ("sums", facts.arithmetic), ("echo", chats.echo)):
        rng = Random(f"exam {name}")
        exam = [make(rng) for _ in range(n)]
        right = sum(
            model.answer([{"role": "user", "content": e.user}], limit=40) == e.assistant
            for e in exam
        )
        out[f"right_{name}"] = round(right / n, 3)
    return out


@torch.inference_mode()
def logit_difference(folder: Path, model: Loaded) -> float:
    """Largest difference of logits between transformers' own load and ours, both float32."""
    other = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(
        [model.prompt([{"role": "user", "content": "Tell me a story about a fox."}])]
    )
    return float((other(input_ids=ids).logits - model.trunk(input_ids=ids).logits).abs().max())


def accept_rates(model: Loaded, n: int) -> dict[str, dict[str, float]]:
    """Acceptance on prose and on tool-shaped text, over n prompts each."""
    prose, tools = Accepts(), Accepts()
    for messages in corpus.prose_prompts(1, n):
        count_accepts(model, model.prompt(messages), 160, prose)
    for messages, box in corpus.tool_prompts(1, n):
        count_accepts(model, model.prompt(messages, box), 160, tools)
    return {"prose": prose.rates(), "tools": tools.rates()}


def samples(model: Loaded) -> None:
    """Print twelve answers, one with thinking, and one tool call."""
    for question in _QUESTIONS:
        print(f"  {question}\n    {model.answer([{'role': 'user', 'content': question}])!r}")
    question = "What is the capital of Japan?"
    thought = model.answer([{"role": "user", "content": question}], enable_thinking=True)
    print(f"  {question} (thinking)\n    {thought!r}")
    messages, box = corpus.tool_prompts(2, 1)[0]
    print(f"  {messages[0]['content']} (tools)\n    {model.answer(messages, tools=box)!r}")


def write_card(folder: Path, numbers: dict[str, Any], training: str) -> None:
    """Rewrite the numbers section of the model card."""
    card = folder / "README.md"
    rows = [
        ("held-out loss, nats a token, assistant and raw text", numbers["held_out_loss"]),
        ("held-out loss, nats a token, everything", numbers["held_out_loss_all"]),
        ("facts right (seen in training)", numbers["right_facts"]),
        ("sums right (fresh seed)", numbers["right_sums"]),
        ("echoes right (fresh seed)", numbers["right_echo"]),
        (
            "held-out tool calls that parse / are right",
            f"{numbers['tool_call_parses']} / {numbers['tool_call_right']}",
        ),
    ]
    text = "| greedy answers | |\n|---|---|\n" + "".join(f"| {a} | {b} |\n" for a, b in rows)
    text += "\n| drafts accepted | p1 | p2 given 1 | p3 given 2 | p2 | p3 |\n"
    text += "|---|---|---|---|---|---|\n"
    for kind in ("prose", "tools"):
        r = numbers[kind]
        text += f"| {kind} | {r['p1']} | {r['p2_1']} | {r['p3_2']} | {r['p2']} | {r['p3']} |\n"
    text += "\nLogits, transformers against the trainer's modules, both float32: "
    text += f"largest difference {numbers['logit_difference']:.1e}.\n"
    text += f"{training}\n" if training else ""
    old = card.read_text()
    head, rest = old.split("<!-- numbers -->\n")
    new = f"{head}<!-- numbers -->\n{text}{rest[rest.index('<!-- /numbers -->') :]}"
    export.replace(card, new.encode())


def main(argv: list[str] | None = None) -> int:
    """Command line; prints a table and then one JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny.evaluate", description="Judge a spark-tiny folder"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=40, help="prompts for each rate")
    parser.add_argument(
        "--documents", type=int, default=300, help="held-out documents for the loss"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--card", action="store_true", help="rewrite the numbers in FOLDER/README.md"
    )
    parser.add_argument(
        "--training", default="", help="a sentence on the training run for the card"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    trunk, mtp = export.read(args.folder)
    model = Loaded(tokenizer.load(args.folder), trunk, mtp)
    numbers: dict[str, Any] = {"logit_difference": logit_difference(args.folder, model)}
    samples(model)
    numbers |= held_out_loss(model, args.documents) | exact_answers(model, args.prompts)
    numbers |= tool_calls(model, args.prompts) | accept_rates(model, args.prompts)
    for name, value in numbers.items():
        print(f"  {name:20} {value}")
    if args.card:
        write_card(args.folder, numbers, args.training)
    print(
        json.dumps(
            numbers
            | {"machine": platform.processor() or platform.machine(), "folder": str(args.folder)}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
