"""Durable queues on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

import synchronizer as sync
from synchronizer import DeadlineExceededError
from synchronizer.arguments import check_duration

from .calls import Calls, NotBegunError, deadline_after
from .facade import AwaitedProperty, ClosableFacade, Plain, awaited, iterated

#: How many tasks of one queue add, or wait for room, at the same time. Those that add together share an append.
ADD_THREADS: Final = 16

Q = TypeVar("Q", bound=sync.EventQueue)


class _Queue(ClosableFacade[Q]):
    def __init__(self, wrapped: Q, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._adding = calls.several(f"queue {wrapped.name}", ADD_THREADS)

    name = Plain(lambda queue: str(queue.name))
    clear = awaited(sync.EventQueue.clear)
    handled_upto = AwaitedProperty(lambda queue: int(queue.handled_upto))
    outstanding_bytes = AwaitedProperty(lambda queue: int(queue.outstanding_bytes))
    dead_letters = iterated(sync.EventQueue.dead_letters)
    forget_dead_letters = awaited(sync.EventQueue.forget_dead_letters)

    async def add(self, event: bytes, *, timeout: float | None = None) -> None:
        """Store an event exactly once. It waits while the queue is full. See `EventQueue.add`.

        Args:
            event: At most the store's ``guarantees.largest_append`` less 64 KiB.
            timeout: Seconds to wait while the store is unavailable or the queue is full; by default the queue's.

        Raises:
            ReaderGroupError: As `EventQueue.add`.
        """
        await self._add(partial(self._wrapped.add, event), timeout)

    async def add_many(self, events: Iterable[bytes], *, timeout: float | None = None) -> None:
        """Store several events, all or none. They are handled in order, with no other event between them. See `add`."""
        await self._add(partial(self._wrapped.add_many, events), timeout)

    async def _add(self, add: Callable[..., None], timeout: float | None) -> None:
        check_duration(timeout, "timeout", or_none=True)
        deadline = deadline_after(self._wrapped.timeout if timeout is None else timeout)
        try:
            await self._adding.call_until(deadline, lambda left: add(timeout=left))
        except NotBegunError:
            raise DeadlineExceededError(
                "other tasks added to the queue first, or wait until it has room; nothing was written",
                queue=self.name,
            ) from None


class EventQueue(_Queue[sync.EventQueue]):
    """Adds events to a durable queue. Tasks may share it."""


class EventProcessor(_Queue[sync.EventProcessor]):
    """Calls a handler with each event of a durable queue, in order. An ``async def`` handler runs on the loop."""

    active = Plain(lambda processor: bool(processor.active))
    processed_events = Plain(lambda processor: int(processor.processed_events))
    processed_bytes = Plain(lambda processor: int(processor.processed_bytes))
    drain = awaited(sync.EventProcessor.drain, waits=True)

    def __init__(self, wrapped: sync.EventProcessor, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._stopped: asyncio.Future[bool] | None = None

    async def close(self) -> None:
        """Stop after the current event or batch; the next consumer continues after it. Closing twice is no error."""
        if not self._calls.closed:
            thread = self._calls.single(f"end of queue {self.name}")  # of its own: it waits for the handler
            try:
                await thread.end(self._wrapped.close)
            finally:
                thread.close()

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until the processor stops and raise its `error`, if there is one; return False if it still works.

        A cancelled call does not stop it.

        Args:
            timeout: Seconds to wait; None waits until it stops.
        """
        check_duration(timeout, "timeout", or_none=True)
        if self._stopped is None:
            thread = self._calls.single(f"queue {self.name}")
            self._stopped = thread.start(self._wrapped.join)
            thread.close()  # after the call
        await asyncio.wait([self._stopped], timeout=timeout)
        return self._stopped.done() and self._stopped.result()

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the processor; None while it works, and after `close`."""
        return self._wrapped.error

    @property
    def latency(self) -> sync.HandlingLatency:
        """The duration of the last 1000 calls of the handler."""
        return self._wrapped.latency
