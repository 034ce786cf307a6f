"""Create, scale, configure, seal, truncate, copy, delete and describe streams.

The metadata of a stream (`state.py`, `metadata.py`) describes it; its events are in data segments (`data_segments.py`).
There is no controller: a client announces a change, and any client completes it (`pending.py`).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakSet

from synchronizer import (
    Clock,
    Deadline,
    InvalidArgumentError,
    Map,
    NotFoundError,
    ReaderGroupError,
    SegmentStore,
    StateSynchronizer,
    UnknownUpdateError,
    Update,
)
from synchronizer.arguments import check_count, check_duration, check_items, check_type
from synchronizer.clock import clock_or_system
from synchronizer.configuration import differences
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES
from synchronizer.store import MAX_CREATED
from synchronizer.threads.loading import loading
from synchronizer.threads.task_threads import TaskThreads

from ..closable import close_each
from ..errors import StreamExistsError
from ..telemetry.counters import Counters
from ..words import count
from .config import (
    MAX_SEGMENTS,
    KeyRange,
    RetentionPolicy,
    ScalingPolicy,
    SegmentId,
    StagedName,
    StreamConfig,
    StreamCut,
    StreamInfo,
    Tag,
    check_stream_name,
    has_tag,
    number_of,
    stream_of,
)
from .data.moments import time_of
from .data.places import Place
from .data.write_batch import check_key
from .data_segments import DataSegments
from .event_time.watermarks import Watermarks
from .maintenance import Maintenance
from .metadata import StreamMetadata, check_not_replaced
from .pending import PendingChanges
from .retention.applying import Retention
from .scaling.applying import StreamScaling
from .state import AnnounceSeal, ConfigureStream, CreateStream, StreamState, TruncateStream, new_stream
from .transactions.finished_keys import FinishedKeys
from .writing.open_writers import OpenWriter, close_writers

if TYPE_CHECKING:  # each method loads what it starts
    from .copy_parts import OnProgress
    from .copying import By, Copies
    from .deletions import Deletions
    from .retention.report import RetentionReport

#: How many streams `StreamManager.create_many` creates in one step. Their metadata must fit into it.
_STREAMS_AT_ONCE: Final = 100


def _config(
    scaling: ScalingPolicy | None, retention: RetentionPolicy | None, tags: Mapping[str, str] | None
) -> StreamConfig:
    check_type(scaling, ScalingPolicy, "scaling", or_none=True)
    check_type(retention, RetentionPolicy, "retention", or_none=True)
    return StreamConfig(scaling=scaling or ScalingPolicy(segments=1), retention=retention, tags=tags)


def _exists_differently(state: StreamState, wanted: StreamConfig) -> StreamExistsError:
    found, segments = differences(state.config, wanted), len(state.current)
    asked_for = differences(wanted, state.config)
    advice = "the stream exists with another config; change it with streams.configure"
    only_segments = wanted.scaling.load is None and found == {"scaling": {"segments": state.config.scaling.segments}}
    if only_segments and segments != wanted.scaling.segments:  # `configure` would not split or merge them
        advice = (
            f"the stream has {count(segments, 'segment')}; split or merge them with streams.scale, then call "
            "streams.configure with this policy"
        )
    return StreamExistsError(advice, stream=state.name, exists_with=found, asked_for=asked_for)


def _number(segment: int | str, stream: str, which: str) -> int:
    """Return the number of a segment of this stream, which is given by its number or its name."""
    if not isinstance(segment, str):
        check_count(segment, f"each item of {which}", at_least=0)
        return segment
    if stream_of(SegmentId(segment)) != stream:
        raise InvalidArgumentError(f"a segment to {which} is of another stream", segment=segment, stream=stream)
    return number_of(SegmentId(segment))


def _key_range(given: KeyRange | tuple[float, float]) -> KeyRange:
    """Return a range that is given as such, or as its two bounds."""
    if isinstance(given, KeyRange):
        return given
    try:
        low, high = given
        return KeyRange(low=low, high=high)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "each of ranges must be a KeyRange or two numbers low and high, with 0 <= low < high <= 1",
            found=repr(given)[:100],
        ) from error


class StreamManager:
    """The streams of a store. Threads may share it. It borrows the store, and ``close`` leaves that open.

    A stream that does not exist raises `NotFoundError`. ``timeout`` is the default of all calls, in seconds.
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
        self._deletions: Deletions | None = None  # once a stream is deleted
        self._lock = threading.Lock()
        #: Applies the retention policies.
        self.retention: Final = Retention(self.metadata, self._data, self._pending, truncate=self._move_head)
        self._scaling: Final = StreamScaling(self.metadata, self._data, self._pending)
        #: Applies all policies, when they are due.
        self.maintenance: Final = Maintenance([self.retention, self._scaling])
        #: The watermarks of streams whose writers note times.
        self.watermarks: Final = Watermarks(self.metadata, self._data, self._pending)
        #: For transactions.
        self.finished_keys = FinishedKeys(self.metadata)
        #: What this client has done.
        self.counters: Final = Counters(store.counters)
        #: Shared by the writers of this manager.
        self.writer_threads: Final = TaskThreads("writers", self.clock)
        #: Writers to close with this manager. Their threads keep them alive until they are closed.
        self.open_writers: WeakSet[OpenWriter] = WeakSet()
        self._process_id = os.getpid()

    def __repr__(self) -> str:
        return f"StreamManager({self.store.url!r})"

    @property
    def timeout(self) -> float:
        return self.metadata.timeout

    @cached_property
    def copies(self) -> Copies:
        """The steps of `copy`, for a caller that copies the parts elsewhere."""
        with loading():
            from .copying import Copies

        return Copies(self.metadata, self._data, self._pending)

    # ------------------------------------------------------------------ one stream

    def create(
        self,
        name: str,
        *,
        scaling: ScalingPolicy | None = None,
        retention: RetentionPolicy | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> StreamInfo:
        """Create the stream and return it. If it exists with the same config, return it.

        Args:
            name: "scope/name", both of letters, digits, ".", "-" and "_".
            scaling: How many segments it has. Default: one.
            retention: How long it keeps its events. Default: until you truncate it.
            tags: Names and values by which `list` finds it. Default: none.
            timeout: Seconds to wait for the store. Default: the manager's, as in all calls.

        Raises:
            StreamExistsError: The stream exists with another config, or as an incomplete copy.
        """
        return self._create([name], _config(scaling, retention, tags), timeout)[0]

    def create_many(
        self,
        names: Iterable[str],
        *,
        scaling: ScalingPolicy | None = None,
        retention: RetentionPolicy | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Sequence[StreamInfo]:
        """Create streams of one config and return them in this order, as `create` does: many in one step of the store.

        After an error, some of them may exist. Repeat the call to create the others.

        Args:
            names: "scope/name" each.
            scaling: How many segments each of them has. Default: one.
            retention: How long each of them keeps its events. Default: until you truncate it.
            tags: Names and values that each of them gets. Default: none.
            timeout: Seconds to wait for the store in each of many steps.

        Raises:
            StreamExistsError: One of them exists with another config, or as an incomplete copy.
        """
        check_items(names, Iterable, "names")
        config, wanted = _config(scaling, retention, tags), [check_stream_name(name) for name in names]
        different = list(dict.fromkeys(wanted))
        at_once = max(1, min(_STREAMS_AT_ONCE, MAX_CREATED // (config.scaling.segments + 1)))
        found: dict[str, StreamInfo] = {}
        for first in range(0, len(different), at_once):
            part = different[first : first + at_once]
            found |= self._find(part, config, timeout)
            new = [name for name in part if name not in found]
            found |= {info.name: info for info in self._create(new, config, timeout)}
        return [found[name] for name in wanted]

    def _find(self, names: Sequence[str], config: StreamConfig, timeout: float | None) -> Mapping[str, StreamInfo]:
        """Return those of the streams that exist with this config, as far as that is found in one read of the store."""
        found = {}
        for state in self.metadata.peek(names, timeout):
            if state.exists and state.current and state.config == config:
                with suppress(NotFoundError):  # deleted meanwhile
                    found[state.name] = self._data.info(state, self.metadata.deadline(timeout))
        return found

    def _create(self, names: Sequence[str], config: StreamConfig, timeout: float | None) -> Sequence[StreamInfo]:
        if not names:
            return []
        deadline = self.metadata.deadline(timeout)
        for name in names:
            self._register(check_stream_name(name), config, deadline)
        new = [new_stream(check_stream_name(name), secrets.token_hex(8), config) for name in names]
        if self.metadata.create(new, deadline):
            return [self._data.described(state, state.head_cut) for state in new]
        if len(names) > 1:  # some exist
            return [info for name in names for info in self._create([name], config, timeout)]
        return [self._create_in_steps(new[0], deadline)]

    def _register(self, name: str, config: StreamConfig, deadline: Deadline) -> None:
        """Let all processes apply the policies that the stream is about to get."""
        if config.retention is not None:
            self.retention.register(name, deadline)
        if config.scaling.load is not None:
            self._scaling.register(name, deadline)

    def _create_in_steps(self, new: StreamState, deadline: Deadline) -> StreamInfo:
        """Create the stream, whose name may be in use, or may have been. Any client can complete the steps."""
        synchronizer = self.metadata.open_fetched(new.name, deadline, create=True)
        before = synchronizer.state
        if not before.is_in_use:
            self._data.delete_all(before, deadline)  # the rest of an interrupted deletion

        def begin(state: StreamState) -> Iterable[Update[StreamState]]:
            if not state.exists:
                return [CreateStream(incarnation=new.incarnation, config=new.config)]
            if state.config != new.config:
                raise _exists_differently(state, new.config)
            return []

        synchronizer.update_state(begin, timeout=deadline.remaining())
        return self._data.info(self._pending.finish(new.name, deadline), deadline)

    def scale(
        self,
        name: str,
        *,
        split: Sequence[int | str] | None = None,
        merge: Sequence[int | str] | None = None,
        at: str | Sequence[str] | None = None,
        ranges: Sequence[KeyRange | tuple[float, float]] | None = None,
        into: int = 2,
        timeout: float | None = None,
    ) -> StreamInfo:
        """Split or merge segments, and return the stream when the new segments are in use.

        Writers and readers continue meanwhile. Give one of ``split``, ``merge``, ``at`` and ``ranges``.

        Args:
            split: Segments, by number or name; each is split into equal parts.
            merge: At least two neighbours, by number or name, which become one segment.
            at: Routing keys, or one. Their segments are split, so that a new segment begins at each key.
            ranges: Key ranges of new segments, from 0 to 1. They replace all segments that they overlap, and cover all
                keys of these.
            into: The number of parts for ``split``.
            timeout: Seconds to wait for the store.

        Raises:
            InvalidArgumentError: A segment is not of the newest epoch, the segments are not neighbours, a segment
                begins at the key already, or the ranges overlap or leave keys out.
            SealedError: The stream is sealed.
            DeadlineExceededError: Other clients kept changing the stream.
        """
        if sum(each is not None for each in (split, merge, at, ranges)) != 1:
            raise InvalidArgumentError("pass one of split=[...], merge=[...], at=... and ranges=[...]", stream=name)
        check_count(into, "into", at_least=2, at_most=MAX_SEGMENTS)
        if into != 2 and split is None:
            raise InvalidArgumentError("into is for split", stream=name, into=into)
        for which, segments in (("split", split), ("merge", merge)):
            check_items(segments, Sequence, which, or_none=True)
        to_split = [_number(each, name, "split") for each in split or ()]
        to_merge = [_number(each, name, "merge") for each in merge or ()]
        keys = [at] if isinstance(at, str) else at
        for which, each in (("at", keys), ("ranges", ranges)):
            check_items(each, Sequence, which, or_none=True)
            if each is not None and not each:
                raise InvalidArgumentError(f"{which} must not be empty", stream=name)
        for key in keys or ():
            check_key(key, name)
        wanted = None if ranges is None else [_key_range(each) for each in ranges]

        def announce(state: StreamState) -> Iterable[Update[StreamState]]:
            if split is not None:
                return [state.split(to_split, into)]
            if keys is not None:
                return [state.split_at(keys)]
            return [state.merge(to_merge) if wanted is None else state.reshape(wanted)]

        return self._change(name, announce, timeout)

    def seal(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """Seal the stream: it takes no more events, and readers finish at its end. Sealing twice is no error."""
        return self._change(name, lambda state: [] if state.sealing else [AnnounceSeal()], timeout)

    def configure(
        self,
        name: str,
        *,
        scaling: ScalingPolicy | None = None,
        retention: RetentionPolicy | Literal["none"] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> StreamInfo:
        """Change the stream's config.

        Args:
            name: The stream.
            scaling: How many segments it has. A policy that scales by itself changes them as the load asks for; with
                another one the existing segments stay as they are: see `scale`. Default: unchanged.
            retention: How long it keeps its events, or "none": until you truncate it. Default: unchanged.
            tags: All of its tags from now on; an empty mapping removes them. Default: unchanged.
            timeout: Seconds to wait for the store.
        """
        check_type(scaling, ScalingPolicy, "scaling", or_none=True)
        if retention != "none":
            check_type(retention, RetentionPolicy, "retention", or_none=True)
        deadline = self.metadata.deadline(timeout)
        synchronizer = self.metadata.existing(name, deadline)
        if scaling is None and retention is None and tags is None:
            raise InvalidArgumentError("pass scaling, retention or tags", stream=name)
        wanted = _config(scaling, None if retention == "none" else retention, tags)
        self._register(name, wanted, deadline)

        def change(state: StreamState) -> Iterable[Update[StreamState]]:
            config = StreamConfig(
                scaling=scaling or state.config.scaling,
                retention=state.config.retention if retention is None else None if retention == "none" else retention,
                tags=state.config.tags if tags is None else wanted.tags,
            )
            return [] if state.exists and state.config == config else [ConfigureStream(config=config)]

        synchronizer.update_state(change, timeout=deadline.remaining())
        return self._data.info(self._pending.fetch_state(name, deadline), deadline)

    def retain(self, name: str, *, dry_run: bool = False, timeout: float | None = None) -> RetentionReport:
        """Apply the stream's retention policy now, and return what was deleted.

        Processes that read or write any stream of the store do this by themselves, about once a minute.

        Args:
            name: The stream.
            dry_run: Delete nothing, and return what would be deleted.
            timeout: Seconds to wait for the store.

        Raises:
            InvalidArgumentError: The stream has no policy.
        """
        check_type(dry_run, bool, "dry_run")
        return self.retention.report(name, dry_run=dry_run, deadline=self.metadata.deadline(timeout))

    def truncate(self, name: str, cut: StreamCut, *, timeout: float | None = None) -> None:
        """Delete the data before ``cut``. A cut before the present head changes nothing.

        Whole blocks are deleted, so some events before the cut may stay readable.

        Args:
            cut: The new head of the stream.
            timeout: Seconds to wait for the store.

        Raises:
            InvalidArgumentError: The cut belongs to another stream, has gaps, lies inside an event, or has a segment
                together with one of its successors.
        """
        check_type(cut, StreamCut, "cut")
        deadline = self.metadata.deadline(timeout)
        state = self._pending.fetch_state(name, deadline)
        self._data.resolve(state, cut, deadline)
        self._move_head(state, state.check_cut(cut), deadline)

    def _move_head(self, state: StreamState, offsets: Mapping[int, int], deadline: Deadline) -> StreamState:
        """Give up the data before these offsets, and return the state after it."""
        at = self.clock.time()

        def move_head(now: StreamState) -> Iterable[Update[StreamState]]:
            check_not_replaced(now, state)
            head = now.later(now.head, offsets)
            return [] if head == now.head else [TruncateStream(head=Map(head), at=at)]

        moved = self.metadata.existing(state.name, deadline).update_state(move_head, timeout=deadline.remaining())
        self._data.truncate(state, moved, deadline)
        return moved

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
        """Copy the events between two cuts to a new, sealed stream, and return it.

        The target appears when it is complete. Until then, a call with the same names continues an interrupted copy,
        between its original cuts, and `delete` gives the copy up. The positions of reader groups and watermarks are not
        copied.

        Args:
            source: The stream to copy.
            target: The name of the copy.
            by: "segments": the store copies inside itself, all or nothing, and offsets and cuts of the source are valid
                in the target. "events": events pass through this process, and offsets begin at 0. Default: by segments
                if the store can and ``end`` is not inside a block.
            start: A cut, "head" or "tail". Default: "head".
            end: A cut, "head" or "tail". Default: "tail".
            threads: How many segments are copied at a time, by events.
            on_progress: Called with the bytes copied and the bytes of the whole copy, by one thread at a time.
            timeout: Seconds for the whole copy. Default: no limit; each step waits for the store as long as other
                calls.

        Raises:
            StreamExistsError: The target exists and is not this copy.
            InvalidArgumentError: A cut is invalid, or ``end`` is inside a block and ``by`` is "segments".
            UnsupportedError: The store cannot copy by segments.
            TruncatedError: The source was truncated meanwhile.
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
        """Delete the stream and its data, or give an incomplete copy up. Its writers and readers get `NotFoundError`.

        The name can be used again. While the store is full, the call first waits half of ``timeout``; if it is
        interrupted then, delete the stream again.
        """
        self._opened_deletions().delete(name, self.metadata.deadline(timeout))
        with suppress(ReaderGroupError):  # what is left is ignored
            self.watermarks.forget(name)

    def note_deleted_group(self, log: str, length: int) -> None:
        """Note that a group is deleted whose log has this length, so that its name is forgotten when it is time."""
        self._opened_deletions().note_deleted(log, length, self.metadata.deadline())

    def _opened_deletions(self) -> Deletions:
        with loading():
            from .deletions import Deletions

        with self._lock:
            if self._deletions is None:
                self._deletions = Deletions(self.metadata, self._data)
            return self._deletions

    def info(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """Return a description of the stream as it is now, with its load if it scales by itself."""
        deadline = self.metadata.deadline(timeout)
        state = self._pending.fetch_state(name, deadline)
        info = self._data.info(state, deadline)
        with suppress(UnknownUpdateError):
            time = self.watermarks.history(name, state.incarnation, deadline).time
            info = info if time is None else info.model_copy(update={"watermark": time_of(time)})
        report = self._scaling.report(state, deadline)
        return info if report is None else info.model_copy(update={"scaling": report})

    def exists(self, name: str, *, timeout: float | None = None) -> bool:
        return self.metadata.exists(name, self.metadata.deadline(timeout))

    def list(self, scope: str | None = None, *, tag: Tag | None = None, timeout: float | None = None) -> Iterator[str]:
        """Iterate over the names of the streams, of all scopes or of one.

        The metadata of many streams is read at once, and none is kept in memory.

        Args:
            scope: Only streams of this scope.
            tag: Only streams with this tag: its name, or a mapping of tags that they all have.
            timeout: Seconds to wait for each of many steps. Default: the manager's.
        """
        return (state.name for state in self.states(scope, tag=tag, timeout=timeout))

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
        """Return the synchronizer of the stream's metadata. All users of this manager share it; do not close it."""
        return self.metadata.existing(name, self.metadata.deadline(timeout))

    def fetch_state(self, name: str, *, timeout: float | None = None) -> StreamState:
        """Return the stream's metadata, as new as this call, with its first segments created."""
        return self._pending.fetch_state(name, self.metadata.deadline(timeout))

    def states(
        self, scope: str | None = None, *, tag: Tag | None = None, timeout: float | None = None
    ) -> Iterator[StreamState]:
        """Iterate over the metadata of the streams, of all scopes or of one, in order of their names."""
        if not isinstance(tag, str):
            check_type(tag, Mapping, "tag", or_none=True)
            for text in (part for each in (tag or {}).items() for part in each):
                check_type(text, str, "each name and value of tag")
        return (state for state in self.metadata.states(scope, timeout) if has_tag(state.config, tag))

    def describe_all(
        self, scope: str | None = None, *, tag: Tag | None = None, timeout: float | None = None
    ) -> Iterator[StreamInfo]:
        """Iterate over descriptions of the streams, in order of their names. Arguments as of `list`."""
        for state in self.states(scope, tag=tag, timeout=timeout):
            try:
                deadline = self.metadata.deadline(timeout)
                yield self._data.info(state, deadline) if state.current else self.info(state.name, timeout=timeout)
            except NotFoundError:
                continue  # deleted meanwhile

    def finish_pending(self, name: str, *, timeout: float | None = None, forget: str | None = None) -> StreamState:
        """Complete a pending creation, scale, seal or merge of a transaction, and return the state after it.

        ``forget`` is the key of a transaction that no other client will ask for.
        """
        return self._pending.finish(name, self.metadata.deadline(timeout), forget=forget)

    def segment_lengths(
        self, state: StreamState, numbers: Iterable[int], *, timeout: float | None = None
    ) -> Mapping[int, int]:
        """Return the present lengths of these data segments."""
        return self._data.lengths(state, numbers, self.metadata.deadline(timeout))

    def tail_cut(self, state: StreamState) -> StreamCut:
        """Return where the data of the newest epoch in ``state`` ends now."""
        return self._data.tail(state, self.metadata.deadline())

    def resolve(
        self,
        state: StreamState,
        place: Place,
        *,
        timeout: float | None = None,
        argument: str = "place",
    ) -> StreamCut:
        """Return the cut for ``place``: the head, the present tail, or a cut that a reader can start at.

        Errors call the place ``argument``.
        """
        return self._data.resolve(state, place, self.metadata.deadline(timeout), argument=argument)

    def delete_staged(
        self, prefix: str, is_given_up: Callable[[StagedName], bool], *, timeout: float | None = None
    ) -> None:
        """Delete staged segments that are given up under the prefix. Those that cannot be deleted now expire later."""
        self._data.delete_staged(prefix, is_given_up, self.metadata.deadline(timeout))

    def close(self) -> None:
        """Close the writers, and the synchronizers of all streams. Closing twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        deletions = self._deletions
        closes: list[Callable[[], object]] = [partial(close_writers, list(self.open_writers), self.clock)]
        if deletions is not None:
            closes.append(deletions.close)
        close_each([*closes, self.metadata.close])
