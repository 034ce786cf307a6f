"""Deleting what deleted streams leave behind, whoever dies.

A stream is deleted in two steps: its metadata says so, and then its segments go. `StreamManager.delete` does both, and
before them puts the stream into a durable queue. What is in there is looked at again, later, by a process that deletes
a stream: mostly there is nothing left to do. If somebody died between the two steps, this is where it is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import msgpack

from synchronizer import (
    Clock,
    EventProcessor,
    EventQueue,
    Flag,
    ManualClock,
    QueuedEvent,
    ReaderGroupError,
    SegmentStore,
    StoreUnavailableError,
)
from synchronizer.threads.background import BackgroundThread, survive

QUEUE: Final = "readergroup/deletions"
#: A process looks through the queue with its first deletion, and every so many.
LOOK_EVERY: Final = 50
#: How often it is looked whether another process, which has the turn, has gone through the queue.
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
    """The queue of a store, as one client sees it. ``finish`` deletes what is left; False: the stream is still there.

    With a clock that is moved by hand nothing runs in the background, and the queue is looked through in the call.
    """

    def __init__(self, store: SegmentStore, clock: Clock, timeout: float, finish: Callable[[Deletion], bool]) -> None:
        self._store = store
        self._clock = clock
        self._timeout = timeout
        self._finish = finish
        self._lock = threading.Lock()
        self._stopping = Flag()
        self._queue: EventQueue | None = None
        self._thread: threading.Thread | None = None
        self._announced = 0

    def announce(self, stream: str, incarnation: str, *, timeout: float) -> None:
        """Remember, durably, that this stream is about to be deleted."""
        with self._lock:
            self._announced += 1
            if self._queue is None:
                self._queue = EventQueue(self._store, QUEUE, clock=self._clock, timeout=self._timeout)
        self._queue.add(Deletion(stream, incarnation, self._clock.time()).encode(), timeout=timeout)

    def look_through(self) -> None:
        """Finish what others have left, in the background, if it is time to look for it."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running or self._stopping.is_set() or self._announced % LOOK_EVERY != 1:
                return
            if isinstance(self._clock, ManualClock):
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

    def close(self) -> None:
        """Stop after the stream in hand. Twice is no error."""
        self._stopping.set()
        with self._lock:
            thread, queue = self._thread, self._queue
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
        if queue is not None:
            queue.close()

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
                timeout=self._timeout,
                threads=False,
            ) as processor:
                while processor.handled_upto < end and not self._stopping.is_set():
                    if not processor.step():
                        if isinstance(self._clock, ManualClock):
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
