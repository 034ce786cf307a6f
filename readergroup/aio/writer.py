"""Writers and transactions on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from synchronizer import ClosedError, DeadlineExceededError, ReaderGroupError
from synchronizer.arguments import check_duration
from synchronizer.loggers import get_logger

from ..closable import noted
from ..streams.data.block import MAX_EVENT_BYTES, Headers
from ..streams.transactions.transaction import Transaction as SyncTransaction
from ..streams.writing.writer import EventWriter as SyncWriter
from .calls import Calls, deadline_after, remaining, retrieve
from .facade import ClosableFacade, Opening, Plain

T = TypeVar("T")

#: How much longer than its timeout a call waits for a flush, whose error says more than that it takes long.
_ANSWER_SECONDS: Final = 0.5

_logger = get_logger(__name__)


class EventWriter(ClosableFacade[SyncWriter[T]], Generic[T]):
    """Writes events to a stream. Tasks may share it. An async context manager that stores everything at its end."""

    def __init__(self, wrapped: SyncWriter[T], calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self._room = asyncio.Lock()  # first come, first served
        self._news = calls.news()  # rings when the writer or the client is closed
        self._thread = calls.single(f"writer on {wrapped.stream}")  # for what waits for room, or for your events
        self._waiting: asyncio.Future[None] | None = None  # for room, in a thread
        self._flushing: asyncio.Task[None] | None = None
        self._next_flush: asyncio.Task[None] | None = None

    stream = Plain(lambda writer: str(writer.stream))
    timeout = Plain(lambda writer: float(writer.timeout))
    max_event_bytes = Plain(lambda writer: int(writer.max_event_bytes))

    @property
    def failure(self) -> ReaderGroupError | None:
        """Why the writer takes no more events for good; None while it does, or if it was closed without an error."""
        return self._wrapped.failure

    async def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
        wait: bool = False,
    ) -> None:
        """Write one event, in the background. Events of one routing key are read in the order of their writes.

        Returns at once while there is room, and otherwise waits in order of arrival. If the call raises before the
        event is written, or is cancelled while it waits for room, the event is not written. A writer of events over
        8 MiB writes in a thread, where a cancelled call goes on.

        Args:
            event: A value that the serializer takes, at most 8 MiB, or ``max_event_bytes``, with its headers. It is
                serialized on the loop, unless the writer takes events over 8 MiB.
            routing_key: Selects the segment; at most 4096 characters. Default: none; the event goes to any segment.
            headers: Stored with the event.
            event_time: When it happened, with a timezone. Default: none.
            wait: Return when the event is durable. Calls that wait at the same time share commits. If such a call
                raises or is cancelled, the event may be stored later.

        Raises:
            ReaderGroupError: As `EventWriter.write`, and with ``wait`` as `flush`.
        """
        write = partial(self._wrapped.write, event, routing_key, headers, event_time=event_time)
        if self._wrapped.max_event_bytes > MAX_EVENT_BYTES:  # it may wait for the store
            await self._write_in_thread(write, wait)
        else:
            await self._write(write, wait)

    async def write_many(
        self,
        events: Iterable[T],
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
        wait: bool = False,
    ) -> None:
        """Write these events together: all are stored or none, with no other event between them.

        Args:
            events: Values that the serializer takes, at most 8 MiB together, with the headers of each.
            routing_key: The key of each of them.
            headers: The headers of each of them.
            event_time: When each of them happened, with a timezone. Default: none.
            wait: As of `write`.

        Raises:
            ReaderGroupError: As `write`.
        """
        write = partial(self._wrapped.write_many, events, routing_key, headers, event_time=event_time)
        await self._write(write, wait)

    def note_time(self, time: datetime) -> None:
        """Note that no event written from now on has an event time before ``time``. See `EventWriter.note_time`.

        Args:
            time: With a timezone.
        """
        self._wrapped.note_time(time)

    async def write_batch(
        self, events: Iterable[T], routing_keys: Iterable[str | None] | None = None, *, wait: bool = False
    ) -> None:
        """Write many events at once, as one `write` for each in this order, in a thread.

        A call that is cancelled while it waits for other tasks has written nothing. After that it goes on in its
        thread: later calls of the writer, and closing the client, wait for it, and an error of it is logged.

        Args:
            events: Values that the serializer takes, each at most 8 MiB. They are serialized in the thread.
            routing_keys: As many keys, or None for an event without one. Default: no event has a key.
            wait: As of `write`.

        Raises:
            ReaderGroupError: As `EventWriter.write_batch`, and with ``wait`` as `flush`.
        """
        await self._write_in_thread(partial(self._wrapped.write_batch, events, routing_keys), wait)

    async def write_arrow(
        self,
        table: object,
        *,
        data: str,
        routing_key: str | None = None,
        headers: str | None = None,
        wait: bool = False,
    ) -> None:
        """Write the rows of a table, as one `write` for each in their order, in a thread.

        A cancelled call goes on as one of `write_batch`.

        Args:
            table: As of `EventWriter.write_arrow`, with the columns that the other arguments name.
            data: The column with the events.
            routing_key: The column with the routing keys. Default: no event has a key.
            headers: The column with the headers. Default: no event has headers.
            wait: As of `write`.

        Raises:
            ReaderGroupError: As `EventWriter.write_arrow`, and with ``wait`` as `flush`.
        """
        write = partial(self._wrapped.write_arrow, table, data=data, routing_key=routing_key, headers=headers)
        await self._write_in_thread(write, wait)

    async def _write_in_thread(self, write: Callable[[], None], wait: bool) -> None:
        """Call ``write``, which waits for room itself, in a thread. The calls of several tasks take turns."""
        deadline = deadline_after(self.timeout)
        end = self._wrapped.begin_write()  # later events wait, which keeps the order of the calls
        try:
            await self._take_turn(deadline)
        except BaseException:
            end()
            raise

        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                if loop.is_closed():  # no task hears of it
                    self._log_error(error)
                raise
            finally:
                end()

        try:
            writing = self._thread.start(run, is_certain=True)
        except BaseException:
            end()
            self._room.release()
            raise
        writing.add_done_callback(lambda _: self._room.release())  # not before, also if this task is cancelled
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            writing.add_done_callback(self._log_failure)  # no task asks for it any more
            raise
        writing.result()
        if wait:
            await self._stored(deadline)

    def _log_failure(self, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            self._log_error(error)

    def _log_error(self, error: BaseException) -> None:
        _logger.warning("a cancelled call that wrote to %s in its thread failed: %s", self.stream, error)

    async def _write(self, write: Callable[[], None], wait: bool) -> None:
        writer = self._wrapped
        if writer.has_room and not writer.begun_writes:
            write()
            if not wait:
                return
            deadline = deadline_after(self.timeout)
        else:
            deadline = deadline_after(self.timeout)
            end = writer.begin_write()
            try:
                await self._take_turn(deadline)  # one task of the writer waits in a thread
                try:
                    while not writer.has_room and writer.failure is None:
                        await self._wait_for_room(deadline)
                    write()
                finally:
                    self._room.release()
            finally:
                end()
        if wait:
            await self._stored(deadline)

    async def _take_turn(self, deadline: float) -> None:
        self._calls.check_open()
        try:
            async with self._news.limit(deadline):
                await self._room.acquire()
        except TimeoutError:
            self._check_open(deadline)
            self._wrapped.wait_for_room(timeout=0.0)  # raises what is to be said, unless there is room by now
            raise DeadlineExceededError(
                "other tasks waited for room first; this call wrote nothing, repeat it", stream=self.stream
            ) from None

    async def _in_turn(self, timeout: float | None) -> float | None:
        """Wait until the earlier writes have written, also a cancelled one that goes on in its thread.

        Returns:
            What is left of ``timeout``.

        Raises:
            DeadlineExceededError: They take longer.
        """
        check_duration(timeout, "timeout", or_none=True)
        self._calls.check_open()
        if not self._wrapped.begun_writes or self.failure is not None:
            return timeout
        deadline = deadline_after(self.timeout if timeout is None else timeout)
        if not await self._is_turn_by(deadline):
            self._check_open(deadline)
            self._wrapped.flush(timeout=0.0)  # raises what is to be said, unless all that is written is stored
            raise DeadlineExceededError(
                "an earlier write of many events, perhaps a cancelled one, still runs in its thread; repeat this call",
                stream=self.stream,
            )
        return remaining(deadline)

    async def _is_turn_by(self, deadline: float) -> bool:
        """Return whether all writes called before have written by the deadline, before the writer was closed."""
        try:
            async with self._news.limit(deadline), self._room:
                return True
        except TimeoutError:
            return False

    def _check_open(self, deadline: float) -> None:
        """Raise the error of a call whose wait was ended before the deadline."""
        self._calls.check_open()
        if remaining(deadline):
            self._wrapped.flush(timeout=0.0)

    async def _wait_for_room(self, deadline: float) -> None:
        """Wait for room, or for the end of a wait that a cancelled call has left in its thread."""
        own = None
        if self._waiting is None:
            wait = partial(self._wrapped.wait_for_room, timeout=remaining(deadline))
            self._waiting = own = self._thread.start(wait)
        await asyncio.wait([self._waiting])
        self._waiting = None
        if own is not None:
            own.result()

    async def _stored(self, deadline: float) -> None:
        """Return when all events written before are stored, by one flush for all calls that wait."""
        while True:
            if self._next_flush is None or self._next_flush.done():
                self._next_flush = asyncio.create_task(self._flush_after(self._flushing))
                self._next_flush.add_done_callback(retrieve)
            flush = self._next_flush
            timeout = None if deadline == float("inf") else remaining(deadline) + _ANSWER_SECONDS
            await asyncio.wait([flush], timeout=timeout)
            if not flush.done():
                raise DeadlineExceededError(
                    "the events are not stored yet, and may be later; the writer continues, and you can flush",
                    stream=self.stream,
                )
            if not flush.cancelled():  # as by a program that cancels all its tasks
                return flush.result()

    async def _flush_after(self, running: asyncio.Task[None] | None) -> None:
        """Flush once for all calls that wait when it begins: those that come later wait for the next one."""
        if running is not None:
            await asyncio.wait([running])
        await asyncio.sleep(0)  # other tasks that are ready write first
        self._flushing, self._next_flush = self._next_flush, None
        await self._calls.run(self._wrapped.flush)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Return when all events written before are stored, also those of a cancelled `write_batch`.

        Args:
            timeout: Seconds to wait. Default: the writer's.

        Raises:
            DeadlineExceededError: It takes longer. The writer continues, and you can flush again.
        """
        left = await self._in_turn(timeout)
        await self._calls.run(partial(self._wrapped.flush, timeout=left))

    def transaction(self) -> Opening[Transaction[T]]:
        """Begin a transaction: ``async with writer.transaction() as txn: await txn.write(...)`` stores all or none."""
        return Opening(self._transaction)

    async def _transaction(self) -> Transaction[T]:
        transaction: Transaction[T] = Transaction(self._calls, self._wrapped.stream, self._in_turn)
        return await transaction.begin(self._wrapped)

    async def close(self, *, timeout: float | None = None) -> None:
        """Store all events and close the writer. Closing twice is no error. A cancelled call goes on.

        Waits for a cancelled `write_batch` that goes on in its thread.

        Args:
            timeout: Seconds to wait; then events that are not stored are given up. Default: the writer's.

        Raises:
            DeadlineExceededError: Some events were not stored in time.
            OutcomeUnknownError: Some events were sent without an answer and may be stored.
        """
        check_duration(timeout, "timeout", or_none=True)
        deadline = deadline_after(self.timeout if timeout is None else timeout)
        if self._wrapped.has_ended:
            return
        has_failed = self.failure is not None
        if self._wrapped.begun_writes and not has_failed and not self._calls.closed:
            try:
                await self._is_turn_by(deadline)
            except asyncio.CancelledError:
                self._calls.start(partial(self._close, remaining(deadline)))
                raise
        await self._calls.end_by(deadline, self._close)
        if not has_failed and self.failure is not None:  # another close was told meanwhile
            self._wrapped.flush(timeout=0.0)  # raises it

    def _close(self, timeout: float) -> None:
        """Close the writer, and end the calls that wait behind a write which has not ended. Runs in a thread."""
        try:
            self._wrapped.close(timeout=timeout)
        finally:
            self._news.ring()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with noted(error, "Closing the writer"):
            await self.close()


