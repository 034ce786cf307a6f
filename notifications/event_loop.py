"""Runs the coroutines of a listener on the event loop of its registration. Imported only if asyncio is in use."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from concurrent.futures import Future


class EventLoop:
    """The event loop that runs in this thread. Coroutines run on it one after the other, in the order of `run`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._in_order = asyncio.Lock()  # first come, first served

    @property
    def is_this_thread(self) -> bool:
        """Whether the loop runs in this thread. A wait here would block its coroutines."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    @property
    def is_running(self) -> bool:
        """Whether the loop runs, in any thread."""
        return self._loop.is_running()

    def run(self, awaitable: Awaitable[object]) -> Future[None]:
        """Start ``awaitable`` on the loop after all earlier ones. Raise `RuntimeError` if the loop is closed."""
        in_order = self._await_in_order(awaitable)
        try:
            future = asyncio.run_coroutine_threadsafe(in_order, self._loop)
        except RuntimeError:
            in_order.close()
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise
        if inspect.iscoroutine(awaitable):
            future.add_done_callback(lambda _: awaitable.close())  # it may be cancelled before it begins
        return future

    async def _await_in_order(self, awaitable: Awaitable[object]) -> None:
        async with self._in_order:
            await awaitable


def running_loop() -> EventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    try:
        return EventLoop()
    except RuntimeError:
        return None
