"""Bytes of tokens: byte-level and sentencepiece vocabularies, added tokens, broken files."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFormatError
from engine.grammar.vocabulary import byte_alphabet, load_vocabulary

TINY = Path(str(files("spark_server"))) / "assets" / "spark-tiny"


def write(folder: Path, definition: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    return folder


def test_the_packaged_vocabulary_decodes_as_the_tokenizer_does() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    vocabulary = load_vocabulary(TINY, 2048, (2041,))
    assert len(vocabulary.pieces) == 2048
    added = {token_id for token_id in range(2048) if not vocabulary.pieces[token_id]}
    assert added == set(range(2039, 2048))
    for text in ("Ruby the fox; \t\n é 日本 🎉", '{"a": [1, null]}'):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()


def test_every_byte_has_one_character() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["▁a", -1.0], ["<0x0A>", -1.0], ["é", -2.0]]
    definition = {
        "model": {"type": "Unigram", "vocab": pieces},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "added_tokens": [{"id": 0, "content": "<unk>"}],
    }
    vocabulary = load_vocabulary(write(tmp_path, definition), 6, (0,))
    assert vocabulary.pieces == (b"", b" a", b"\n", "é".encode(), b"", b"")


def test_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    definition = {"model": {"vocab": {"a": 0, "b": 5}}, "decoder": {"type": "ByteLevel"}}
    assert load_vocabulary(write(tmp_path, definition), 2, (1,)).pieces == (b"a", b"")


@pytest.mark.parametrize("definition", [5, {}, {"model": {}}, {"model": {"vocab": 5}}])
def test_broken_files_are_named(tmp_path: Path, definition: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        load_vocabulary(write(tmp_path, definition), 4, (1,))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="cannot be read"):
        load_vocabulary(tmp_path, 4, (1,))
