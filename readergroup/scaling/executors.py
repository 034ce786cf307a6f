"""Run the items of a worker: in threads that start on demand, or as tasks of one event loop.

Both take items from a `Source`, and tell it how each ended, under its lock.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, Protocol, TypeVar

from synchronizer import StoreUnavailableError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread

from ..streams.event import Event, EventBatch
from ..telemetry.logs import LogAbout
from .awaiting import HandlerCancelledError, are_others_cancelled, attempt, run_on, uncancel
from .in_flight import Item

R = TypeVar("R")

#: How many items the loop takes at a time, between which other tasks run.
_LOOP_ITEMS: Final = 100
#: How long an idle thread or loop waits before it looks again, if nothing wakes it.
_LOOK_SECONDS: Final = 0.25

#: How long a loop of the application starts nothing after code of the application has cancelled the task of a handler.
_PAUSE_SECONDS: Final = 0.5

_logger = get_logger(__name__)


class FailedAloneError(Exception):
    """Of a batch that was handled one by one, these events failed."""

    def __init__(self, failures: Sequence[tuple[Event[Any], Exception]]) -> None:
        super().__init__(f"{len(failures)} events failed")
        self.failures = failures


class Source(Protocol):
    """What has the items. The lock of ``condition`` is held during each call but `check`."""

    condition: threading.Condition

    def take(self, most: int) -> list[Item[Any]]:
        """Return items to run now; none once the worker ends."""
        ...

    def finish(self, item: Item[Any], error: BaseException | None) -> None:
        """Note how the item ended. An error that is no `Exception` ends the worker."""
        ...

    def check(self, returned: object, what: Any) -> None:
        """Raise if what a handler returned has not run."""
        ...

    def seconds_until_due(self) -> float | None:
        """Return when a retry is due."""
        ...


class Executor(Protocol):
    """Runs items until it is closed. The lock is not held during a call."""

    @property
    def can_run(self) -> bool:
        """Whether items can still run: a loop of the application may have ended."""
        ...

    def wake(self, ready: int) -> None:
        """Look for items: about so many are ready."""
        ...

    def close(self) -> None:
        """Take no more items. Tasks are cancelled; threads end with their items."""
        ...


class ThreadExecutor:
    """Up to ``concurrency`` threads, each of which runs one item at a time."""

    def __init__(
        self,
        source: Source,
        handle: Callable[[Any], object],
        concurrency: int,
        name: str,
        logger: logging.Logger | LogAbout = _logger,
    ) -> None:
        self._logger = logger
        self._source = source
        self._handle = handle
        self._concurrency = concurrency
        self._name = name
        self._closed = False
        self._threads = 0
        self._idle = 0

    @property
    def can_run(self) -> bool:
        return True

    def wake(self, ready: int) -> None:
        condition = self._source.condition
        with condition:
            condition.notify(max(1, ready))
            missing = min(ready - self._idle, self._concurrency - self._threads)
        for _ in range(missing):
            thread = BackgroundThread(self._run, name=f"{self._name} handler {self._threads + 1}")
            with condition:
                self._threads += 1
            try:
                thread.start()
            except StoreUnavailableError as error:
                with condition:
                    self._threads -= 1
                    if not self._threads:
                        raise
                self._logger.warning("%s continues with %d threads: %s", self._name, self._threads, error)
                return

    def close(self) -> None:
        with self._source.condition:
            self._closed = True
            self._source.condition.notify_all()

    def _run(self) -> None:
        source, condition = self._source, self._source.condition
        while True:
            with condition:
                while not (taken := [] if self._closed else source.take(1)):
                    if self._closed:
                        self._threads -= 1
                        return
                    due = source.seconds_until_due()
                    self._idle += 1
                    try:
                        condition.wait(_LOOK_SECONDS if due is None else min(due, _LOOK_SECONDS))
                    finally:
                        self._idle -= 1
            (item,) = taken
            error: BaseException | None = None
            try:
                self._call(item)
            except BaseException as raised:
                error = raised
            with condition:
                source.finish(item, error)

    def _call(self, item: Item[Any]) -> None:
        if not item.singly:
            self._handle_one(item.what)
            return
        batch: EventBatch[Any] = item.what
        failures = []
        for index, event in enumerate(batch):
            try:
                self._handle_one(batch.only(index))
            except Exception as error:
                failures.append((event, error))
        if failures:
            raise FailedAloneError(failures)

    def _handle_one(self, what: Any) -> None:
        returned = self._handle(what)
        if returned is not None:
            self._source.check(returned, what)


class LoopExecutor:
    """An event loop that runs up to ``concurrency`` items as tasks: one of the application, or its own in a thread."""

    def __init__(
        self,
        source: Source,
        handle: Callable[[Any], Any],
        concurrency: int,
        timeout_seconds: float | None,
        name: str,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._source = source
        self._handle = handle
        self._concurrency = concurrency
        self._timeout_seconds = timeout_seconds
        self._closed = False
        self._tasks: dict[Item[Any], asyncio.Task[None]] = {}
        self._ended: list[tuple[Item[Any], BaseException | None]] = []
        self._is_pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.copy_context()
        self._is_own = loop is None
        self._loop_ends = False
        self._is_paused = False
        if loop is not None:
            self._loop = loop
            return
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:
            raise StoreUnavailableError(
                "no event loop can be opened now; close files, or raise the limit of open files of this user",
                error=str(error),
            ) from error
        try:
            BackgroundThread(self._run, name=f"{name} loop").start()
        except BaseException:
            self._loop.close()
            raise

    @property
    def can_run(self) -> bool:
        return not self._loop.is_closed()

    def wake(self, ready: int) -> None:
        self._call_in_loop(self._pump_soon)

    def close(self) -> None:
        self._closed = True
        self._call_in_loop(self._cancel)

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Return what the coroutine returns. Raise `ClosedError` if the loop ends first."""
        return run_on(self._loop, coroutine, is_over=lambda: self._closed)

    def _call_in_loop(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # ------------------------------------------------------------------ in the thread of the loop

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _cancel(self) -> None:
        for item, task in self._tasks.items():
            task.cancel()
            task.add_done_callback(partial(self._forget, item))
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._is_own and not self._tasks:
            self._loop.stop()

    def _forget(self, item: Item[Any], task: asyncio.Task[None]) -> None:
        """Note the end of a task that was cancelled before its first step. Others note it themselves."""
        if self._tasks.pop(item, None) is not None:
            self._ended.append((item, asyncio.CancelledError()))
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Report the items that have ended, and start others in their place."""
        self._is_pump_due = False
        if self._is_paused and not self._closed:
            return
        source, ended = self._source, self._ended
        with source.condition:
            for item, error in ended:
                source.finish(item, error)
            ended.clear()
            free = self._concurrency - len(self._tasks)
            taken = [] if self._closed else source.take(min(free, _LOOP_ITEMS))
            due = None if taken else source.seconds_until_due()
        for item in taken:
            # Not in the context of the item that has ended, whose handler may have set variables in it.
            task = self._context.copy().run(self._loop.create_task, self._handle_item(item))
            if not task.done():  # an eager task may be
                self._tasks[item] = task
        if self._closed:
            self._stop_if_done()
        elif taken and len(self._tasks) < self._concurrency:
            self._pump_soon()
        elif due is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(min(due, _LOOK_SECONDS), self._pump_soon)

    def _pause(self) -> None:
        """Start nothing for a while: the loop may be about to end, and would not wait for it."""
        if not self._is_paused:
            self._is_paused = True
            self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self._pump_soon()

    async def _handle_item(self, item: Item[Any]) -> None:
        error: BaseException | None = None
        try:
            if item.singly:
                await self._handle_singly(item)
            else:
                await self._handle_one(item.what)
        except BaseException as raised:
            error = raised
        self._ended.append((item, error))
        self._tasks.pop(item, None)
        if isinstance(error, HandlerCancelledError) and not self._is_own:
            self._pause()
        self._pump_soon()
        if not self._is_own and isinstance(error, KeyboardInterrupt | SystemExit):
            self._loop.call_soon(_raise, error)  # ends the loop of the application

    async def _handle_singly(self, item: Item[Any]) -> None:
        batch: EventBatch[Any] = item.what
        failures = []
        for index, event in enumerate(batch):
            try:
                await self._handle_one(batch.only(index))
            except Exception as error:
                if isinstance(error, HandlerCancelledError) and not item.spared:
                    raise
                failures.append((event, error))
            task = asyncio.current_task()
            if task is not None and task.cancelling() and not self._is_ending():  # by a handler that returned
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                uncancel(task)
        if failures:
            raise FailedAloneError(failures)

    async def _handle_one(self, what: Any) -> None:
        try:
            returned = await attempt(self._handle, what, self._timeout_seconds)
        except asyncio.CancelledError as error:
            if self._is_ending():
                raise
            task = asyncio.current_task()
            if task is not None:
                uncancel(task)
            raise HandlerCancelledError from error
        if returned is not None:
            self._source.check(returned, what)

    def _is_ending(self) -> bool:
        """Whether the worker or the loop of the application ends. A loop that ends cancels all its tasks."""
        if self._closed:
            return True
        if not self._is_own and not self._loop_ends:
            self._loop_ends = are_others_cancelled(if_none=False)
        return self._loop_ends


def _raise(error: BaseException) -> NoReturn:
    raise error
