"""A reader on the event loop.

A thread of the reader fetches a batch, and the next one while the application handles the first. Handing out an event
takes no hop between threads: a look at the lease and at whether the group has news, as in `Reader.__iter__`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from synchronizer import ClosedError, InvalidArgumentError, ReaderGroupError
from synchronizer.arguments import check_count, check_type
from synchronizer.callables import check_callable
from synchronizer.threads.loading import loading

from ..errors import EndOfDataError
from ..forms import refuses_plain
from ..group.prefetching import InterruptibleDeadline, PrefetchingReader
from ..group.reader import ARROW_BYTES, EVENTS_AHEAD
from ..group.reader_group import ReaderGroup
from ..group.time_windows import TimeWindow
from ..scaling.awaiting import run_on
from ..streams.config import SegmentId
from ..streams.event import Event, EventBatch, Position
from ..streams.serializers import Serializer
from .calls import Calls, close_threads
from .facade import Plain

if TYPE_CHECKING:
    import pyarrow

    from ..group.following import Claims
    from ..sinks.sql_sink import SqlSink
    from ..telemetry.counters import GroupCounters

T = TypeVar("T")

#: A smaller batch is handled sooner than the next one is prefetched.
_PREFETCH_FROM_EVENTS: Final = 16


class Callbacks:
    """Runs the callbacks of a reader on the loop, while a task awaits a read of it. Its thread waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """During the block a task awaits a read."""
        self._reading.set()
        try:
            yield
        finally:
            self._reading.clear()

    def of(self, callback: Callable[[T], object] | None, what: str, argument: str) -> Callable[[T], None] | None:
        """Return the function for the reading thread, which calls ``what(argument)``."""
        if callback is None:
            return None
        check_callable(callback, what, may_await=True, takes=argument)
        called = callback

        def call(argument: T) -> None:
            try:
                run_on(self._loop, self._call(called, argument))
            except CancelledError:
                if not self._closed:
                    raise RuntimeError(f"{what} was cancelled, and the reader was not closed") from None
                raise ClosedError("the reader was closed before its callback returned") from None

        return call

    async def _call(self, callback: Callable[[T], object], argument: T) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._closed:
            raise asyncio.CancelledError
        self._running.add(task)
        try:
            await self._reading.wait()
            returned = callback(argument)
            if inspect.isawaitable(returned):
                await returned
        finally:
            self._running.discard(task)

    def close(self) -> None:
        self._closed = True
        for task in self._running:
            if task is not asyncio.current_task():
                task.cancel()


