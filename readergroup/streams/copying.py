"""Copy a stream: the data between two of its cuts becomes a stream of another name, with the same segments.

The bounds are fixed in the metadata of the target when a copy begins. So every client that continues an interrupted
copy, or makes the same copy at the same time, makes the same stream. The target is hidden until it is complete: one
update publishes it, sealed, because a copy of past data takes no events.

By segments, the store copies all data in one step, and offsets stay the same. By events, the data passes through
processes, several segments at a time (`copy_parts.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from synchronizer import (
    AlreadyExistsError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    Map,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
    Update,
)
from synchronizer.arguments import check_count
from synchronizer.callables import checked

from ..errors import StreamExistsError
from .config import StreamCut, StreamInfo, check_stream_name, data_segment, number_of, segment_id
from .copy_parts import CopyPart, CopyProgress, OnProgress, copy_by_events, copy_by_segments
from .data.places import Place
from .data.segment_reader import block_start
from .data_segments import DataSegments
from .metadata import StreamMetadata
from .pending import PendingChanges
from .state import BeginCopy, Origin, PublishCopy, StreamState

By = Literal["segments", "events"]


class Copies:
    """Begins copies of streams, and publishes them when all parts are copied. Any process can do any step."""

    def __init__(self, metadata: StreamMetadata, data: DataSegments, pending: PendingChanges) -> None:
        self._metadata = metadata
        self._data = data
        self._pending = pending
        self._store = metadata.store

    def make(
        self,
        source: str,
        target: str,
        *,
        by: By | None,
        start: Place | None,
        end: Place | None,
        threads: int,
        on_progress: OnProgress | None,
        timeout: float | None,
    ) -> StreamInfo:
        """Copy the whole stream in this call: see `StreamManager.copy`."""
        check_count(threads, "threads")
        on_progress = None if on_progress is None else checked(on_progress, "on_progress", "copied, total")
        deadline = Deadline(self._metadata.clock, timeout)
        state = self.begin(source, target, by=by, start=start, end=end)
        if state.is_being_copied:
            with self.told_what_is_gone(state):
                parts = self.parts(state)
                progress = CopyProgress(sum(part.size for part in parts), on_progress)
                if state.origin and state.origin.by == "segments":
                    copy_by_segments(self._store, parts, self._metadata.backoff())
                    progress.advance(progress.total)
                else:
                    copy_by_events(
                        self._store,
                        parts,
                        self._metadata.backoff,
                        threads=threads,
                        progress=progress,
                        deadline=deadline,
                    )
            if progress.failure is not None:  # of the caller, and no sign that data is gone
                raise progress.failure
        return self.publish(state)

    # ------------------------------------------------------------------ beginning

    def begin(
        self,
        source: str,
        target: str,
        *,
        by: By | None = None,
        start: Place | None = None,
        end: Place | None = None,
    ) -> StreamState:
        """Return the metadata of the target with all bounds fixed, by this call or by an earlier, interrupted one.

        If the same copy is complete already, return that.
        """
        if check_stream_name(target, "target") == check_stream_name(source, "source"):
            raise InvalidArgumentError("a stream cannot be copied onto itself; name another target", stream=source)
        if by is not None and not (isinstance(by, str) and by in ("segments", "events")):
            raise InvalidArgumentError("by must be 'segments' or 'events'", by=by)
        if by == "segments" and not self._store.guarantees.server_side_copy:
            raise UnsupportedError("this store has no server-side copy; use by='events'", url=self._store.url)
        found = self._find(target)
        if found is None or not found.is_in_use:
            wanted = self._plan(source, by, start, end)
            found = self._announce(target, wanted)
            if found.origin == wanted.origin:
                return found
        if found.origin is None or found.origin.stream != source:
            raise StreamExistsError(
                "the target exists and is not a copy of this stream; name another target", stream=target, source=source
            )
        if found.exists:
            _check_whole_copy(found, found.origin, self._plan(source, by or found.origin.by, start, end).origin)
        else:
            _check_continues(found, found.origin, by, start, end)
        return found

    def _find(self, target: str) -> StreamState | None:
        try:
            return self._metadata.existing(target, self._metadata.deadline(), or_being_copied=True).state
        except NotFoundError:
            return None

    def _announce(self, target: str, wanted: BeginCopy) -> StreamState:
        deadline = self._metadata.deadline()
        synchronizer = self._metadata.open_fetched(target, deadline, create=True)
        before = synchronizer.state
        if not before.is_in_use:
            self._data.delete_all(before, deadline)  # the rest of an interrupted deletion
        return synchronizer.update_state(lambda now: [] if now.is_in_use else [wanted], timeout=deadline.remaining())

    def _plan(self, source: str, by: By | None, start: Place | None, end: Place | None) -> BeginCopy:
        state, tail = self._tail(source)
        first = self._resolve(state, "head" if start is None else start, tail, "start")
        last = self._resolve(state, "tail" if end is None else end, tail, "end")
        chosen = by or ("segments" if self._store.guarantees.server_side_copy else "events")
        if chosen == "segments" and isinstance(end, StreamCut) and not self._stands_between_blocks(state, last):
            if by == "segments":
                raise InvalidArgumentError("the end cut is inside a block of events; use by='events'", end=str(last))
            chosen = "events"
        numbers = {number_of(segment) for segment in state.segments_between(first, last)}
        ends_at = _offsets(last)
        if any(not numbers.issuperset(state.segments[number].successors) for number in numbers - ends_at.keys()):
            raise InvalidArgumentError(
                "the end cut contains a segment but not all of its predecessors; use a complete cut", end=str(last)
            )
        segments = [state.segments[number] for number in sorted(numbers)]
        return BeginCopy(
            incarnation=secrets.token_hex(8),
            config=state.config.model_copy(update={"retention": None}),  # a copy is often made to keep the events
            segments=tuple(
                each.model_copy(
                    update={
                        "predecessors": tuple(number for number in each.predecessors if number in numbers),
                        "successors": tuple(number for number in each.successors if number in numbers),
                    }
                )
                for each in segments
            ),
            origin=Origin(stream=source, incarnation=state.incarnation, by=chosen, start=_offsets(first), end=ends_at),
        )

    def _tail(self, source: str) -> tuple[StreamState, StreamCut]:
        """Return the metadata of the source and its tail, with each transaction wholly before or after the tail."""
        deadline = self._metadata.deadline()
        while True:
            state = self._pending.finish(source, deadline)
            tail = self._data.tail(state, deadline)
            now = self._pending.fetch_state(source, deadline)
            if now.transactions.sequence == state.transactions.sequence:
                return state, tail
            if deadline.passed:
                raise DeadlineExceededError(
                    "other clients committed transactions before every attempt; nothing was copied, try again",
                    stream=source,
                )

    def _resolve(self, state: StreamState, place: Place, tail: StreamCut, argument: str) -> StreamCut:
        return self._data.resolve(state, place, self._metadata.deadline(), tail=tail, argument=argument)

    def _stands_between_blocks(self, state: StreamState, cut: StreamCut) -> bool:
        return all(
            self._metadata.backoff().retry(partial(block_start, self._store, state.data_segment(number), offset))
            == offset
            for number, offset in _offsets(cut).items()
        )

    # ------------------------------------------------------------------ the data

    def parts(self, state: StreamState) -> Sequence[CopyPart]:
        """Return the parts of a copy, one for each segment."""
        assert state.origin is not None
        origin = state.origin
        parts = []
        for number in sorted(state.segments):
            source = data_segment(segment_id(origin.stream, number), origin.incarnation)
            end = origin.end.get(number)
            if end is None:  # it was sealed before its successors were published
                backoff = self._metadata.backoff()
                end = backoff.retry(partial(self._store.info, source)).length
            target = state.data_segment(number)
            parts.append(CopyPart(source=source, target=target, start=origin.start.get(number, 0), end=end))
        return parts

    # ------------------------------------------------------------------ ending

    def publish(self, state: StreamState) -> StreamInfo:
        """Make a copy, whose parts are all copied, a stream."""
        deadline = self._metadata.deadline()

        def publish(now: StreamState) -> list[Update[StreamState]]:
            return [PublishCopy()] if now.incarnation == state.incarnation and now.is_being_copied else []

        synchronizer = self._metadata.open(state.name, create=True)
        now = synchronizer.update_state(publish, timeout=deadline.remaining())
        if now.incarnation != state.incarnation or not now.exists:
            raise self._given_up(state)
        return self._data.info(now, deadline)

    @contextmanager
    def told_what_is_gone(self, state: StreamState) -> Iterator[None]:
        """Translate an error about missing data: the source's, or the target's because the copy was given up."""
        assert state.origin is not None
        try:
            yield
        except TruncatedError as error:
            raise TruncatedError(
                "the source was truncated during the copy, which cannot be completed; delete the copy, then "
                "copy the remaining data",
                source=state.origin.stream,
                target=state.name,
                **error.facts,
            ) from error
        except (NotFoundError, AlreadyExistsError) as error:
            now = self._metadata.open(state.name, create=True).fetch_updates(timeout=self._metadata.timeout)
            if now.incarnation != state.incarnation or not now.is_in_use:
                raise self._given_up(state) from error
            if now.is_being_copied:
                raise NotFoundError(
                    "the source was deleted during the copy, which cannot be completed; delete the copy",
                    source=state.origin.stream,
                    target=state.name,
                ) from error

    def _given_up(self, state: StreamState) -> NotFoundError:
        """Return the error for a deleted copy, and delete its segments: no other process would."""
        self._data.delete_all(state, self._metadata.deadline())
        return NotFoundError("the copy was deleted before it was complete", stream=state.name)


def _check_whole_copy(found: StreamState, is_of: Origin, wanted: Origin) -> None:
    if is_of != wanted:
        raise StreamExistsError(
            "the target is a complete copy of another part of this stream; name another target, or delete it first",
            stream=found.name,
            by=is_of.by,
            ends_at=dict(is_of.end),
            wanted=dict(wanted.end),
        )


def _check_continues(found: StreamState, is_of: Origin, by: By | None, start: Place | None, end: Place | None) -> None:
    cuts = ((start, is_of.start), (end, is_of.end))
    if by not in (None, is_of.by) or any(isinstance(cut, StreamCut) and _offsets(cut) != at for cut, at in cuts):
        raise InvalidArgumentError(
            "another copy to this target is unfinished; leave out the cuts to complete it, or delete the target first",
            stream=found.name,
            by=is_of.by,
            starts_at=dict(is_of.start),
            ends_at=dict(is_of.end),
        )


def _offsets(cut: StreamCut) -> Map[int, int]:
    return Map({number_of(segment): offset for segment, offset in cut.offsets.items()})
