"""The tokenizer files of spark-tiny: a byte-level BPE of 2048 entries trained on the corpus."""

from __future__ import annotations

import itertools
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tiny.corpus import Document, documents
from benchmarks.tiny.template import CHAT_TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
#: In the order of their ids, which are the last of the vocabulary. True: a control token of the
#: chat format.
ADDED_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<think>": False,
    "</think>": False,
    "<tool_response>": False,
    "</tool_response>": False,
}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def render(tokenizer: PreTrainedTokenizerFast, doc: Document) -> str:
    """The text of a document as the model sees it, by the template that ships with it."""
    if doc.text:
        return doc.text + "<|endoftext|>"
    return str(tokenizer.apply_chat_template(doc.messages, tools=doc.tools or None, tokenize=False))


def build(out: Path, n_documents: int = 12000) -> None:
    """Train the vocabulary on the first documents of seed 0 and write the files to `out`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(_texts(n_documents), trainer)
    for token, special in ADDED_TOKENS.items():
        added = AddedToken(token, special=special, normalized=False)
        (tok.add_special_tokens if special else tok.add_tokens)([added])
    assert tok.get_vocab_size() == VOCAB_SIZE, tok.get_vocab_size()
    out.mkdir(parents=True, exist_ok=True)
    tok.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def copy_shipped(out: Path) -> None:
    """Copy the tokenizer files that ship with the project to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    shipped = resources.files("spark_server") / "assets" / "spark-tiny"
    for name in FILES:
        (out / name).write_bytes((shipped / name).read_bytes())


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder, without torch."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The ids of the added tokens."""
    return {token: int(tokenizer.convert_tokens_to_ids(token)) for token in ADDED_TOKENS}


def _texts(n: int) -> Any:
    """Pieces of documents between control tokens, so that no merge crosses one."""
    for doc in itertools.islice(documents(0), n):
        if doc.text:
            yield doc.text
        for tool in doc.tools:
            yield "\n" + json.dumps(tool)
        for message in doc.messages:
            yield f"{message['role']}\n{message['content']}"
            for call in message.get("tool_calls", []):
                function = call["function"]
                yield "".join(
                    [
                        f"\n<function={function['name']}>\n",
                        *(
                            f"<parameter={k}>\n{v}\n</parameter>\n"
                            for k, v in function["arguments"].items()
                        ),
                        "</function>\n",
                    ]
                )
    yield from ["\n\n", "# Tools\n\nYou have access to the following functions:\n\n"] * (n // 4)
