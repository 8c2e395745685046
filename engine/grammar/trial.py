"""The engine's side of the sandbox process: hands over schemas, starts it anew when it is lost.

Blocks while a schema is tried out, so it belongs to one helper thread.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from engine.errors import EngineUnavailableError, RequestError
from engine.grammar.sandbox import READY, TAKEN, WALL_SECONDS, receive, send

START_SECONDS = 60.0
_SINGLE_THREADED = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)

logger = logging.getLogger(__name__)


class Sandbox:
    """One sandbox process.

    Args:
        folder: the checkpoint.
        vocab_size: rows of the model's embedding.
        end_ids: ids that end a sequence.
        command: what to run instead of the sandbox, for tests.
    """

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        end_ids: Sequence[int],
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        ends = ",".join(map(str, end_ids))
        module = "engine.grammar.sandbox"
        self._command = command or [sys.executable, "-m", module, folder, str(vocab_size), ends]
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _SINGLE_THREADED,
        )
        self._ready = False

    def grammar_text(self, schema: str) -> str:
        """The text of a grammar that is known to compile.

        Raises:
            RequestError: the schema cannot be followed, or not within the limits.
            EngineUnavailableError: the sandbox does not work.
        """
        try:
            answer = self._ask(schema.encode("utf-8", "replace"))
        except OSError as error:
            self.close()
            logger.warning("The process that tries out grammars was lost: %s", error)
            raise EngineUnavailableError("schemas cannot be compiled now; try again") from error
        text = answer[1:].decode("utf-8", "replace")
        if answer[:1] != TAKEN:
            raise RequestError(
                f"the JSON schema {text}", param="response_format", code="invalid_schema"
            )
        return text

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, schema: bytes) -> bytes:
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        source = process.stdout.fileno()
        if not self._ready:
            if self._answer(source, START_SECONDS) != READY:
                raise OSError("it did not start")
            self._ready = True
        send(process.stdin.fileno(), schema)
        return self._answer(source, 2 * WALL_SECONDS)

    @staticmethod
    def _answer(source: int, seconds: float) -> bytes:
        began = time.monotonic()
        if not select.select([source], [], [], seconds)[0]:
            raise OSError(f"no answer for {time.monotonic() - began:.0f} s")
        answer = receive(source)
        if answer is None:
            raise OSError("it ended")
        return answer
