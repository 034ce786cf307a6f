"""`NotificationRecord`: reads the recorded notifications of a group, from a revision on, live, or as Arrow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from notifications import Notification
from synchronizer import (
    Clock,
    Deadline,
    NotFoundError,
    Revision,
    SegmentStore,
    StoreFullError,
    StoreUnavailableError,
    TruncatedError,
)
from synchronizer.arguments import check_type
from synchronizer.backoff import Backoff
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading

from ..streams.data.segment_reader import SegmentReader
from ..telemetry.logs import LogAbout
from .entries import RecordRange, decode_notification
from .naming import LIFE, record_segment

if TYPE_CHECKING:
    import pyarrow

#: How often `NotificationRecord.follow` checks whether to stop and whether the group was deleted and created again.
_WAIT_SECONDS: Final = 1.0

_logger = get_logger(__name__)


class NotificationRecord:
    """The recorded notifications of a group, and samples of its lag. Threads may share it.

    It is empty if no process ever recorded. Retention removes the oldest notifications.
    """

    def __init__(self, store: SegmentStore, *, group: str, log: str, clock: Clock, timeout: float) -> None:
        self.store = store
        self._group = group
        self._log = log
        self._clock = clock
        self._timeout = timeout
        self._logger = LogAbout(_logger, group=group)

    def range(self) -> RecordRange | None:
        """Return the range of all present notifications; None if none was recorded since the group was created."""
        return Backoff(self._clock, Deadline(self._clock, self._timeout)).retry(self._present)

    def read(self, start: Revision | None = None) -> Iterator[Notification]:
        """Return an iterator over the present notifications, in order.

        Args:
            start: Skip notifications of earlier revisions of the group. Default: skip none.

        Raises:
            TruncatedError: The iterator raises it if retention removes the next notification. Call `read` again.
        """
        return (notification for _, notification in self._entries(start))

    def follow(self, start: Revision | None = None, *, stop: threading.Event | None = None) -> Iterator[Notification]:
        """Return an iterator over the present notifications and all later ones, as they are recorded.

        It skips notifications that retention removes before they are read. A deleted group has none. While the store
        is unavailable or full, it logs one warning, waits without a timeout, and then continues where it was.

        Args:
            start: Skip notifications of earlier revisions of the group. Default: skip none.
            stop: Ends the iterator when it is set, within about a second. Default: never.

        Raises:
            StorePermissionError: The iterator raises it if the user of the store lacks a right.
            ClosedError: The iterator raises it if the client was closed.
        """
        check_type(start, Revision, "start", or_none=True)
        check_type(stop, threading.Event, "stop", or_none=True)
        return self._follow(start, Flag() if stop is None else stop)

    def _follow(self, start: Revision | None, stop: threading.Event) -> Iterator[Notification]:
        life, told = "", -1  # the offset of the last notification
        backoff: Backoff | None = None  # while the store is away
        while not stop.is_set():
            try:
                present = self._present()
                if present is None:
                    backoff = None
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
                with suppress(NotFoundError):
                    self.store.wait({present.segment: present.end}, _WAIT_SECONDS)
                backoff = None
            except (StoreUnavailableError, StoreFullError) as error:
                is_first = backoff is None
                backoff = backoff or Backoff(self._clock, Deadline(self._clock, None), stop)
                backoff.wait(error)  # raises a missing right
                if is_first:
                    self._logger.warning(
                        "the record of %s waits for the store, and tries again: %s", self._group, error
                    )

    def _present(self) -> RecordRange | None:
        life = self.store.attributes(self._log, names=[LIFE]).get(LIFE)
        if life is None:
            return None
        try:
            info = self.store.info(record_segment(self._group, life.decode()))
        except NotFoundError:  # not yet created, or already deleted
            return None
        return RecordRange(group=self._group, life=life.decode(), start=info.start_offset, end=info.length)

    def record_batches(self, start: Revision | None = None) -> Iterator[pyarrow.RecordBatch]:
        """Return `read` as an iterator over Arrow record batches, with the schema `readergroup.record.arrow.SCHEMA`.

        Raises:
            UnsupportedError: The extra ``arrow`` is not installed.
        """
        with loading():
            from . import arrow

        return arrow.record_batches(self._entries(start))

    def table(self, start: Revision | None = None) -> pyarrow.Table:
        """Return `record_batches` as one table, the input of the functions in `readergroup.record.analyses`."""
        with loading():
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


def entries(store: SegmentStore, within: RecordRange) -> Iterator[tuple[int, Notification]]:
    """Iterate over the notifications of a range, in order, each with its offset, which is unique in its record.

    Raise `TruncatedError` where retention has removed the next notification.
    """
    reader = SegmentReader(store, within.segment, within.start)
    while reader.offset < within.end and (block := reader.next_block()) is not None:
        for offset, data in zip(block.offsets, block.data, strict=True):
            if offset >= within.end:
                return
            yield offset, decode_notification(within.segment, offset, data)
