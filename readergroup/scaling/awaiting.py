"""Runs ``async def`` handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, Final, TypeVar

from synchronizer import ClosedError
from synchronizer.callables import NotHandledError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import waiting_here

from ..telemetry.logs import fields_of
from .handlers import exited

_logger = get_logger(__name__)

R = TypeVar("R")

#: How often a thread that waits for a coroutine looks whether the loop has ended.
_LOOK_SECONDS: Final = 0.25
#: How long a handler may take to end after it was cancelled, before the worker complains.
CANCEL_SECONDS: Final = 5.0


class LoopEndedError(ClosedError):
    """The event loop has ended, and runs nothing any more, or nothing for this caller."""


class HandlerCancelledError(RuntimeError):
    """The task of a handler was cancelled although its worker goes on: the next one would get the same event."""

    def __init__(
        self, text: str = "the task of the handler was cancelled, by the handler or by other code of the application"
    ) -> None:
        super().__init__(text)


def uncancel(task: asyncio.Task[Any]) -> None:
    """Forget the cancellations of the task, which were raised or are suppressed."""
    while task.cancelling():
        task.uncancel()


def are_others_cancelled(*, if_none: bool) -> bool:
    """Whether no other task of the loop goes on; ``if_none`` if there is no other. A loop that ends cancels all."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return all(task.cancelling() for task in others) if others else if_none


def run_on(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R], *, is_over: Callable[[], bool] = lambda: False
) -> R:
    """Return what the coroutine returns on the loop. It is called in a thread that is not the loop's.

    Args:
        loop: May end at any moment.
        coroutine: What runs on it.
        is_over: Whether the caller is to wait no longer. The coroutine is then cancelled.

    Raises:
        LoopEndedError: The loop has ended, or ends before the coroutine, or ``is_over``.
    """
    with waiting_here():
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            coroutine.close()
            raise LoopEndedError("the event loop has ended") from None
        while wait([future], _LOOK_SECONDS).not_done:
            if loop.is_closed():
                if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    coroutine.close()  # else Python warns that it was never awaited
                raise LoopEndedError("the event loop has ended")
            if is_over():
                future.cancel()
                raise LoopEndedError("what used the event loop has ended")
        return future.result()


def contained(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an ``async def`` handler for which `exited` holds."""

    async def call(what: Any) -> object:
        try:
            return await handle(what)
        except (Exception, NotHandledError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise exited(error) from error

    return call


async def attempt(handle: Callable[[Any], Any], what: Any, timeout_seconds: float | None) -> object:
    """Return what the handler returns. Raise `TimeoutError` if it does not return in time, even if it does later.

    A handler that suppresses its cancellation is waited for, so that its events never run twice at once.
    """
    late = None if timeout_seconds is None else _Lateness(_current_task(), timeout_seconds, what)
    try:
        returned = await handle(what)
    except asyncio.CancelledError as error:
        task = _current_task()  # not before: it costs a system call
        is_late = late is not None and late.passed
        if is_late:
            task.uncancel()
        if task.cancelling():
            raise  # what runs the task knows why
        if not is_late:
            raise RuntimeError("the handler raised asyncio.CancelledError, although nothing cancelled it") from error
        returned = None
    except GeneratorExit as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise  # it comes from here, not from the handler: this coroutine is closed
        raise RuntimeError("the handler raised GeneratorExit, which only a coroutine that is closed does") from error
    finally:
        if late is not None:
            late.stop()
    if late is not None and late.passed:
        raise TimeoutError(f"the handler did not return within handler_timeout_seconds={timeout_seconds:.6g}")
    return returned


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class _Lateness:
    """Cancels the task after the timeout, and complains if that does not end it."""

    def __init__(self, task: asyncio.Task[Any], timeout_seconds: float, what: object) -> None:
        self.passed = False
        self._task = task
        self._timeout_seconds = timeout_seconds
        self._what = what
        self._timer = task.get_loop().call_later(timeout_seconds, self._cancel)

    def stop(self) -> None:
        self._timer.cancel()

    def _cancel(self) -> None:
        self.passed = True
        self._task.cancel()
        self._timer = self._task.get_loop().call_later(CANCEL_SECONDS, self._complain)

    def _complain(self) -> None:
        _logger.error(
            "a handler still runs %.3g s after it was cancelled for handler_timeout_seconds=%.6g, and later events of "
            "its key wait for it; let asyncio.CancelledError pass: %r",
            *(CANCEL_SECONDS, self._timeout_seconds, self._what),
            extra=fields_of(self._what),
        )


class Awaiting:
    """Calls an ``async def`` like a plain function, on a loop of its own that lasts until `close`."""

    def __init__(self, handle: Callable[[Any], Any], timeout_seconds: float | None) -> None:
        self._handle = handle
        self._timeout_seconds = timeout_seconds
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def __call__(self, what: Any) -> object:
        try:
            return self._runner.run(self._attempt(what))
        except asyncio.CancelledError as error:
            if self._is_cancelled:
                raise
            raise HandlerCancelledError from error

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what the coroutine returns, which runs on the same loop."""
        return self._runner.run(coroutine)

    async def _attempt(self, what: Any) -> object:
        self._task = asyncio.current_task()
        return await attempt(self._handle, what, self._timeout_seconds)

    def cancel(self) -> None:
        """Cancel the present call, which then raises `asyncio.CancelledError`. Any thread may call it."""
        self._is_cancelled = True
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        self._runner.close()
