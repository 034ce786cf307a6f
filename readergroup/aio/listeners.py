"""Listeners of the event loop, called from threads of the SDK."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from synchronizer.callables import check_callable, is_async

F = TypeVar("F", bound=Callable[..., object])


class LoopListener:
    """Runs an ``async def`` on the loop of its registration. The calling thread waits until it returns."""

    def __init__(self, listener: Callable[..., Awaitable[object]]) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._listener, follow_wrapped=False)

    def __call__(self, *arguments: Any) -> None:
        async def listen() -> None:
            await self._listener(*arguments)

        run_on(self._loop, listen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoopListener) and self._listener == other._listener

    def __hash__(self) -> int:
        return hash(self._listener)

    def __repr__(self) -> str:
        return repr(self._listener)


def on_loop(listener: F) -> F:
    """Return a plain function that calls ``listener``: an ``async def`` on the running loop, others in its thread."""
    check_callable(listener, "a listener", may_await=True)
    return cast(F, LoopListener(cast(Any, listener))) if is_async(listener) else listener


def run_on(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Run the coroutine function on the loop and wait for it, in a thread that is not the loop's."""
    coroutine = function()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop is closed
        coroutine.close()
        raise
    future.result()
