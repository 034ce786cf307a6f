"""Delete streams completely, even if processes die in between.

A stream is deleted in two steps: its metadata records the deletion, then its segments are deleted. `Deletions.delete`
first adds the stream to a durable queue and then does both. Later, a process that deletes a stream checks the queue:
mostly there is nothing left to do, but if a process died between the two steps, this check completes the deletion. It
also forgets the names that were deleted long ago.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgpack

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    EventProcessor,
    EventQueue,
    NotFoundError,
    QueuedEvent,
    ReaderGroupError,
    StateSynchronizer,
    StoreFullError,
    StoreUnavailableError,
    Update,
)
from synchronizer.clock import is_manual
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.flag import Flag

from .data_segments import DataSegments, Names
from .metadata import StreamMetadata
from .name_expiry import DeletedName, NameExpiry
from .state import DeleteStream, StreamState

QUEUE: Final = "readergroup/deletions"
#: A process checks the queue at its first deletion, and again after every this many deletions.
LOOK_EVERY: Final = 50
#: How often a process checks whether the holder of the role has handled the queue.
_LOOK_SECONDS: Final = 0.5
#: How long closing waits for the stream in hand. The next check of the queue continues with it.
_CLOSE_SECONDS: Final = 5.0
#: How long a process may take from announcing a deletion to recording it in the metadata. Clocks may differ by minutes.
PATIENCE_SECONDS: Final = 3600.0
#: A deleted stream whose log has more bytes is compacted. Short logs are not: many of them are read at once.
KEPT_LOG_BYTES: Final = 1024

_logger = get_logger(__name__)


class Deletion(NamedTuple):
    """A stream that is deleted, or soon will be. ``announced_at`` is in seconds since 1970."""

    stream: str
    incarnation: str
    announced_at: float

    def encode(self) -> bytes:
        return bytes(msgpack.packb(self))

    @classmethod
    def decode(cls, data: bytes) -> Deletion:
        return cls(*msgpack.unpackb(data))


class Deletions:
    """Deletes streams, and completes the deletions in the store's queue that other clients left.

    With a manual clock nothing runs in the background: the call itself checks the queue.
    """

    def __init__(self, metadata: StreamMetadata, data: DataSegments) -> None:
        self._metadata = metadata
        self._data = data
        self._store = metadata.store
        self._clock = metadata.clock
        self._names = NameExpiry(self._store, self._clock)
        self._lock = threading.RLock()  # a check without a thread is made with the lock held
        self._stopping = Flag()
        self._queue: EventQueue | None = None
        self._thread: threading.Thread | None = None
        self._announced = 0

    def delete(self, stream: str, deadline: Deadline) -> None:
        """Delete the stream and its data, or give an incomplete copy up."""
        while True:
            try:
                synchronizer = self._metadata.existing(stream, deadline, or_being_copied=True)
            except NotFoundError as error:
                raise NotFoundError("there is no stream of this name", stream=stream) from error
            deleted = self._end(synchronizer, synchronizer.state, deadline)
            if deleted is not None:
                break
        self._metadata.let_go((stream,))
        self._delete_data(synchronizer, self._data.names(deleted, deadline), deadline)
        self._look_through()

    def note_deleted(self, log: str, length: int, deadline: Deadline) -> None:
        """Note that a group is deleted whose log has this length, so that its name is forgotten when it is time."""
        self._names.note(DeletedName(log, length, self._clock.time()), self._metadata.backoff(deadline))
        with self._lock:
            self._announced += 1
        self._look_through()

    def close(self) -> None:
        """Stop after the stream in hand. Closing twice is no error."""
        self._stopping.set()
        with self._lock:
            thread, queue = self._thread, self._queue
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
        if queue is not None:
            queue.close()

    # ------------------------------------------------------------------ one deletion

    def _end(
        self, synchronizer: StateSynchronizer[StreamState], seen: StreamState, deadline: Deadline
    ) -> StreamState | None:
        """Record the deletion in the metadata; return None if the name has another stream by now."""
        try:
            self._announce(seen.name, seen.incarnation, timeout=deadline.remaining() / 2)
        except DeadlineExceededError as error:
            if not isinstance(error.__cause__, StoreFullError):
                raise
            _logger.warning(
                "the store is full, so the deletion of stream %s is not announced: if it is interrupted, delete "
                "the stream again",
                seen.name,
            )

        def end(now: StreamState) -> tuple[Iterable[Update[StreamState]], StreamState | None]:
            if now.incarnation != seen.incarnation:
                return [], None
            return ([DeleteStream()] if now.is_in_use else []), now

        return synchronizer.update_state_returning(end, timeout=deadline.remaining())

    def _announce(self, stream: str, incarnation: str, *, timeout: float) -> None:
        """Record durably that this stream is about to be deleted."""
        with self._lock:
            self._announced += 1
        self._opened_queue().add(Deletion(stream, incarnation, self._clock.time()).encode(), timeout=timeout)

    def _opened_queue(self) -> EventQueue:
        with self._lock:
            if self._queue is None:
                self._queue = EventQueue(self._store, QUEUE, clock=self._clock, timeout=self._metadata.timeout)
            return self._queue

    def _delete_data(self, synchronizer: StateSynchronizer[StreamState], segments: Names, deadline: Deadline) -> None:
        """Delete the data of a stream whose metadata records the deletion, and note the names that this leaves."""
        length = synchronizer.applied_length  # first: a log that goes on after it is not forgotten
        log = "" if synchronizer.state.is_in_use else synchronizer.segment
        name = DeletedName(log, length, self._clock.time(), tuple(segments.data))
        is_noted = self._names.try_to_note(name)
        self._data.delete_these(segments, deadline)
        if not is_noted:  # a full store has room now
            self._names.note(name, self._metadata.backoff(deadline))
        if log:
            _shorten_log(synchronizer, deadline)

    # ------------------------------------------------------------------ what others have left

    def _look_through(self) -> None:
        """Complete the deletions that others left, in the background, if a check is due."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running or self._stopping.is_set() or self._announced % LOOK_EVERY != 1:
                return
            if is_manual(self._clock):
                self._run()
            else:
                thread = BackgroundThread(
                    self._run, name="deletions of streams", clock=self._clock, stopping=self._stopping
                )
                try:
                    thread.start()
                    self._thread = thread
                except StoreUnavailableError as error:
                    self._announced -= 1  # so that the next deletion checks the queue
                    _logger.warning("cleanup after deleted streams is delayed until the next deletion: %s", error)

    def _run(self) -> None:
        try:
            self._names.forget_expired(self._stopping, self._metadata.backoff)
            end = self._store.info(self._opened_queue().segment).length  # what is put off waits for the next check
            with EventProcessor(
                self._store,
                QUEUE,
                self._handle,
                set_aside=True,
                clock=self._clock,
                timeout=self._metadata.timeout,
                threads=False,
            ) as processor:
                while processor.handled_upto < end and not self._stopping.is_set():
                    if not processor.step():
                        if is_manual(self._clock):
                            return
                        self._clock.wait(self._stopping, _LOOK_SECONDS)
        except ReaderGroupError as error:
            _logger.warning("cleanup after deleted streams is delayed until the next deletion: %s", error)
        except Exception as error:
            survive(error, "deletions of streams")

    def _handle(self, event: QueuedEvent) -> None:
        deletion = Deletion.decode(event.data)
        is_young = self._clock.time() - deletion.announced_at < PATIENCE_SECONDS
        if not self._finish(deletion) and is_young:
            self._opened_queue().add(event.data)

    def _finish(self, deletion: Deletion) -> bool:
        """Delete the rest of the stream; return False if its metadata does not record the deletion."""
        deadline = self._metadata.deadline()
        deleted = StreamState(name=deletion.stream, incarnation=deletion.incarnation)
        with self._metadata.used(deletion.stream):
            try:
                synchronizer = self._metadata.open_fetched(deletion.stream, deadline)
            except NotFoundError:  # the name is forgotten by now
                self._data.delete_all(deleted, deadline)
                return True
        state = synchronizer.state
        if state.is_in_use and state.incarnation == deletion.incarnation:
            return False
        segments = self._data.names(deleted, deadline)
        if any(segments):
            self._delete_data(synchronizer, segments, deadline)
        elif not state.is_in_use:
            _shorten_log(synchronizer, deadline)
        return True


def _shorten_log(synchronizer: StateSynchronizer[StreamState], deadline: Deadline) -> None:
    """Drop the history of a deleted stream. Its log itself stays until its name is forgotten."""
    if not synchronizer.was_compacted and synchronizer.bytes_since_compaction <= KEPT_LOG_BYTES:
        return
    try:
        state = synchronizer.fetch_updates(timeout=deadline.remaining())
        if not state.is_in_use:  # it was not created again while its data was deleted
            synchronizer.compact(timeout=deadline.remaining(), keep_last=False)
    except ReaderGroupError as error:  # the stream is deleted all the same
        _logger.warning("compaction of %s failed: %s", synchronizer.segment, error)
