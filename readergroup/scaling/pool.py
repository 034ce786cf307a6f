"""`ReaderPool`: as many workers as a policy decides, each a reader that hands its events to the application.

The thread of `run` starts, watches and stops the workers. A notification, an ended worker, `stop` or a signal sets a
flag that this thread checks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, get_args

from synchronizer import (
    ClosedError,
    Deadline,
    HandlerError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    StoreUnavailableError,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.callables import check_callable, check_takes, is_async
from synchronizer.clock import growing_pause
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading

from ..errors import ReaderNotInGroupError
from ..group.model.config import new_reader_id
from ..group.updater import GroupUpdater
from ..streams.serializers import Serializer, check_serializer, keeps_bytes
from ..telemetry.logs import LogAbout
from ..words import count
from .handlers import ArrowHandler, Order
from .in_hand import InHand
from .policy import MAX_CONCURRENCY, ReaderScalingPolicy
from .retry import DelayedRetry, RetryPolicy
from .scaled_group import PoolClient, ScaledGroup
from .scaler import LOOK_SECONDS, Scaler
from .starting_worker import load_worker
from .worker import Task
from .worker_process import Deaths, ProcessWorker, pickled
from .worker_thread import ThreadWorker

if TYPE_CHECKING:
    from ..retries.returning import Returning
    from ..sinks.sql_sink import SqlSink

T = TypeVar("T")

DRAIN_SECONDS: Final = 25.0
#: How often the pool checks its workers if nothing wakes it.
TICK_SECONDS: Final = 0.1
#: The pause before a dead worker is replaced; it doubles with each other death in the last minute.
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 10.0
_DEATHS_SECONDS: Final = 60.0
#: How many of the events that killed a worker the pool remembers.
_MOST_REMEMBERED: Final = 1000
#: How long the pool tries to remove a dead worker from the group; after that the worker's lease expires.
_TAKE_OUT_SECONDS: Final = 2.0

_logger = get_logger(__name__)


class PoolWorker(Protocol):
    """One worker as the pool sees it. ``failure`` may be set once it is not alive."""

    reader_id: str
    stopping: bool

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def left_in_hand(self) -> Sequence[InHand]: ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def end(self) -> None: ...


class ReaderPool(Generic[T]):
    """A pool of workers that read a group. It runs once, in the thread that calls `run`. Threads may share it.

    `ReaderGroup.pool` creates it.
    """

    def __init__(
        self,
        client: PoolClient,
        group: ScaledGroup,
        updater: GroupUpdater,
        *,
        handle: Callable[..., object] | None,
        handle_batch: Callable[..., object] | None,
        handle_arrow: Callable[..., object] | None,
        columns: Sequence[str] | None = None,
        readers: int | ReaderScalingPolicy,
        workers: Literal["thread", "process"],
        retry: RetryPolicy | None,
        serializer: Serializer[T],
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
        sink: SqlSink | None = None,
    ) -> None:
        given = {"handle": handle, "handle_batch": handle_batch, "handle_arrow": handle_arrow}
        handlers = [(name, each) for name, each in given.items() if each is not None]
        if len(handlers) != 1:
            raise InvalidArgumentError(
                "pass one handler: either handle or handle_batch, or handle_arrow", group=group.name
            )
        ((name, handler),) = handlers
        check_callable(handler, "a handler", may_await=True, group=group.name)
        check_count(concurrency, "concurrency", at_most=MAX_CONCURRENCY)
        order = _checked_order(order, of_batches=handle is None)
        _check_handler_timeout(handler_timeout_seconds, handler)
        if sink is not None:
            _check_sink(sink, handler, of_batches=handle is None, at_once=concurrency > 1 and order != "segment")
        check_type(retry, RetryPolicy, "retry", or_none=True)
        if sink is not None and isinstance(retry, DelayedRetry):
            raise InvalidArgumentError(
                "a sink stores the effect of each event once, but a process that stops in the middle of a failure may "
                "handle an event and retry it later as well; use RetryPolicy, or write to the database without a sink"
            )
        _check_parameters(handler, name, group=group.name, with_connection=sink is not None)
        check_serializer(serializer)
        if handle_arrow is not None:
            if not keeps_bytes(serializer):
                raise InvalidArgumentError(
                    "handle_arrow gets the events as they were written, without a serializer; remove the serializer "
                    "and decode the column 'event'",
                    serializer=type(serializer).__name__,
                )
            with loading():
                from ..streams.data.columns import schema  # raises if pyarrow is not installed

            handle_batch = ArrowHandler.of(handle_arrow, tuple(schema(columns).names))
        elif columns is not None:
            raise InvalidArgumentError(
                "only handle_arrow gets columns; pass it as the handler, or remove columns", columns=columns
            )
        if workers not in ("thread", "process"):
            raise InvalidArgumentError("workers must be 'thread' or 'process'", workers=workers)
        if not isinstance(readers, ReaderScalingPolicy):
            check_count(readers, "readers")
            readers = ReaderScalingPolicy(min_readers=readers, max_readers=readers)
        self._client = client
        self._group = group
        self._logger = LogAbout(_logger, group=group.name)
        self._updater = updater
        self._clock = client.clock
        self._policy = readers = readers.model_copy(update={"concurrency": int(concurrency)})
        self._scaler = Scaler(group, readers)
        self._retry = retry or RetryPolicy(attempts=1)
        self._check_dead_letters()
        self.task = Task(
            client,
            group,
            handle,
            handle_batch,
            serializer,
            self._retry,
            concurrency=int(concurrency),
            order=order,
            handler_timeout_seconds=handler_timeout_seconds,
            sink=sink,
        )
        load_worker(self.task)
        self._pickled_task = pickled(self.task) if workers == "process" else None

        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._began = False
        self._is_cleaned_up = False  # `_end` has undone everything
        self._returned = Flag()  # set when `run` returns or raises
        self._thread: threading.Thread | None = None
        self._signals: dict[int, Any] = {}  # the handlers that are put back
        self._returning: Returning | None = None
        self._wake = Flag()
        self._stopping = False
        self._ended = False  # the group has reached the end of the data
        self._failure: BaseException | None = None

        # Only the running thread changes these; other threads read copies.
        self._workers: list[PoolWorker] = []
        self._desired = readers.min_readers
        self._look_at = float("-inf")
        self._deaths: deque[float] = deque()
        self._died_over: dict[InHand, int] = {}  # how many workers died over each; the latest is last
        self._start_at = float("-inf")

    def __repr__(self) -> str:
        return f"ReaderPool({self._group.name!r}, {len(self._workers)} workers)"

    # ------------------------------------------------------------------ for the application

    def run(self, drain_timeout: float = DRAIN_SECONDS) -> None:
        """Work until the group has read all data, or SIGTERM, SIGINT or `stop` arrives; then drain, and return.

        To drain, every worker finishes the events in hand and leaves the group. The pool replaces workers that die. In
        the main thread it handles signals and restores their handlers at the end; a second SIGINT interrupts the drain.

        Args:
            drain_timeout: Seconds until unfinished workers are ended. Other readers then handle their events again.
                Default: 25.

        Raises:
            HandlerError: An event could not be handled or set aside. Raised after the drain.
            InvalidArgumentError: The pool has run before.
        """
        check_duration(drain_timeout, "drain_timeout")
        thread = threading.current_thread()
        try:
            self._begin(thread)
            self._supervise()
        finally:
            if self._thread is thread:
                try:
                    self._end(drain_timeout)
                except BaseException:  # interrupted: nothing is waited for any more
                    self._end(0.0)
                    raise
                finally:  # even if that is interrupted as well; `close` then ends the rest
                    self._put_signals_back()
                    self._returned.set()
        if self._failure is not None:
            raise self._failure

    def _begin(self, thread: threading.Thread) -> None:
        with self._lock:
            if self._began:
                raise InvalidArgumentError(
                    "a pool can run only once; create another with group.pool", group=self._group.name
                )
            self._began = True
            self._thread = thread
        self._handle_signals()
        self._group.segment_notifier.register_listener(self._on_segments)
        self._group.end_of_data_notifier.register_listener(self._on_end_of_data)
        if isinstance(self._retry, DelayedRetry):
            with loading():
                from ..retries.returning import Returning
            self._returning = Returning(self._client, self._group, self._retry)
            self._returning.start()

    def _end(self, drain_timeout: float) -> None:
        """Undo what `_begin` and `_supervise` have done. An interrupted call can be repeated."""
        if self._is_cleaned_up:  # the call was refused, because the pool has run
            return
        self._drain(drain_timeout)
        if self._returning is not None:
            self._returning.close(drain_timeout)
            if isinstance(self._failure, NotFoundError):
                self._returning.clear()
        self._group.end_of_data_notifier.unregister_listener(self._on_end_of_data)
        self._group.segment_notifier.unregister_listener(self._on_segments)
        self._put_signals_back()
        self._is_cleaned_up = True
        self._returned.set()

    def stop(self) -> None:
        """Let `run` drain and return, at once if it is called later. Any thread or signal handler may call this."""
        # Only a flag: the thread that a signal interrupts may hold a lock.
        self._stopping = True

    @property
    def workers(self) -> Sequence[PoolWorker]:
        """The present workers, each with ``reader_id``, ``pid`` and a live ``alive``."""
        return tuple(self._workers)

    @property
    def desired_readers(self) -> int:
        """The number of workers that the pool should have."""
        return self._desired

    def close(self) -> None:
        """Stop, and wait for `run` to return, unless `run` itself calls this. Can be called twice.

        A handler calls `stop` instead: here it would wait for itself, until ``drain_timeout``.
        """
        if os.getpid() != self._process_id:
            return  # a forked child: the pool belongs to the parent
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._returned.wait(2 * DRAIN_SECONDS)
        if self._returned.is_set():  # perhaps interrupted before all was undone
            self._end(0.0)

    # ------------------------------------------------------------------ signals and notifications

    def _check_dead_letters(self) -> None:
        stream = self._retry.dead_letters
        if stream is None:
            return
        if stream in self._group.config.streams:
            raise InvalidArgumentError("the group would read its own dead letters; use another stream", stream=stream)
        if not self._client.streams.exists(stream):
            raise NotFoundError("the stream for dead letters does not exist; create it first", stream=stream)
        if isinstance(self._retry, DelayedRetry) and self._retry.retry_stream not in self._group.config.streams:
            raise InvalidArgumentError(
                "the group has to read the stream of retries; create it, and add it to the streams of the group with "
                "group.configure",
                stream=self._retry.retry_stream,
            )

    def _handle_signals(self) -> None:
        """Stop the pool on the first SIGTERM or SIGINT from now on, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return

        def on_signal(number: int, frame: object) -> None:
            self.stop()
            if number == signal.SIGINT:
                self._put_signal_back(number)

        self._signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in self._signals:
            signal.signal(number, on_signal)

    def _put_signals_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals:
            self._put_signal_back(number)
        self._signals = {}  # the application may set others from now on

    def _put_signal_back(self, number: int) -> None:
        handler = self._signals[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_segments(self, _: object) -> None:
        self._look_at = float("-inf")
        self._wake.set()

    def _on_end_of_data(self, _: object) -> None:
        self._ended = True
        self._wake.set()

    # ------------------------------------------------------------------ running

    def _supervise(self) -> None:
        while not self._over:
            self._decide()
            self._start_and_stop()
            self._clock.wait(self._wake, TICK_SECONDS)
            self._wake.clear()
            self._reap()

    @property
    def _over(self) -> bool:
        return self._stopping or self._ended or self._failure is not None

    def _decide(self) -> None:
        now = self._clock.monotonic()
        if self._policy.min_readers == self._policy.max_readers or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            decision = self._scaler.decide(readers=len(self._working))
        except ReaderGroupError as error:
            if not error.retryable:
                raise
            self._logger.warning(
                "the lag of %s is unknown now, so the pool keeps its size: %s", self._group.name, error
            )
            return
        if decision.desired_readers != self._desired:
            self._logger.info(
                "%s: the desired number of readers is now %d: %s",
                self._group.name,
                decision.desired_readers,
                decision.reason,
                extra={"revision": str(decision.revision)},
            )
        self._desired = decision.desired_readers

    @property
    def _working(self) -> list[PoolWorker]:
        return [worker for worker in self._workers if not worker.stopping]

    def _start_and_stop(self) -> None:
        """Start or stop workers until there are as many as desired. The newest stop first: they own the least."""
        working = self._working
        for worker in working[self._desired :]:
            worker.stop()
        if self._clock.monotonic() < self._start_at:
            return
        for _ in range(self._desired - len(working)):
            if self._over:
                return
            try:
                self._start(self._new_worker())
            except StoreUnavailableError as error:  # no thread or process is available now
                return self._start_later(f"a worker could not be started: {error}")

    def _start(self, worker: PoolWorker) -> None:
        self._workers.append(worker)  # first: its handler may interrupt this thread at once
        try:
            worker.start()
        except StoreUnavailableError:
            self._workers.remove(worker)
            raise
        place = "" if worker.pid == os.getpid() else f" as process {worker.pid}"
        self._logger.info("worker %s of %s starts%s", worker.reader_id, self._group.name, place, extra=_of(worker))

    def _new_worker(self) -> PoolWorker:
        reader_id = new_reader_id()
        if self._pickled_task is not None:
            deaths = [Deaths(*each) for each in self._died_over.items()]
            return ProcessWorker(self._pickled_task, reader_id, deaths, slots=self.task.concurrency)
        return ThreadWorker(self.task, reader_id, self._wake.set)

    def _reap(self) -> None:
        """Remove the workers that have ended, and act on the reason."""
        for worker in [worker for worker in self._workers if not worker.alive]:
            self._workers.remove(worker)
            self._judge(worker)

    def _judge(self, worker: PoolWorker) -> None:
        failure = worker.failure
        if failure is None:
            if not worker.stopping and not self._over:
                self._look_for_end()
            return
        if isinstance(failure, ClosedError) and self._stopping:
            return  # the client is closing
        if not _may_pass(failure):
            self._logger.error(
                "worker %s failed, and the pool drains: %s", worker.reader_id, failure, extra=_of(worker)
            )
            self._failure = self._failure or failure
            return
        if isinstance(failure, ChildProcessError) or not isinstance(failure, Exception):
            self._count_death(worker)
        if isinstance(worker, ProcessWorker):
            self._take_out(worker)
        died = f"worker {worker.reader_id} died: {failure if str(failure) else repr(failure)}"
        if self._over:
            self._logger.warning("%s", died, extra=_of(worker))
        else:
            self._start_later(died)

    def _look_for_end(self) -> None:
        try:
            self._ended = self._group.synchronizer.fetch_updates().end_of_data
        except ReaderGroupError as error:
            if not error.retryable:
                raise
            # The next worker ends as well if this is the end, and is looked at again.
            self._start_later(f"a worker ended, and whether all is read is unknown: {error}")

    def _start_later(self, why: str) -> None:
        now = self._clock.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _DEATHS_SECONDS:
            self._deaths.popleft()
        pause = growing_pause(len(self._deaths), first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._start_at = now + pause
        self._logger.warning("the next worker starts in %.3g s: %s", pause, why)

    def _count_death(self, worker: PoolWorker) -> None:
        """Tell all workers which events this one died over, before one of them gets these events."""
        for what in worker.left_in_hand:
            deaths = self._died_over.pop(what, 0) + 1
            self._died_over[what] = deaths
            self._logger.warning(
                "worker %s died while it handled %s; deaths at %s so far: %d",
                worker.reader_id,
                f"one of the events from {what.pointer} to offset {what.end}" if what.end else what.pointer,
                "one of them" if what.end else "this event",
                deaths,
                extra={**_of(worker), "segment": what.segment},
            )
            for other in self._workers:
                if isinstance(other, ProcessWorker):
                    other.tell(Deaths(what, deaths))
        while len(self._died_over) > max(_MOST_REMEMBERED, 10 * self.task.concurrency):
            del self._died_over[next(iter(self._died_over))]

    def _take_out(self, worker: ProcessWorker) -> None:
        """Release the segments of a dead worker process at once: no other process can continue as this reader."""
        try:
            self._updater.remove_reader(
                worker.reader_id, reached=worker.reached, cause="dead", timeout=_TAKE_OUT_SECONDS
            )
            self._updater.counters.readers_declared_dead += 1
        except ReaderGroupError as error:
            self._logger.info(
                "worker %s is removed when its lease expires: %s", worker.reader_id, error, extra=_of(worker)
            )

    # ------------------------------------------------------------------ the end

    def _drain(self, timeout: float) -> None:
        """Let the workers finish and leave within ``timeout`` seconds; then end the rest."""
        deadline = Deadline(self._clock, timeout)
        self._logger.info("the pool of %s drains %s", self._group.name, count(len(self._workers), "worker"))
        try:
            for worker in self._workers:
                worker.stop()
            while self._workers and not deadline.passed:
                self._clock.wait(self._wake, deadline.remaining(TICK_SECONDS))
                self._wake.clear()
                self._reap()
        finally:
            with ExitStack() as ending:  # ends every worker, even if an interrupt hits while ending another
                patience = f" within {timeout:.3g} s" if deadline.passed else ", and the drain was interrupted"
                for worker in self._workers:
                    self._logger.warning(
                        "worker %s did not finish%s; it %s, and others take over its segments",
                        *(worker.reader_id, patience),
                        "is terminated"
                        if isinstance(worker, ProcessWorker)
                        else "leaves the group before its handler returns",
                        extra=_of(worker),
                    )
                    if isinstance(worker, ProcessWorker):
                        ending.callback(self._take_out, worker)  # runs after `worker.end`
                    ending.callback(worker.end)
                self._workers = []


def _of(worker: PoolWorker) -> dict[str, str]:
    return {"reader": worker.reader_id}


def _checked_order(order: Order | None, *, of_batches: bool) -> Order:
    if order is None:
        return "segment" if of_batches else "key"
    if order not in get_args(Order):
        raise InvalidArgumentError("order must be 'key', 'segment' or 'none'", order=order)
    if order == "key" and of_batches:
        raise InvalidArgumentError(
            "a batch holds events of many keys, so batches of a segment cannot run at once in the order of keys; use "
            "order='segment', or handle instead of handle_batch",
            order=order,
        )
    return order


def _check_parameters(handler: Callable[..., object], name: str, *, group: str, with_connection: bool) -> None:
    what = "event" if name == "handle" else "batch"
    if with_connection:
        check_takes(
            handler, name, f"{what}, connection", advice=", because the sink passes its connection", group=group
        )
    else:
        check_takes(handler, name, what, advice=", or pass a sink if it needs a connection", group=group)


def _check_sink(sink: object, handler: object, *, of_batches: bool, at_once: bool) -> None:
    with loading():
        from ..sinks.sql_sink import SqlSink

    check_type(sink, SqlSink, "sink")
    assert isinstance(sink, SqlSink)
    if is_async(handler) and not sink.is_async:
        raise InvalidArgumentError(
            "an async def handler needs a sink with an asynchronous database, because another one would stop the event "
            "loop; use an AsyncEngine, or an asynchronous connection or pool of psycopg",
            sink=repr(sink),
        )
    if sink.is_async and not is_async(handler):
        raise InvalidArgumentError(
            "the sink has an asynchronous database, which a plain function cannot use; pass an async def, or give the "
            "sink a database that is not asynchronous",
            sink=repr(sink),
        )
    if of_batches and at_once:
        raise InvalidArgumentError(
            "a sink stores the batches of a segment one after the other; use order='segment', or handle instead of "
            "handle_batch"
        )


def _check_handler_timeout(seconds: float | None, handler: object) -> None:
    check_duration(seconds, "handler_timeout_seconds", above_zero=True, or_none=True)
    if seconds is not None and not is_async(handler):
        raise InvalidArgumentError(
            "handler_timeout_seconds needs an async def as handler, because a plain function in a thread cannot be "
            "cancelled; let the function limit its own calls",
            handler_timeout_seconds=seconds,
        )


def _may_pass(failure: BaseException) -> bool:
    """Whether another worker may succeed: a process was killed, a store is away, or a reader was removed."""
    if isinstance(failure, HandlerError | ClosedError):
        return False
    if isinstance(failure, ReaderGroupError):
        return failure.retryable or isinstance(failure, ReaderNotInGroupError)
    return isinstance(failure, ChildProcessError) or not isinstance(failure, Exception)
