"""Managing streams: create, scale, configure, seal, truncate, copy, delete, and look at them.

What a stream is lies in its metadata (`state.py`, `metadata.py`), and its events in data segments (`data_segments.py`).
There is no controller: a change is announced, and any client completes it (`pending.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

from synchronizer import (
    DEFAULT_STATE_LIMIT_BYTES,
    Clock,
    InvalidArgumentError,
    Map,
    SegmentStore,
    StateSynchronizer,
    Update,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import clock_or_system

from ..errors import StreamExistsError
from .config import ScalingPolicy, StagedName, StreamConfig, StreamCut, StreamInfo, check_stream_name
from .copy_parts import OnProgress
from .copying import By, Copies
from .data.places import Place
from .data_segments import DataSegments
from .deletions import Deletions
from .metadata import StreamMetadata, check_not_replaced
from .pending import PendingChanges
from .state import AnnounceSeal, ConfigureStream, CreateStream, StreamState, TruncateStream
from .transactions.finished_keys import FinishedKeys


class Closable(Protocol):
    def close(self) -> None: ...


class StreamManager:
    """The streams of a store. Threads may share it; it borrows the store, and ``close`` leaves that open.

    A stream that does not exist raises `NotFoundError`. ``timeout`` is the default of all calls.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        clock: Clock | None = None,
        timeout: float = 30.0,
        state_limit_bytes: int = DEFAULT_STATE_LIMIT_BYTES,
    ) -> None:
        check_type(store, SegmentStore, "store")
        check_duration(timeout, "timeout")
        check_count(state_limit_bytes, "state_limit_bytes")
        self.store = store
        self.clock: Clock = clock_or_system(clock)
        self.metadata = StreamMetadata(store, self.clock, timeout, state_limit_bytes)
        self._data = DataSegments(self.metadata)
        self._pending = PendingChanges(self.metadata, self._data)
        self._deletions = Deletions(self.metadata, self._data)
        #: The steps of `copy`, for a caller that copies the parts elsewhere.
        self.copies = Copies(self.metadata, self._data, self._pending)
        #: For transactions.
        self.finished_keys = FinishedKeys(self.metadata)
        #: They are closed with this; the thread of each keeps it until it is closed.
        self.open_writers: WeakSet[Closable] = WeakSet()
        self._process_id = os.getpid()

    @property
    def timeout(self) -> float:
        return self.metadata.timeout

    # ------------------------------------------------------------------ one stream

    def create(self, name: str, *, scaling: ScalingPolicy | None = None, timeout: float | None = None) -> StreamInfo:
        """Create the stream, with one segment if ``scaling`` does not say otherwise. One that exists is returned.

        If that has another config it raises `StreamExistsError`.
        """
        deadline = self.metadata.deadline(timeout)
        config = StreamConfig() if scaling is None else StreamConfig(scaling=scaling)
        synchronizer = self.metadata.open(check_stream_name(name), create=True)
        before = synchronizer.fetch_updates(timeout=deadline.remaining())
        if not before.exists and not before.is_being_copied:
            self._data.delete_all(before, deadline)  # what a deletion that was cut off left behind

        def begin(state: StreamState) -> Iterable[Update[StreamState]]:
            if not state.exists:
                return [CreateStream(incarnation=secrets.token_hex(8), config=config)]
            if state.config != config:
                raise StreamExistsError(
                    "the stream exists with another config; change that with streams.configure",
                    stream=name,
                    config=state.config,
                    wanted=config,
                )
            return []

        synchronizer.update_state(begin, timeout=deadline.remaining())
        return self._data.info(self._pending.finish(name, deadline), deadline)

    def scale(
        self,
        name: str,
        *,
        split: Sequence[int] | None = None,
        merge: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> StreamInfo:
        """Split each of the segments ``split`` in two halves, or make one of the neighbours ``merge``.

        Writers and readers go on meanwhile. Returns when the new segments are in use.
        """
        if (split is None) == (merge is None):
            raise InvalidArgumentError("say either split=[...] or merge=[...]", stream=name)
        for which, numbers in (("split", split), ("merge", merge)):
            check_type(numbers, Sequence, which, or_none=True)
            for number in numbers or ():
                check_count(number, f"each of {which}", at_least=0)

        def announce(state: StreamState) -> Iterable[Update[StreamState]]:
            return [state.split(split) if split is not None else state.merge(merge or ())]

        return self._change(name, announce, timeout)

    def seal(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """End the stream: it takes no further events, and readers that come to its end are done. Twice is no error."""
        return self._change(name, lambda state: [] if state.sealing else [AnnounceSeal()], timeout)

    def configure(self, name: str, *, scaling: ScalingPolicy, timeout: float | None = None) -> StreamInfo:
        """Change the stream's config. The segments that it has stay as they are: see `scale`."""
        deadline = self.metadata.deadline(timeout)
        config = StreamConfig(scaling=scaling)
        self.metadata.existing(name, deadline).update_state(
            lambda state: [] if state.exists and state.config == config else [ConfigureStream(config=config)],
            timeout=deadline.remaining(),
        )
        return self._data.info(self._pending.fetch_state(name, deadline), deadline)

    def truncate(self, name: str, cut: StreamCut, *, timeout: float | None = None) -> None:
        """Give up the data before ``cut``. What lies before the present head already changes nothing.

        Data goes in whole blocks, so some events before the cut may stay readable.
        """
        check_type(cut, StreamCut, "cut")
        deadline = self.metadata.deadline(timeout)
        state = self._pending.fetch_state(name, deadline)
        self._data.resolve(state, cut, deadline)
        offsets = state.check_cut(cut)
        at = self.clock.time()

        def move_head(now: StreamState) -> Iterable[Update[StreamState]]:
            check_not_replaced(now, state)
            return [] if now.precedes(cut, now.head_cut) else [TruncateStream(head=Map(offsets), at=at)]

        state = self.metadata.existing(name, deadline).update_state(move_head, timeout=deadline.remaining())
        self._data.truncate(state, deadline)

    def copy(
        self,
        source: str,
        target: str,
        *,
        by: By | None = None,
        start: Place | None = None,
        end: Place | None = None,
        threads: int = 4,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> StreamInfo:
        """Copy the events between two cuts, all by default, to a new stream, which is sealed; what that looks like.

        By ``"segments"`` the store copies inside itself, all or nothing, and offsets and cuts of the source are good
        for the target, too; by ``"events"`` they go through this process, ``threads`` segments at a time, and offsets
        begin at 0. None: by segments where the store can. What reader groups and watermarks know is not copied.

        The target is there when it is whole. Until then a call with the same names goes on with a copy that was cut
        off, between the cuts that it began with, and `delete` gives it up. ``on_progress`` is called with the bytes
        that are copied and those of the whole copy, by one thread at a time. Without a ``timeout`` a copy takes as
        long as it takes; each step of it waits for the store as long as the client does.
        """
        return self.copies.make(
            source,
            target,
            by=by,
            start=start,
            end=end,
            threads=threads,
            on_progress=on_progress,
            timeout=timeout,
        )

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        """Delete the stream and its data. Its writers and readers get `NotFoundError`; the name may be used again.

        A copy that is not whole yet is given up. While the store is full this takes half of ``timeout``; if it is cut
        off then, delete the stream again.
        """
        self._deletions.delete(name, self.metadata.deadline(timeout))

    def info(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """What the stream looks like now."""
        deadline = self.metadata.deadline(timeout)
        return self._data.info(self._pending.fetch_state(name, deadline), deadline)

    def exists(self, name: str, *, timeout: float | None = None) -> bool:
        return self.metadata.exists(name, self.metadata.deadline(timeout))

    def list(self, scope: str | None = None, *, timeout: float | None = None) -> Iterator[str]:
        """The names of the streams, of all scopes or of one."""
        return self.metadata.names(scope, timeout)

    def _change(
        self,
        name: str,
        announce: Callable[[StreamState], Iterable[Update[StreamState]]],
        timeout: float | None,
    ) -> StreamInfo:
        deadline = self.metadata.deadline(timeout)
        return self._data.info(self._pending.announce(name, announce, deadline), deadline)

    # ------------------------------------------------------------------ for writers and readers

    def synchronizer(self, name: str, *, timeout: float | None = None) -> StateSynchronizer[StreamState]:
        """The synchronizer of the stream's metadata, shared by all who use this manager. Not to be closed."""
        return self.metadata.existing(name, self.metadata.deadline(timeout))

    def fetch_state(self, name: str, *, timeout: float | None = None) -> StreamState:
        """The stream's metadata, as new as this call, with its first segments created."""
        return self._pending.fetch_state(name, self.metadata.deadline(timeout))

    def finish_pending(self, name: str, *, timeout: float | None = None, forget: str | None = None) -> StreamState:
        """Complete the creation, scale, seal or merge that a client began, if there is one; the state after it.

        ``forget`` is the key of a transaction that nobody but the caller will ask for.
        """
        return self._pending.finish(name, self.metadata.deadline(timeout), forget=forget)

    def segment_lengths(
        self, state: StreamState, numbers: Iterable[int], *, timeout: float | None = None
    ) -> Mapping[int, int]:
        """How long these data segments are now."""
        return self._data.lengths(state, numbers, self.metadata.deadline(timeout))

    def tail_cut(self, state: StreamState, *, timeout: float | None = None) -> StreamCut:
        """Where the data of the newest epoch in ``state`` ends now."""
        return self._data.tail(state, self.metadata.deadline(timeout))

    def resolve(
        self,
        state: StreamState,
        place: Place,
        *,
        tail: StreamCut | None = None,
        timeout: float | None = None,
        argument: str = "place",
    ) -> StreamCut:
        """The cut that ``place`` means: ``tail`` or the present one, or a cut that a reader can start at.

        ``argument`` is what an error calls the place.
        """
        return self._data.resolve(state, place, self.metadata.deadline(timeout), tail=tail, argument=argument)

    def delete_staged(
        self, prefix: str, is_given_up: Callable[[StagedName], bool], *, timeout: float | None = None
    ) -> None:
        """Delete what is staged under the prefix and given up. What cannot be deleted now is when it is old."""
        self._data.delete_staged(prefix, is_given_up, self.metadata.deadline(timeout))

    def close(self) -> None:
        """Close the writers, and the synchronizers of all streams. Twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        with ExitStack() as closing:  # each of them, whatever the others raise; the last one first
            closing.callback(self.metadata.close)
            closing.callback(self._deletions.close)
            for writer in list(self.open_writers):
                closing.callback(writer.close)
