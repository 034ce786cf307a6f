"""Deleting streams, with all that they leave behind, whoever dies.

A stream is deleted in two steps: its metadata says so, and then its segments go. `Deletions.delete` does both, and
before them puts the stream into a durable queue. What is in there is looked at again, later, by a process that deletes
a stream: mostly there is nothing left to do. If somebody died between the two steps, this is where it is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgpack

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    EventProcessor,
    EventQueue,
    Flag,
    QueuedEvent,
    ReaderGroupError,
    StateSynchronizer,
    StoreFullError,
    StoreUnavailableError,
    Update,
)
from synchronizer.clock import is_manual
from synchronizer.threads.background import BackgroundThread, survive

from .data_segments import DataSegments
from .metadata import StreamMetadata
from .state import DeleteStream, StreamState

QUEUE: Final = "readergroup/deletions"
#: A process looks through the queue with its first deletion, and every so many.
LOOK_EVERY: Final = 50
#: How often it is looked whether another process, which holds the role, has gone through the queue.
_LOOK_SECONDS: Final = 0.5
#: How long closing waits for the stream in hand; the next one who looks goes on with it.
_CLOSE_SECONDS: Final = 5.0
#: How long somebody who has announced a deletion may take to put it into the metadata. Clocks may differ by minutes.
PATIENCE_SECONDS: Final = 3600.0

_logger = logging.getLogger(__name__)


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
    """Deletes streams, and looks through the queue of the store for what other clients have left.

    With a clock that is moved by hand nothing runs in the background, and the queue is looked through in the call.
    """

    def __init__(self, metadata: StreamMetadata, data: DataSegments) -> None:
        self._metadata = metadata
        self._data = data
        self._store = metadata.store
        self._clock = metadata.clock
        self._lock = threading.Lock()
        self._stopping = Flag()
        self._queue: EventQueue | None = None
        self._thread: threading.Thread | None = None
        self._announced = 0

    def delete(self, stream: str, deadline: Deadline) -> None:
        """Delete the stream and its data; a copy that is not whole yet is given up."""
        while True:
            synchronizer = self._metadata.existing(stream, deadline, or_being_copied=True)
            deleted = self._end(synchronizer, synchronizer.state, deadline)
            if deleted is not None:
                break
        self._data.delete_all(deleted, deadline)
        self._look_through()

    def close(self) -> None:
        """Stop after the stream in hand. Twice is no error."""
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
        """Let the metadata say that the stream is deleted; None if there is another one of the name by now."""
        try:
            self._announce(seen.name, seen.incarnation, timeout=deadline.remaining() / 2)
        except DeadlineExceededError as error:
            if not isinstance(error.__cause__, StoreFullError):
                raise
            _logger.warning(
                "the store is full, so the deletion of stream %s is not announced: if it is cut off, delete again",
                seen.name,
            )

        def end(now: StreamState) -> tuple[Iterable[Update[StreamState]], StreamState | None]:
            if now.incarnation != seen.incarnation:
                return [], None
            return ([DeleteStream()] if now.exists or now.is_being_copied else []), now

        return synchronizer.update_state_returning(end, timeout=deadline.remaining())

    def _announce(self, stream: str, incarnation: str, *, timeout: float) -> None:
        """Remember, durably, that this stream is about to be deleted."""
        with self._lock:
            self._announced += 1
            if self._queue is None:
                self._queue = EventQueue(self._store, QUEUE, clock=self._clock, timeout=self._metadata.timeout)
        self._queue.add(Deletion(stream, incarnation, self._clock.time()).encode(), timeout=timeout)

    # ------------------------------------------------------------------ what others have left

    def _look_through(self) -> None:
        """Finish what others have left, in the background, if it is time to look for it."""
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
                    self._announced -= 1  # so that it is time at the next deletion
                    _logger.warning("what deleted streams have left is looked for at the next deletion: %s", error)

    def _run(self) -> None:
        assert self._queue is not None
        try:
            end = self._store.info(self._queue.segment).length  # what is put off is for the next time
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
            _logger.warning("what deleted streams have left is looked for at the next deletion: %s", error)
        except Exception as error:
            survive(error, "deletions of streams")

    def _handle(self, event: QueuedEvent) -> None:
        deletion = Deletion.decode(event.data)
        is_young = self._clock.time() - deletion.announced_at < PATIENCE_SECONDS
        if not self._finish(deletion) and is_young:
            assert self._queue is not None
            self._queue.add(event.data)

    def _finish(self, deletion: Deletion) -> bool:
        """Delete what is left of the stream; False if its metadata does not say that it is deleted."""
        deadline = self._metadata.deadline()
        state = self._metadata.open(deletion.stream, create=False).fetch_updates(timeout=deadline.remaining())
        if state.incarnation == deletion.incarnation and (state.exists or state.is_being_copied):
            return False
        self._data.delete_all(StreamState(name=deletion.stream, incarnation=deletion.incarnation), deadline)
        return True
