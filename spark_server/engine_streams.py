"""The open streams by request id, and which of them the engine still owes an end.

Knows nothing of processes: deltas are put in, consumers take them out at their own pace.
"""

from __future__ import annotations

import asyncio
from collections import deque

from engine.errors import InvariantError, SparkError
from engine.request import FinishReason, TokenDelta

Item = TokenDelta | SparkError


class Stream:
    """A queue with one consumer; cheaper than asyncio's, which serves many on both sides."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Never waits."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Item:
        """The oldest item; waits for one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Streams:
    """Queues between the one reader of the engine's reports and the consumers.

    A stream is *owed* from its opening until the engine (or a failure) ended it; it is *open*
    until its consumer has closed it, which a slow client may do much later.
    """

    def __init__(self) -> None:
        self._queues: dict[int, Stream] = {}
        self._owed: set[int] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    @property
    def owed(self) -> int:
        """Streams that the engine has not ended."""
        return len(self._owed)

    def open(self, request_id: int) -> Stream:
        """A new stream.

        Raises:
            InvariantError: the id is in use.
        """
        if request_id in self._queues:
            raise InvariantError(f"request id {request_id} is in use")
        queue = Stream()
        self._queues[request_id] = queue
        self._owed.add(request_id)
        self._none_open.clear()
        return queue

    def deliver(self, delta: TokenDelta) -> None:
        """Hand a delta to its consumer; one that has gone is passed over in silence."""
        queue = self._queues.get(delta.request_id)
        if queue is not None:
            queue.put(delta)
            if delta.finish_reason is not None:
                self._owed.discard(delta.request_id)

    def reject(self, request_id: int, error: SparkError) -> None:
        """The engine did not take the request; its consumer raises `error`."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put(error)
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