class Transaction(Generic[T]):
    """The events of one writer that are stored all or not at all. It has a thread of its own.

    Leaving the block commits; an exception, or a cancellation, aborts.
    """

    def __init__(self, calls: Calls, stream: str, in_turn: Callable[[float | None], Awaitable[float | None]]) -> None:
        self.stream = stream
        self._calls = calls
        self._in_turn = in_turn
        self._is_over = False
        self._thread = calls.single(f"transaction on {stream}", is_same=True)

    async def begin(self, writer: SyncWriter[T]) -> Self:
        try:
            self._transaction: SyncTransaction[T] = await self._thread.call(
                writer.transaction, undo=lambda transaction: transaction.abort()
            )
        except BaseException:
            self._thread.close()
            raise
        return self

    async def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
    ) -> None:
        """Write one event of the transaction, as `EventWriter.write`. It enters the stream at the commit."""
        write = partial(self._transaction.write, event, routing_key, headers, event_time=event_time)
        await self._thread.call(write)

    async def write_batch(self, events: Iterable[T], routing_keys: Iterable[str | None] | None = None) -> None:
        """Write many events of the transaction at once, as `EventWriter.write_batch`."""
        await self._thread.call(partial(self._transaction.write_batch, events, routing_keys))

    async def write_arrow(
        self, table: object, *, data: str, routing_key: str | None = None, headers: str | None = None
    ) -> None:
        """Write the rows of a table in the transaction, as `EventWriter.write_arrow`."""
        write = partial(self._transaction.write_arrow, table, data=data, routing_key=routing_key, headers=headers)
        await self._thread.call(write)

    async def commit(self, *, timeout: float | None = None) -> None:
        """Put the events into the stream, and return when they are there. Committing twice is no error.

        They come after those of a cancelled `EventWriter.write_batch`. A cancelled call of this method goes on in its
        thread: the events may enter the stream.

        Args:
            timeout: Seconds to wait. Default: the writer's.

        Raises:
            ReaderGroupError: As `Transaction.commit`.
        """
        left = timeout if self._is_over else await self._in_turn(timeout)
        self._is_over = True  # from here on, also if this call is cancelled
        await self._thread.call(partial(self._transaction.commit, timeout=left), is_certain=True)

    async def abort(self) -> None:
        """Give up the events. Aborting twice is no error. A committed transaction raises `InvalidArgumentError`."""
        await self._thread.call(self._transaction.abort, is_certain=True)
        self._is_over = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                if error is None and not self._is_over:
                    await self._in_turn(None)
            except BaseException as late:  # also a cancellation: nothing was committed
                await self._exit(type(late), late, late.__traceback__)
                raise
            await self._exit(kind, error, traceback)
        except ClosedError:  # the client was closed, which aborts
            if error is None:
                raise
        finally:
            self._thread.close()

    async def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._thread.call(partial(self._transaction.__exit__, kind, error, traceback), is_certain=True)

    def __repr__(self) -> str:
        return f"aio.Transaction({self.stream!r})"
