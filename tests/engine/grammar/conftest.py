"""The packaged vocabulary with a compiler in this process."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import Vocabulary, load_vocabulary

TINY = Path(str(files("spark_server"))) / "assets" / "spark-tiny"
END = 2041


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return load_vocabulary(TINY, 2048, (END,))


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    pytest.importorskip("xgrammar")
    return GrammarCompiler(vocabulary)
