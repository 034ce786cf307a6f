"""The watermarks of the streams of a store, without a coordinator.

A segment in the store, the registry, has an attribute for each writer that notes times, its `Mark`, and one for each
stream, its `WatermarkHistory`. A writer that has stored its mark reads all marks of the stream, and adds the watermark
that follows from them, by compare-and-set. Without a new mark the watermark moves only where a mark ends, because its
writer is silent: a writer with a later mark then reads the marks again. A watermark asks for the length of each
segment, so a stream gets at most two of them a second.

The order of the steps is what makes a watermark right. A writer stores a mark after all its earlier events. A watermark
is the earliest of the marks, and its cut is read after them. So the events before it, of all writers whose marks count,
are before the cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from synchronizer import (
    ANY,
    Appended,
    AttributeChange,
    Deadline,
    NotFoundError,
    StoreUnavailableError,
)
from synchronizer.compare_and_set import remove_attributes

from ..data_segments import DataSegments
from ..metadata import StreamMetadata
from ..pending import PendingChanges
from .marks import Mark, Watermark, WatermarkHistory, held_until, watermark_of

REGISTRY: Final = "readergroup/event-time"
#: A mark of a writer that has not removed it is removed when it is this old.
_MARK_RETENTION_SECONDS: Final = 24 * 3600.0
#: The least time between two watermarks of a stream.
_INTERVAL_SECONDS: Final = 0.5
#: How often a writer that ends tries to add a watermark while other processes add theirs.
_ATTEMPTS_AT_END: Final = 5
#: How long the calls of one update may take.
_TIMEOUT_SECONDS: Final = 5.0


class Watermarks:
    """The marks and watermarks of the streams of one client. Threads may share it."""

    def __init__(self, metadata: StreamMetadata, data: DataSegments, pending: PendingChanges) -> None:
        self._metadata = metadata
        self._data = data
        self._pending = pending
        self._store = metadata.store
        self._clock = metadata.clock
        self._begun: dict[str, float] = {}  # by stream, when a watermark was last looked for here

    def note(self, stream: str, writer_id: bytes, mark: Mark) -> float | None:
        """Store the mark of a writer, and the watermark that follows. An interrupted call can be repeated.

        Returns:
            After how many seconds to call `follow`, unless the writer notes another time: when the mark of a silent
            writer, which holds the watermark, ends; 0 if it is too early for a watermark. None: there is no need.

        Raises:
            NotFoundError: The stream is deleted.
            ReaderGroupError: The store did not answer. Repeat the call.
        """
        name = _mark_of(stream, writer_id)
        if not self._change(name, AttributeChange(ANY, mark.encode())):
            raise StoreUnavailableError("the store did not answer whether it has stored an event time", stream=stream)
        try:
            return self._advance(stream, mark)
        except NotFoundError:
            self._change(name, AttributeChange(ANY, None))
            raise

    def follow(self, stream: str, mark: Mark) -> float | None:
        """Store the watermark that follows from the marks now. Returns and raises as `note`, which stored ``mark``."""
        return self._advance(stream, mark)

    def end(self, stream: str, writer_id: bytes, last: Mark) -> None:
        """Let a writer count no more that writes no further events. ``last`` is what it would have noted."""
        self._change(_mark_of(stream, writer_id), AttributeChange(ANY, None))
        for _ in range(_ATTEMPTS_AT_END):
            if self._advance(stream, last, has_ended=True) is None:
                return

    def _advance(self, stream: str, own: Mark, *, has_ended: bool = False) -> float | None:
        """Add the watermark that follows from the marks, if it is later than the last one.

        Args:
            stream: The stream.
            own: The mark of the writer.
            has_ended: The writer has ended, and its mark counts only if no other does. No call follows this one, so the
                watermark is added at once.

        Returns:
            As `note`; 0 also if another process was faster.
        """
        if not has_ended and self._clock.monotonic() < self._begun.get(stream, -math.inf) + _INTERVAL_SECONDS:
            return 0.0
        self._begun[stream] = self._clock.monotonic()
        prefix, name = _prefix_of_marks(stream), _history_of(stream)
        stored = self._attributes(names=[name]).get(name)
        now = self._clock.time()
        if stored is not None and not has_ended and 0 <= now - WatermarkHistory.decode(stored).at < _INTERVAL_SECONDS:
            return 0.0
        marks = {each: Mark.decode(value) for each, value in self._attributes(prefix).items()}
        deadline = Deadline(self._clock, min(_TIMEOUT_SECONDS, self._metadata.timeout))
        state = self._pending.fetch_state(stream, deadline)
        self._remove_old(marks, now)
        time = watermark_of(marks.values(), state.incarnation, now)
        if time is None and has_ended:
            time = watermark_of([own], state.incarnation, now)
        history = self._known(stored, state.incarnation)
        if time is not None and (history.time is None or time > history.time):
            history = history.with_watermark(Watermark(time, now, self._data.lengths(state, state.current, deadline)))
            # Another process may have added a watermark meanwhile, from fewer marks.
            if not self._change(name, AttributeChange(stored, history.encode())):
                return 0.0
        if has_ended or (history.time is not None and own.time <= history.time):
            return None
        held = held_until(own, marks.values(), now)
        return None if held is None else held - now

    def _change(self, name: str, change: AttributeChange) -> bool:
        """Change an attribute; return False if it is not as expected, or if the answer is lost."""
        try:
            answer = self._store.append(REGISTRY, b"", attributes={name: change})
        except NotFoundError:
            self._store.create(REGISTRY)
            answer = self._store.append(REGISTRY, b"", attributes={name: change})
        return isinstance(answer, Appended)

    def history(self, stream: str, incarnation: str, deadline: Deadline) -> WatermarkHistory:
        """Return the watermarks of a stream."""
        name = _history_of(stream)
        stored = self._metadata.backoff(deadline).retry(lambda: self._attributes(names=[name]))
        return self._known(stored.get(name), incarnation)

    def forget(self, stream: str) -> None:
        """Remove what is stored about a deleted stream."""
        names = [*self._attributes(_prefix_of_marks(stream)), *self._attributes(names=[_history_of(stream)])]
        for name in names:
            remove_attributes(self._store, REGISTRY, {name: ANY})

    def _remove_old(self, marks: Mapping[str, Mark], now: float) -> None:
        for name, mark in marks.items():
            if now - mark.stored_at > _MARK_RETENTION_SECONDS + mark.timeout_seconds:
                remove_attributes(self._store, REGISTRY, {name: mark.encode()})

    @staticmethod
    def _known(stored: bytes | None, incarnation: str) -> WatermarkHistory:
        history = None if stored is None else WatermarkHistory.decode(stored)
        return history if history and history.incarnation == incarnation else WatermarkHistory(incarnation, ())

    def _attributes(self, prefix: str = "", *, names: list[str] | None = None) -> Mapping[str, bytes]:
        try:
            return self._store.attributes(REGISTRY, prefix, names=names)
        except NotFoundError:  # no writer ever noted a time
            return {}


def _prefix_of_marks(stream: str) -> str:
    return f"mark/{stream}/"


def _mark_of(stream: str, writer_id: bytes) -> str:
    return _prefix_of_marks(stream) + writer_id.hex()


def _history_of(stream: str) -> str:
    return f"history/{stream}"
