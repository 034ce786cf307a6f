"""The segments that hold the events of streams: how long they are, and how their data is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from synchronizer import (
    Deadline,
    InvalidArgumentError,
    NotFoundError,
    Patience,
    ReaderGroupError,
    Update,
    checked,
)

from .config import StagedName, StreamCut, StreamInfo, staging_prefix
from .data.places import Place, check_offset
from .data.segment_reader import block_start
from .metadata import StreamMetadata
from .state import ForgetSegments, StreamState
from .writing.marks import WRITER_RETENTION_SECONDS


class DataSegments:
    """The data segments of streams whose metadata the caller knows. Every step may be repeated, by any client."""

    def __init__(self, metadata: StreamMetadata) -> None:
        self._metadata = metadata
        self._store = metadata.store

    # ------------------------------------------------------------------ what there is

    def lengths(self, state: StreamState, numbers: Iterable[int], deadline: Deadline) -> Mapping[int, int]:
        """How long these data segments are now."""
        patience = self._metadata.patience(deadline)
        segments = {number: state.data_segment(number) for number in numbers}
        return {n: patience.call(partial(self._store.info, segment)).length for n, segment in segments.items()}

    def tail(self, state: StreamState, deadline: Deadline) -> StreamCut:
        """Where the data of the newest epoch in ``state`` ends now."""
        return state.cut(self.lengths(state, state.current, deadline))

    def info(self, state: StreamState, deadline: Deadline) -> StreamInfo:
        """The stream of ``state``, with its present tail."""
        return StreamInfo(
            name=state.name,
            incarnation=state.incarnation,
            config=state.config,
            epoch=state.epoch,
            segments={state.segment(n): state.segments[n].keys for n in state.current},
            head=state.head_cut,
            tail=self.tail(state, deadline),
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
        """The cut that ``place`` means: ``tail`` or the present one, or a cut that a reader can start at.

        ``argument`` is what an error calls the place.
        """
        if place == "head":
            return state.head_cut
        if place == "tail":
            return tail or self.tail(state, deadline)
        if not isinstance(place, StreamCut):
            raise InvalidArgumentError(f"{argument} is a StreamCut, 'head' or 'tail'", place=place)
        patience = self._metadata.patience(deadline)
        for number, offset in state.check_cut(place).items():
            patience.call(partial(check_offset, self._store, state.segment(number), state.incarnation, offset))
        return place

    # ------------------------------------------------------------------ giving data up

    def truncate(self, state: StreamState, deadline: Deadline) -> None:
        """Give up the blocks that lie wholly before the head, and delete what was retired long ago."""
        patience = self._metadata.patience(deadline)
        for number, each in state.segments.items():
            segment = state.data_segment(number)
            if each.retired_at is not None:
                self._truncate_segment(segment, None, patience)
            elif number in state.head:
                self._truncate_segment(segment, state.head[number], patience)
        self._delete_retired(state, deadline)

    def _truncate_segment(self, segment: str, offset: int | None, patience: Patience) -> None:
        """Give up the blocks that lie wholly before ``offset``; None: all."""
        try:
            info = patience.call(lambda: self._store.info(segment))
            to = info.length if offset is None else offset
            if to > info.start_offset:
                start = patience.call(lambda: block_start(self._store, segment, to))
                patience.call(lambda: self._store.truncate(segment, start))
        except NotFoundError:
            return  # deleted already

    def _delete_retired(self, state: StreamState, deadline: Deadline) -> None:
        """Delete what was retired so long ago that no writer asks for it any more."""
        before = self._metadata.clock.time() - WRITER_RETENTION_SECONDS
        old = [n for n, each in state.segments.items() if each.retired_at is not None and each.retired_at < before]
        if not old:
            return
        self.delete((state.data_segment(number) for number in old), self._metadata.patience(deadline))

        def forget(now: StreamState) -> Iterable[Update[StreamState]]:
            left = tuple(number for number in old if number in now.segments)
            return [ForgetSegments(numbers=left)] if left and now.incarnation == state.incarnation else []

        self._metadata.existing(state.name, deadline).update_state(forget, timeout=deadline.remaining())

    def delete(self, segments: Iterable[str], patience: Patience) -> None:
        """Delete these segments, as far as they were created."""
        for segment in segments:
            try:
                patience.call(partial(self._store.delete, segment))
            except NotFoundError:
                continue  # it was never created

    def delete_all(self, state: StreamState, deadline: Deadline) -> None:
        """Delete all data of the stream, staged segments too."""
        if not state.incarnation:
            return
        patience = self._metadata.patience(deadline)
        staged = staging_prefix(state.name, state.incarnation)
        for segment in patience.call(lambda: list(self._store.list(state.data_prefix))):
            if segment.startswith(staged):
                patience.call(partial(self._store.forget, segment))
            else:
                self.delete([segment], patience)

    def delete_staged(self, prefix: str, is_given_up: Callable[[StagedName], bool], deadline: Deadline) -> None:
        """Delete what is staged under the prefix and given up. What cannot be deleted now is when it is old."""
        is_given_up = checked(is_given_up, "what says whether a part is given up")
        patience = self._metadata.patience(deadline)
        try:
            for segment in patience.call(lambda: list(self._store.list(prefix))):
                if is_given_up(StagedName.of(segment)):
                    patience.call(partial(self._store.forget, segment))
        except InvalidArgumentError:
            raise
        except ReaderGroupError:
            return
