"""A process that tries schemas out: `python -m engine.grammar.sandbox FOLDER VOCAB_SIZE END_IDS`.

A schema may compile for hours, take all memory or overflow the stack inside xgrammar, and nothing
can interrupt that but the end of the process. So each is compiled in a forked child with limits
that the kernel keeps; what comes back is the text of a grammar that is known to compile, or why
not. Frames on standard input and output: length, then bytes; it ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import load_vocabulary

CPU_SECONDS = 2.0
WALL_SECONDS = 20.0
MEMORY_BYTES = 256 << 20  # beyond what the process has before
MAX_GRAMMAR_BYTES = 4 << 20
NICENESS = 5
READY, TAKEN, REFUSED = b"h", b"g", b"e"
LENGTH = struct.Struct("<I")

_STDERR = 2  # xgrammar's own warnings go there, whatever Python calls its standard error
_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Warning: )?")


def main() -> int:
    """Say that it is ready, then answer one schema after the other."""
    folder, vocab_size, ends = sys.argv[1:]
    os.nice(NICENESS)  # trying out must not take the processor from those who are served
    vocabulary = load_vocabulary(Path(folder), int(vocab_size), tuple(map(int, ends.split(","))))
    compiler = GrammarCompiler(vocabulary)
    # A broken pipe: the engine ended before it could hear the answer.
    with contextlib.suppress(BrokenPipeError):
        send(sys.stdout.fileno(), READY)
        while (schema := receive(sys.stdin.fileno())) is not None:
            send(sys.stdout.fileno(), in_child(partial(try_out, compiler, schema.decode())))
    return 0


def send(descriptor: int, data: bytes) -> None:
    """Write one frame."""
    rest = memoryview(LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> bytes | None:
    """Read one frame; None at the end."""
    head = _read(descriptor, LENGTH.size)
    return None if head is None else _read(descriptor, LENGTH.unpack(head)[0])


def _read(descriptor: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, min(size - len(data), 1 << 16))
        if not part:
            return None
        data += part
    return data


def in_child(work: Callable[[], bytes]) -> bytes:
    """The result of `work` in a forked process with limits, or a refusal if that ended early."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        _limit()
        send(sink, work())
        os._exit(0)
    os.close(sink)
    result = receive(source)
    os.close(source)
    _, status = os.waitpid(child, 0)
    if result is not None:
        return result
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        why = f"takes longer than {CPU_SECONDS:g} s to compile; use fewer optional parts"
    else:
        why = "takes too much memory to compile; make it smaller"
    return REFUSED + why.encode()


def _limit() -> None:
    # Their default action ends the process wherever it is, also when the engine has gone.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    memory = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def try_out(compiler: GrammarCompiler, schema: str) -> bytes:
    """The answer to one schema; a warning of xgrammar means that it would not be followed."""
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), _STDERR)
        try:
            text = compiler.grammar_text(schema).encode()
            if len(text) > MAX_GRAMMAR_BYTES:
                return REFUSED + f"becomes a grammar of {len(text)} bytes; make it smaller".encode()
            compiler.first_mask(compiler.compile(text.decode()))
        except Exception as error:
            return REFUSED + _reason(str(error)).encode()
        said.seek(0)
        warning = said.read().decode(errors="replace")
    return REFUSED + _reason(warning).encode() if warning else TAKEN + text


def _reason(text: str) -> str:
    lines = text.strip().splitlines() or ["no reason was given"]
    return f"cannot be followed: {_LOCATION.sub('', lines[-1])[:300]}"


if __name__ == "__main__":
    sys.exit(main())
