"""Forgets the names of streams and groups that were deleted long ago, so that a store does not grow with them.

A deleted name keeps its log, and the names of its data segments, because a process that slept may still use them. One
segment of the store lists what was deleted, the oldest first. After a month, any process that deletes something forgets
it. Every step may be repeated, also late: a log is forgotten only as long as it was when its stream was deleted, and
the next log of the name begins at a greater offset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgpack

from synchronizer import (
    Clock,
    CorruptStoreError,
    NotFoundError,
    ReaderGroupError,
    SegmentStore,
)
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import append_anyhow
from synchronizer.log.entries import EntryLog
from synchronizer.loggers import get_logger
from synchronizer.recipes.queue.frames import encode_frame, read_frames

LIST: Final = "readergroup/deleted-names"
#: How long a name is remembered after it was deleted.
NAME_RETENTION_SECONDS: Final = 30 * 24 * 3600.0
_DAY_SECONDS: Final = 24 * 3600.0

_logger = get_logger(__name__)


class DeletedName(NamedTuple):
    """A stream or group that was deleted. ``deleted_at`` is in seconds since 1970."""

    #: Empty if its name was in use again by then.
    log: str
    #: The length of its log, whose last entry tells of the deletion.
    length: int
    deleted_at: float
    #: The names of its data segments.
    segments: tuple[str, ...] = ()

    def encode(self) -> bytes:
        return bytes(msgpack.packb(self))

    @classmethod
    def decode(cls, data: bytes) -> DeletedName:
        log, length, deleted_at, segments = msgpack.unpackb(data)
        return cls(log, length, deleted_at, tuple(segments))


class NameExpiry:
    """The list of a store's deleted names. Threads may share it."""

    def __init__(self, store: SegmentStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def note(self, name: DeletedName, backoff: Backoff) -> bool:
        """Add a name that was deleted; return whether that is done. Else it stays, unless it is noted again."""
        try:
            backoff.retry(partial(self._add, name))
        except ReaderGroupError as error:
            _logger.warning("the name of the deleted %s is kept: %s", name.log, error)
            return False
        return True

    def try_to_note(self, name: DeletedName) -> bool:
        """Add a name that was deleted, without waiting for a store that is away or full; return whether it is added."""
        try:
            self._add(name)
        except ReaderGroupError:
            return False
        return True

    def _add(self, name: DeletedName) -> None:
        frame = encode_frame(name.encode())
        try:
            append_anyhow(self._store, LIST, frame)  # a name that is listed twice does no harm
        except NotFoundError:
            self._store.create(LIST)
            append_anyhow(self._store, LIST, frame)

    def forget_expired(self, stopping: threading.Event, backoff: Callable[[], Backoff]) -> None:
        """Forget all names that were deleted long enough ago, until ``stopping``, with a ``backoff`` for each step."""
        try:
            at = backoff().retry(partial(self._store.info, LIST)).start_offset
        except NotFoundError:
            return
        while not stopping.is_set():
            try:
                frames = backoff().retry(partial(read_frames, self._store, LIST, at))
            except CorruptStoreError as error:
                _logger.warning("the names of deleted streams and groups up to now are kept: %s", error)
                self._store.truncate(LIST, self._store.info(LIST).length)
                return
            done = at
            for frame in frames:
                if stopping.is_set() or not self._expired(DeletedName.decode(frame.data), backoff()):
                    break
                done = frame.end
            if done > at:
                backoff().retry(partial(self._store.truncate, LIST, done))
            if not frames or done < frames[-1].end:
                return
            at = done

    def _expired(self, name: DeletedName, backoff: Backoff) -> bool:
        """Forget the name if it is time; return whether the list need not have it here any more."""
        now = self._clock.time()
        if name.deleted_at > now + _DAY_SECONDS:  # by a wrong clock: the names behind it must not wait for it
            return self.note(name._replace(deleted_at=now), backoff)
        if name.deleted_at > now - NAME_RETENTION_SECONDS:
            return False
        for segment in name.segments:
            backoff.retry(partial(self._store.forget, segment))
        if name.log:
            backoff.retry(partial(EntryLog(self._store, name.log).forget, name.length))
        return True
