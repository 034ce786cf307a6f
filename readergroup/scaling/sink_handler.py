"""Calls a handler with a connection of the sink, in the middle of its transaction.

Three kinds of errors end a transaction. If the database was away or full, or another transaction was in the way, the
events are tried again, and that counts as no attempt. What the handler raised is raised, and counts as a failed
attempt. Other errors of the sink end the worker: a newer owner has the segment, or the database is of no use.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from synchronizer import ReaderGroupError
from synchronizer.callables import NotHandledError, check_returned
from synchronizer.clock import Clock
from synchronizer.loggers import get_logger

from ..errors import EventStoredError
from ..sinks.sql_sink import SinkTransaction, SqlSink
from ..sql.errors import is_conflict, is_full, is_passing, was_idle
from ..sql.scripts import now
from ..streams.event import Event, EventBatch
from ..telemetry.logs import fields_of
from .awaiting import attempt
from .handlers import WorkerStoppedError, pause_of_sink

_logger = get_logger(__name__)

What = Event[Any] | EventBatch[Any]


class _Calls:
    """What both kinds of handlers share."""

    def __init__(
        self,
        handle: Callable[..., Any],
        sink: SqlSink,
        clock: Clock,
        stopping: threading.Event,
        go_on: Callable[[], object],
        *,
        shared: bool,
        timeout_seconds: float | None = None,
    ) -> None:
        self._handle = handle
        self._sink = sink
        self._clock = clock
        self._stopping = stopping
        self._go_on = go_on
        self._shared = shared
        self._timeout_seconds = timeout_seconds

    def _transaction(self, what: What) -> SinkTransaction:
        return SinkTransaction(self._sink, what, shared=self._shared, takes_rest=True)

    def _pause(self, what: What, failures: int, error: Exception) -> float:
        seconds = pause_of_sink(failures)
        _logger.warning(
            "%r was not stored, and comes again in %.3g s: %s: %s",
            *(what, seconds, type(error).__name__, error),
            extra=fields_of(what),
        )
        return seconds


class _TryAgainError(Exception):
    """The database was away or full, or another transaction was in the way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _judge_entry(error: Exception) -> BaseException:
    return _TryAgainError(error) if is_passing(error) else NotHandledError(error)


def _judge_handler(transaction: SinkTransaction, error: Exception) -> BaseException:
    if was_idle(error):
        return _too_slow()
    return _TryAgainError(error) if transaction.lost or is_conflict(error) or is_full(error) else error


def _judge_commit(error: Exception) -> BaseException:
    if was_idle(error):
        return _too_slow()
    if is_passing(error):
        return _TryAgainError(error)
    return NotHandledError(error) if isinstance(error, ReaderGroupError) else error


def _too_slow() -> TimeoutError:
    return TimeoutError(
        "the handler ran longer than idle_timeout_seconds of the sink without a statement, and the database ended its "
        "transaction; make the handler faster, or the timeout longer"
    )


def _check(returned: object) -> None:
    """End the worker before the transaction is committed, if what was returned has not run."""
    try:
        check_returned(returned, "a handler")
    except Exception as error:
        raise NotHandledError(error) from error


class SinkHandler(_Calls):
    """Calls a plain function."""

    def __call__(self, what: What, /) -> None:
        failures = 0
        while True:
            try:
                return self._attempt(what)
            except _TryAgainError as again:
                failures += 1
                if self._clock.wait(self._stopping, self._pause(what, failures, again.error)):
                    raise NotHandledError(WorkerStoppedError()) from again.error
                self._go_on()

    def _attempt(self, what: What) -> None:
        transaction = self._transaction(what)
        try:
            connection = now(transaction.begin())
        except EventStoredError:
            return
        except Exception as error:
            raise _judge_entry(error) from error
        try:
            _check(self._handle(transaction.what, connection))
        except BaseException as error:
            now(transaction.rollback())
            if isinstance(error, Exception) and (judged := _judge_handler(transaction, error)) is not error:
                raise judged from error
            raise
        try:
            now(transaction.commit())
        except EventStoredError:
            return
        except Exception as error:
            if (judged := _judge_commit(error)) is not error:
                raise judged from error
            raise


class AsyncSinkHandler(_Calls):
    """Calls an ``async def``."""

    async def __call__(self, what: What, /) -> None:
        failures = 0
        while True:
            try:
                return await self._attempt(what)
            except _TryAgainError as again:
                failures += 1
                await asyncio.sleep(self._pause(what, failures, again.error))
                if self._stopping.is_set():
                    raise NotHandledError(WorkerStoppedError()) from again.error
                self._go_on()

    async def _attempt(self, what: What) -> None:
        transaction = self._transaction(what)
        try:
            connection = await transaction.begin()
        except EventStoredError:
            return
        except Exception as error:
            raise _judge_entry(error) from error
        try:
            # The timeout is the handler's: a transaction whose commit it interrupted would be stored or not.
            _check(await attempt(lambda what: self._handle(what, connection), transaction.what, self._timeout_seconds))
        except BaseException as error:
            await transaction.rollback()
            if isinstance(error, Exception) and (judged := _judge_handler(transaction, error)) is not error:
                raise judged from error
            raise
        try:
            await transaction.commit()
        except EventStoredError:
            return
        except Exception as error:
            if (judged := _judge_commit(error)) is not error:
                raise judged from error
            raise
