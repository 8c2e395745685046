"""The open streams by request id, and which of them the engine still owes an end.

Knows nothing of processes: deltas are put in, consumers take them out at their own pace.
"""

from __future__ import annotations

import asyncio

from engine.errors import InvariantError, SparkError
from engine.request import FinishReason, TokenDelta

Item = TokenDelta | SparkError


class Streams:
    """Queues between the one reader of the engine's reports and the consumers.

    A stream is *owed* from its opening until the engine (or a failure) ended it; it is *open*
    until its consumer has closed it, which a slow client may do much later.
    """

    def __init__(self) -> None:
        self._queues: dict[int, asyncio.Queue[Item]] = {}
        self._owed: set[int] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def owed(self) -> int:
        """Streams that the engine has not ended."""
        return len(self._owed)

    def open(self, request_id: int) -> asyncio.Queue[Item]:
        """A new stream.

        Raises:
            InvariantError: the id is in use.
        """
        if request_id in self._queues:
            raise InvariantError(f"request id {request_id} is in use")
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self._queues[request_id] = queue
        self._owed.add(request_id)
        self._none_open.clear()
        return queue

    def deliver(self, delta: TokenDelta) -> None:
        """Hand a delta to its consumer; one that has gone is passed over in silence."""
        queue = self._queues.get(delta.request_id)
        if queue is not None:
            queue.put_nowait(delta)
            if delta.finish_reason is not None:
                self._owed.discard(delta.request_id)

    def reject(self, request_id: int, error: SparkError) -> None:
        """The engine did not take the request; its consumer raises `error`."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(error)
            self._owed.discard(request_id)

    def fail_all(self, message: str) -> list[int]:
        """End every owed stream with an error that a client may retry; returns their ids."""
        failed = sorted(self._owed)
        for request_id in failed:
            self.deliver(
                TokenDelta(
                    request_id, finish_reason=FinishReason.ERROR, error=message, error_status=503
                )
            )
        return failed

    def close(self, request_id: int) -> bool:
        """The consumer has gone; returns whether the engine still works on the request."""
        self._queues.pop(request_id, None)
        if not self._queues:
            self._none_open.set()
        owed = request_id in self._owed
        self._owed.discard(request_id)
        return owed

    async def none_open(self) -> None:
        """Wait until every consumer has closed its stream."""
        await self._none_open.wait()