@refuses_plain
class Reader(Generic[T]):
    """One reader of a group, for one task at a time. An async context manager, and iterable with ``async for``.

    An event or a batch is processed when you ask for the next one, or leave the block without an exception. An event
    that was prefetched, or fetched for a read that was cancelled, is not: it comes at the next read.
    """

    def __init__(self, reader: PrefetchingReader[T], calls: Calls, callbacks: Callbacks) -> None:
        self._wrapped = reader
        self._calls = calls
        self._callbacks = callbacks
        self._thread = calls.single(f"reader {reader.reader_id}")
        self._fetching: asyncio.Future[bool] | None = None
        self._deadline: InterruptibleDeadline | None = None
        self._is_awaited = False

    reader_id = Plain(lambda reader: str(reader.reader_id))

    # ------------------------------------------------------------------ reading

    async def read(self, timeout: float | None = None) -> Event[T] | None:
        """Return the next event, or None if none came in time or the reader was stopped.

        A cancelled call loses no event.

        Args:
            timeout: Seconds to wait; 0 does not wait. Default: the client's.

        Raises:
            ReaderGroupError: As `Reader.read`.
        """
        reader = self._wrapped
        with self._in_read():
            deadline = self._new_deadline(timeout)
            while not reader.stopped:
                if self._fetching is None and (event := reader.next_event()) is not None:
                    return event
                if await self._next_batch(EVENTS_AHEAD, deadline) is None:
                    break
            return None

    async def read_batch(self, max_events: int = 1000, timeout: float | None = None) -> EventBatch[T]:
        """Return the next events of one segment, or an empty batch if none came in time. A cancelled call loses none.

        Args:
            max_events: The most events in the batch, at least 1.
            timeout: Seconds to wait; 0 does not wait. Default: the client's.

        Raises:
            ReaderGroupError: As `Reader.read`.
        """
        check_count(max_events, "max_events")
        with self._in_read():
            batch = await self._next_batch(max_events, self._new_deadline(timeout))
            if batch is None:
                return self._wrapped.empty_batch()
            self._wrapped.hand_out_all(batch)
            return batch

    async def read_arrow(
        self, max_bytes: int = ARROW_BYTES, timeout: float | None = None, *, columns: Sequence[str] | None = None
    ) -> pyarrow.RecordBatch:
        """Return the next events of one segment as an Arrow record batch; one without rows if none came in time.

        The events are processed, and committed, as those of `read_batch`. A cancelled call loses none.

        Args:
            max_bytes: The most bytes that the events take in the store. A single event may have more. Default: 1 MiB.
            timeout: Seconds to wait; 0 does not wait. Default: the client's.
            columns: As of `EventBatch.to_arrow`.

        Raises:
            UnsupportedError: pyarrow is not installed.
            InvalidArgumentError: A column is unknown or named twice, or there is none.
            ReaderGroupError: As `Reader.read`.
        """
        check_count(max_bytes, "max_bytes")
        with loading():
            from ..streams.data.columns import record_batch, schema

        wanted = schema(columns)
        with self._in_read():
            batch = await self._next_batch(sys.maxsize, self._new_deadline(timeout), max_bytes)
            if batch is None:
                return record_batch((), SegmentId(""), wanted)
            arrow = batch.to_arrow(columns)  # if it fails, the events are read again
            self._wrapped.hand_out_all(batch)
            return arrow

    async def batches(self, max_events: int = 1000) -> AsyncIterator[EventBatch[T]]:
        """Iterate over batches of at most ``max_events``, waiting for more, until the end of the data or `stop`."""
        check_count(max_events, "max_events")
        self._wrapped.check()
        while not self._wrapped.stopped:
            try:
                batch = await self.read_batch(max_events)
            except EndOfDataError:
                return
            if batch:
                yield batch

    def __aiter__(self) -> AsyncIterator[Event[T]]:
        """Iterate over events, waiting for more, until the end of the data or `stop`.

        Lets other tasks of the loop run at least once in a millisecond, between two events.
        """
        self._wrapped.check()
        return self._wrapped.events(self._next_of_events)

    async def _next_of_events(self) -> EventBatch[T] | None:
        with self._in_read():
            return await self._next_batch(EVENTS_AHEAD, self._new_deadline(None))

    def stop(self) -> None:
        """End the iteration after the event in hand. May be called from any thread or a signal handler."""
        self._wrapped.stop()

    # ------------------------------------------------------------------ positions

    async def commit(self, event: Event[T] | None = None, *, timeout: float | None = None) -> None:
        """Store durably that the events handed out so far are processed.

        Args:
            event: Commit only this event and those before it in its segment. Default: all that were handed out.
            timeout: Seconds to wait for the store. Default: the client's.

        Raises:
            ReaderGroupError: As `Reader.commit`.
        """
        deadline = self._new_deadline(timeout)
        self._wrapped.note_processed(event)
        await self._calls.run(partial(self._wrapped.store_positions, deadline), is_certain=True)

    async def time_window(self, stream: str, *, timeout: float | None = None) -> TimeWindow:
        """Return where the group stands in the event time of a stream. See `Reader.time_window`."""
        return await self._calls.run(partial(self._wrapped.time_window, stream, timeout=timeout))

    def position(self) -> Position:
        """Return the reader's offset in each of its segments; all events before it are processed."""
        return self._wrapped.position()

    @property
    def assigned_segments(self) -> Collection[SegmentId]:
        """The segments whose events the reader hands out now."""
        return self._wrapped.assigned_segments

    def go_on(self) -> None:
        """Restart the clock of ``max_processing_seconds``, for an application that still works on an event."""
        self._wrapped.go_on()

    # ------------------------------------------------------------------ leaving

    async def close(self, *, at: Position | None = None) -> None:
        """Leave the group. Other readers continue at once. Closing twice is no error.

        Args:
            at: Where other readers continue, instead of where this reader stands.
        """
        self.stop()
        self._callbacks.close()
        if self._deadline is not None:
            self._deadline.interrupt()
        try:
            await self._calls.end(partial(self._wrapped.close, at=at))
        finally:
            self._thread.close()
        if self._fetching is not None and not self._is_awaited:
            await asyncio.wait([self._fetching], timeout=_END_SECONDS)
        await close_threads([self._thread])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._wrapped.finish()
        try:
            await self.close()
        except ReaderGroupError:
            if kind is None:
                raise

    def __repr__(self) -> str:
        return f"aio.{self._wrapped!r}"

    # ------------------------------------------------------------------ one step of reading

    def _new_deadline(self, timeout: float | None) -> InterruptibleDeadline:
        return self._wrapped.new_deadline(timeout)

    @contextmanager
    def _in_read(self) -> Iterator[None]:
        self._wrapped.check()
        if self._is_awaited:
            raise InvalidArgumentError(
                "another task reads with this reader; open one reader per task", reader=self._wrapped.reader_id
            )
        self._is_awaited = True
        try:
            with self._callbacks.allowed():
                yield
        finally:
            self._is_awaited = False

    async def _next_batch(
        self, max_events: int, deadline: InterruptibleDeadline, max_bytes: int | None = None
    ) -> EventBatch[T] | None:
        """Return the next batch, in hand with none of it handed out; None at the deadline, or if stopped."""
        while not self._wrapped.stopped:
            if self._fetching is None and (batch := self._wrapped.take_in_hand(max_events, max_bytes)) is not None:
                self._prefetch(max_events, max_bytes, batch)
                return batch
            if not await self._fetch(max_events, deadline, max_bytes):
                break
        return None

    async def _fetch(self, max_events: int, deadline: InterruptibleDeadline, max_bytes: int | None) -> bool:
        """Let the thread take a batch in hand; return whether there may be one."""
        if self._fetching is None:
            self._deadline = deadline
            self._fetching = self._thread.start(partial(self._wrapped.fetch, max_events, deadline, max_bytes))
        fetching, is_own = self._fetching, self._deadline is deadline
        try:
            # Neither a cancellation nor a deadline ends it: the next read gets its outcome.
            await asyncio.wait([fetching], timeout=None if is_own else deadline.remaining())
        except asyncio.CancelledError:
            if self._deadline is not None:
                self._deadline.interrupt()
            raise
        if not fetching.done():
            return False
        self._fetching = self._deadline = None
        return fetching.result() or (not is_own and not deadline.passed)

    def _prefetch(self, max_events: int, max_bytes: int | None, batch: EventBatch[T]) -> None:
        if len(batch) >= min(_PREFETCH_FROM_EVENTS, max_events):
            self._thread.run(partial(self._wrapped.prefetch, max_events, max_bytes))


