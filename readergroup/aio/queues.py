"""Durable queues on the event loop."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import synchronizer as sync
from synchronizer.arguments import check_duration

from .calls import Calls
from .facade import AwaitedProperty, ClosableFacade, Plain, awaited, iterated

Q = TypeVar("Q", bound=sync.EventQueue)


class _Queue(ClosableFacade[Q]):
    name = Plain(lambda queue: str(queue.name))
    add = awaited(sync.EventQueue.add, waits=True)
    add_many = awaited(sync.EventQueue.add_many, waits=True)
    clear = awaited(sync.EventQueue.clear)
    handled_upto = AwaitedProperty(lambda queue: int(queue.handled_upto))
    outstanding_bytes = AwaitedProperty(lambda queue: int(queue.outstanding_bytes))
    dead_letters = iterated(sync.EventQueue.dead_letters)
    forget_dead_letters = awaited(sync.EventQueue.forget_dead_letters)


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
