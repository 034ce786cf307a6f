"""The segments that hold the events of streams: their lengths, and the deletion of their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from synchronizer import (
    Deadline,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    TruncatedError,
    Update,
)
from synchronizer.backoff import Backoff
from synchronizer.callables import checked
from synchronizer.store import MAX_CREATED

from .config import StagedName, StreamCut, StreamInfo, staging_prefix
from .data.places import Place, check_offset
from .data.segment_reader import block_start
from .metadata import StreamMetadata
from .state import ForgetSegments, StreamState
from .writing.event_numbers import WRITER_RETENTION_SECONDS


class Names(NamedTuple):
    """The names, in the store, of the segments of a stream: those with its events, and those of transactions."""

    data: Sequence[str]
    staged: Sequence[str]


class DataSegments:
    """The data segments of streams whose metadata the caller has. Any client can repeat every step."""

    def __init__(self, metadata: StreamMetadata) -> None:
        self._metadata = metadata
        self._store = metadata.store

    # ------------------------------------------------------------------ what there is

    def lengths(self, state: StreamState, numbers: Iterable[int], deadline: Deadline) -> Mapping[int, int]:
        """Return the present lengths of these data segments. Raise `NotFoundError` if one does not exist."""
        segments = {state.data_segment(number): number for number in numbers}
        found = self._metadata.backoff(deadline).retry(partial(self._store.infos, list(segments)))
        if missing := segments.keys() - found.keys():
            raise NotFoundError("a segment of the stream was deleted meanwhile", segment=min(missing))
        return {segments[name]: info.length for name, info in found.items()}

    def tail(self, state: StreamState, deadline: Deadline) -> StreamCut:
        """Return where the data of the newest epoch in ``state`` ends now."""
        return state.cut(self.lengths(state, state.current, deadline))

    def info(self, state: StreamState, deadline: Deadline) -> StreamInfo:
        """Return a description of the stream in ``state``, with its present tail."""
        return self.described(state, self.tail(state, deadline))

    @staticmethod
    def described(state: StreamState, tail: StreamCut) -> StreamInfo:
        """Return a description of the stream in ``state`` whose data ends at ``tail``."""
        return StreamInfo(
            name=state.name,
            incarnation=state.incarnation,
            config=state.config,
            epoch=state.epoch,
            segments={state.segment(n): state.segments[n].keys for n in state.current},
            head=state.head_cut,
            tail=tail,
            sealed=state.sealed,
        )

    def resolve(
        self,
        state: StreamState,
        place: Place,
        deadline: Deadline,
        *,
        tail: StreamCut | None = None,
        argument: str = "place",
    ) -> StreamCut:
        """Return the cut for ``place``: the head, ``tail`` or the present tail, or a cut that a reader can start at.

        Errors call the place ``argument``.
        """
        if isinstance(place, str) and place in ("head", "tail"):
            return state.head_cut if place == "head" else tail or self.tail(state, deadline)
        if not isinstance(place, StreamCut):
            raise InvalidArgumentError(f"{argument} must be a StreamCut, 'head' or 'tail'", place=place)
        backoff = self._metadata.backoff(deadline)
        for number, offset in state.check_reachable(place).items():
            backoff.retry(partial(check_offset, self._store, state.segment(number), state.incarnation, offset))
        return place

    # ------------------------------------------------------------------ creating

    def create(self, segments: Sequence[str], backoff: Backoff) -> None:
        """Create these segments, as far as they do not exist."""
        at_once = MAX_CREATED if self._store.guarantees.atomic_multi_create else 1
        for first in range(0, len(segments), at_once):
            part = segments[first : first + at_once]
            if len(part) > 1 and backoff.retry(partial(self._store.create_together, dict.fromkeys(part, b""))):
                continue
            for segment in part:
                backoff.retry(partial(self._store.create, segment))

    # ------------------------------------------------------------------ giving data up

    def truncate(self, before: StreamState, state: StreamState, deadline: Deadline) -> None:
        """Delete the blocks that lie wholly before the head, and segments that were retired long ago.

        The head was just moved from that in ``before`` to that in ``state``.
        """
        backoff = self._metadata.backoff(deadline)
        for number, each in state.segments.items():
            segment = state.data_segment(number)
            if each.retired_at is not None:
                self._truncate_segment(segment, None, backoff)
            elif (offset := state.head.get(number, 0)) > before.head.get(number, 0):
                self._truncate_to(segment, offset, backoff)
            elif offset > 0:  # after a process that could not complete this
                self._truncate_segment(segment, offset, backoff)
        self.delete_retired(state, deadline)

    def _truncate_segment(self, segment: str, offset: int | None, backoff: Backoff) -> None:
        """Delete the blocks that lie wholly before ``offset``; None: all. There may be none."""
        with suppress(NotFoundError):  # it is deleted
            info = backoff.retry(lambda: self._store.info(segment))
            to = info.length if offset is None else offset
            if to > info.start_offset:
                self._truncate_to(segment, to, backoff)

    def _truncate_to(self, segment: str, offset: int, backoff: Backoff) -> None:
        """Delete the blocks that lie wholly before ``offset``, of which there probably are some."""
        with suppress(NotFoundError, TruncatedError):  # another process was faster
            start = backoff.retry(lambda: block_start(self._store, segment, offset))
            backoff.retry(lambda: self._store.truncate(segment, start))

    def delete_retired(self, state: StreamState, deadline: Deadline) -> None:
        """Delete segments that were retired so long ago that no writer asks for them any more."""
        before = self._metadata.clock.time() - WRITER_RETENTION_SECONDS
        old = [n for n, each in state.segments.items() if each.retired_at is not None and each.retired_at < before]
        if not old:
            return
        self.delete((state.data_segment(number) for number in old), self._metadata.backoff(deadline))

        def forget(now: StreamState) -> Iterable[Update[StreamState]]:
            left = tuple(number for number in old if number in now.segments)
            return [ForgetSegments(numbers=left)] if left and now.incarnation == state.incarnation else []

        self._metadata.existing(state.name, deadline).update_state(forget, timeout=deadline.remaining())

    def delete(self, segments: Iterable[str], backoff: Backoff) -> None:
        """Delete these segments, as far as they were created."""
        for segment in segments:
            try:
                backoff.retry(partial(self._store.delete, segment))
            except NotFoundError:
                continue  # it was never created

    def delete_all(self, state: StreamState, deadline: Deadline) -> None:
        """Delete all data of the stream, staged segments too."""
        self.delete_these(self.names(state, deadline), deadline)

    def names(self, state: StreamState, deadline: Deadline) -> Names:
        """Return the names of all segments of the stream that exist."""
        if not state.incarnation:
            return Names([], [])
        staged = staging_prefix(state.name, state.incarnation)
        found = self._metadata.backoff(deadline).retry(lambda: list(self._store.list(state.data_prefix)))
        return Names(
            [segment for segment in found if not segment.startswith(staged)],
            [segment for segment in found if segment.startswith(staged)],
        )

    def delete_these(self, names: Names, deadline: Deadline) -> None:
        """Delete these segments of one stream."""
        backoff = self._metadata.backoff(deadline)
        self.delete(names.data, backoff)
        for segment in names.staged:
            backoff.retry(partial(self._store.forget, segment))

    def delete_staged(self, prefix: str, is_given_up: Callable[[StagedName], bool], deadline: Deadline) -> None:
        """Delete staged segments that are given up under the prefix. Those that cannot be deleted now expire later."""
        is_given_up = checked(is_given_up, "is_given_up", "staged")
        backoff = self._metadata.backoff(deadline)
        try:
            for segment in backoff.retry(lambda: list(self._store.list(prefix))):
                if is_given_up(StagedName.of(segment)):
                    backoff.retry(partial(self._store.forget, segment))
        except InvalidArgumentError:
            raise
        except ReaderGroupError:
            return