#: How long closing waits for the reading thread.
_END_SECONDS: Final = 1.0


async def open_reader(
    group: ReaderGroup,
    calls: Calls,
    reader_id: str | None,
    *,
    serializer: Serializer[T] | None,
    auto_commit: bool,
    on_assign: Callable[[SegmentId], object] | None,
    on_release: Callable[[SegmentId], object] | None,
    on_checkpoint: Callable[[str], object] | None,
    sink: SqlSink | None,
) -> Reader[T]:
    callbacks = Callbacks()
    open = partial(
        group.open_reader,
        PrefetchingReader[T],
        reader_id,
        serializer=serializer,
        auto_commit=auto_commit,
        on_assign=callbacks.of(on_assign, "on_assign", "segment"),
        on_release=callbacks.of(on_release, "on_release", "segment"),
        on_checkpoint=callbacks.of(on_checkpoint, "on_checkpoint", "checkpoint"),
        claims=None if sink is None else _claims(sink, group.counters),
    )
    reader = await calls.run(open, undo=lambda reader: reader.close())
    return Reader(reader, calls, callbacks)


def _claims(sink: SqlSink, counters: GroupCounters) -> Claims:
    """Return what takes over segments in the sink's database, on this event loop."""
    with loading():
        from ..sinks.calls import SinkCalls
        from ..sinks.sql_sink import SqlSink

    check_type(sink, SqlSink, "sink")
    loop = asyncio.get_running_loop()

    return SinkCalls(sink, counters, partial(run_on, loop))
