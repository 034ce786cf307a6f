"""`NotificationRecord`: reads what was recorded of a group, from a revision on, as it comes, or as Arrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from notifications import Notification
from synchronizer import Clock, Deadline, Flag, NotFoundError, Patience, Revision, SegmentStore, TruncatedError
from synchronizer.arguments import check_type

from ..streams.data.segment_reader import SegmentReader
from .entries import LIFE, RecordRange, decode_notification, record_segment

if TYPE_CHECKING:
    import pyarrow

R = TypeVar("R")

#: `NotificationRecord.follow` looks this often whether it is to end, or the group was deleted and created again.
_WAIT_SECONDS: Final = 1.0


class NotificationRecord:
    """The notifications that were recorded of a group, and samples of its lag. Threads may share it.

    Empty where nobody ever recorded. What retention gives up is not in it any more.
    """

    def __init__(self, store: SegmentStore, *, group: str, log: str, clock: Clock, timeout: float) -> None:
        self.store = store
        self._group = group
        self._log = log
        self._clock = clock
        self._timeout = timeout

    def range(self) -> RecordRange | None:
        """What there is now; None where nobody has recorded since the group was created."""

        def look() -> RecordRange | None:
            life = self.store.attributes(self._log, names=[LIFE]).get(LIFE)
            if life is None:
                return None
            try:
                info = self.store.info(record_segment(self._group, life.decode()))
            except NotFoundError:  # not yet, or no longer
                return None
            return RecordRange(group=self._group, life=life.decode(), start=info.start_offset, end=info.length)

        return self._patiently(look)

    def read(self, start: Revision | None = None) -> Iterator[Notification]:
        """What there is now, in order, of revision ``start`` and later ones.

        Raises `TruncatedError` if retention gives up meanwhile what was to be read next: read it again.
        """
        return (notification for _, notification in self._entries(start))

    def follow(self, start: Revision | None = None, *, stop: threading.Event | None = None) -> Iterator[Notification]:
        """`read`, and what comes after it, as it comes, until ``stop`` is set. A deleted group has nothing to tell.

        What retention gives up before it is read is left out.
        """
        check_type(start, Revision, "start", or_none=True)
        check_type(stop, threading.Event, "stop", or_none=True)
        return self._follow(start, Flag() if stop is None else stop)

    def _follow(self, start: Revision | None, stop: threading.Event) -> Iterator[Notification]:
        life, told = "", -1  # the offset of what was told last
        while not stop.is_set():
            present = self.range()
            if present is None:
                self._clock.wait(stop, _WAIT_SECONDS)
                continue
            if present.life != life:
                life, told = present.life, -1
            rest = present.model_copy(update={"start": max(present.start, told)})
            with suppress(NotFoundError, TruncatedError):
                for offset, notification in entries(self.store, rest):
                    if offset > told:
                        told = offset
                        if start is None or notification.revision >= start:
                            yield notification
            self._wait_for_growth(present)

    def _wait_for_growth(self, present: RecordRange) -> None:
        def wait() -> None:
            try:
                self.store.wait({present.segment: present.end}, _WAIT_SECONDS)
            except NotFoundError:
                return

        self._patiently(wait)

    def record_batches(self, start: Revision | None = None) -> Iterator[pyarrow.RecordBatch]:
        """`read` as Arrow, with the columns of `readergroup.record.arrow.SCHEMA`. Needs the extra ``arrow``."""
        from . import arrow

        return arrow.record_batches(self._entries(start))

    def table(self, start: Revision | None = None) -> pyarrow.Table:
        """`record_batches` in one table, which the functions of `readergroup.record.analyses` take."""
        from . import arrow

        return arrow.table(self._entries(start))

    def _entries(self, start: Revision | None) -> Iterator[tuple[int, Notification]]:
        check_type(start, Revision, "start", or_none=True)
        return self._since(self.range(), start)

    def _since(self, found: RecordRange | None, start: Revision | None) -> Iterator[tuple[int, Notification]]:
        if found is None:
            return
        for offset, notification in entries(self.store, found):
            if start is None or notification.revision >= start:
                yield offset, notification

    def _patiently(self, call: Callable[[], R]) -> R:
        return Patience(self._clock, Deadline(self._clock, self._timeout)).call(call)


def entries(store: SegmentStore, within: RecordRange) -> Iterator[tuple[int, Notification]]:
    """The notifications of a range, in order, each with its offset, which nothing else in its record has.

    Raises `TruncatedError` where retention has given up what comes next.
    """
    reader = SegmentReader(store, within.segment, within.start)
    while reader.offset < within.end and (block := reader.next_block()) is not None:
        for offset, data in zip(block.offsets, block.data, strict=True):
            if offset >= within.end:
                return
            yield offset, decode_notification(within.segment, offset, data)
