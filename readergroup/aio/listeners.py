"""Listeners of the event loop, called from threads of the SDK."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar, cast

from synchronizer import ClosedError
from synchronizer.callables import NotHandledError, check_callable, is_async

from ..scaling.awaiting import HandlerCancelledError, LoopEndedError, are_others_cancelled, attempt, run_on

F = TypeVar("F", bound=Callable[..., object])


class LoopListener:
    """Runs an ``async def`` on the loop of its registration. The calling thread waits until it returns."""

    def __init__(self, listener: Callable[..., Awaitable[object]]) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._listener, follow_wrapped=False)

    def __call__(self, *arguments: Any) -> object:
        async def listen() -> None:
            await self._listener(*arguments)

        return run_on(self._loop, listen())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoopListener) and self._listener == other._listener

    def __hash__(self) -> int:
        return hash(self._listener)

    def __repr__(self) -> str:
        return repr(self._listener)


class ThreadListener(LoopListener):
    """Calls a plain function in the calling thread. A coroutine that it returns runs as a `LoopListener`."""

    def __call__(self, *arguments: Any) -> object:
        returned = self._listener(*arguments)
        if not inspect.isawaitable(returned):
            return returned

        async def listen() -> None:
            await returned

        try:
            return run_on(self._loop, listen())
        finally:
            if inspect.iscoroutine(returned) and inspect.getcoroutinestate(returned) == inspect.CORO_CREATED:
                returned.close()  # the loop has ended; else Python warns that it was never awaited


class LoopHandler(LoopListener):
    """A `LoopListener` that handles events. One that was cancelled with all tasks of its loop has not failed."""

    def __call__(self, *arguments: Any) -> None:
        (what,) = arguments
        try:
            run_on(self._loop, self._attempt(what))
        except (CancelledError, LoopEndedError) as error:
            ended = ClosedError("the handler was cancelled, or its event loop has ended; open another processor")
            raise NotHandledError(ended) from error

    async def _attempt(self, what: Any) -> None:
        try:
            await attempt(self._listener, what, None)
        except asyncio.CancelledError as error:
            if are_others_cancelled(if_none=True):
                raise
            raise HandlerCancelledError from error


def on_loop(listener: F, face: type[LoopListener] = LoopListener) -> F:
    """Return a plain function that calls ``listener``: an ``async def`` on the running loop, others in its thread."""
    check_callable(listener, "a listener", may_await=True)
    return cast(F, face(cast(Any, listener))) if is_async(listener) else listener


def awaited_on_loop(listener: F) -> F:
    """As `on_loop`, for a plain function that may return a coroutine, such as a lambda: that runs on the loop."""
    told = on_loop(listener)
    return told if told is not listener else cast(F, ThreadListener(cast(Any, listener)))
