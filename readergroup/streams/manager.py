"""Managing streams: create, scale, configure, seal, truncate, delete, and look at them.

There is no controller. What a stream is lies in its metadata (`state.py`); this module takes the steps in the store
that belong to it. Every step can be repeated, so any client completes what another one began (`finish_pending`).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol
from weakref import WeakSet

from synchronizer import (
    DEFAULT_STATE_LIMIT_BYTES,
    AlreadyExistsError,
    Clock,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    Flag,
    InvalidArgumentError,
    Map,
    NotFoundError,
    Patience,
    ReaderGroupError,
    SealedError,
    SegmentInfo,
    SegmentStore,
    StateSynchronizer,
    StoreFullError,
    Update,
    checked,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import clock_or_system

from ..errors import CorruptDataError, StreamBeingCopiedError, StreamExistsError
from .config import (
    ScalingPolicy,
    StagedName,
    StreamConfig,
    StreamCut,
    StreamInfo,
    check_name,
    check_stream_name,
    staging_prefix,
)
from .copying import By, OnProgress, copy_stream
from .data.places import Place, check_offset
from .data.segment_reader import block_start
from .deletions import Deletion, Deletions
from .open_names import DeletedNames, OpenNames
from .state import (
    STREAM_UPDATES,
    AnnounceSeal,
    ConfigureStream,
    CreateStream,
    DeleteStream,
    FinishTransaction,
    ForgetSegments,
    ForgetTransactions,
    PublishScale,
    Scale,
    SealStream,
    StreamState,
    TruncateStream,
)
from .transactions.committed import CommittedTransaction
from .transactions.merging import Merge
from .writing.marks import WRITER_RETENTION_SECONDS

_logger = logging.getLogger(__name__)

_LOG_PREFIX: Final = "stream/"


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
        self.timeout = timeout
        self._state_limit_bytes = state_limit_bytes
        self._synchronizers: OpenNames[StateSynchronizer[StreamState]] = OpenNames()
        self._deleted = DeletedNames(store)
        #: They are closed with this; the thread of each keeps it until it is closed.
        self.open_writers: WeakSet[Closable] = WeakSet()
        self._finished_keys: dict[str, set[str]] = {}  # of transactions, for each stream; nobody asks for them again
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._closing = Flag()
        self._deletions = Deletions(store, self.clock, timeout, self._finish_deletion)

    # ------------------------------------------------------------------ one stream

    def create(self, name: str, *, scaling: ScalingPolicy | None = None, timeout: float | None = None) -> StreamInfo:
        """Create the stream, with one segment if ``scaling`` does not say otherwise. One that exists is returned.

        If that has another config it raises `StreamExistsError`.
        """
        deadline = self._deadline(timeout)
        config = StreamConfig() if scaling is None else StreamConfig(scaling=scaling)
        synchronizer = self._synchronizer(check_stream_name(name), create=True)
        before = synchronizer.fetch_updates(timeout=deadline.remaining())
        if not before.exists and not before.is_being_copied:
            self._delete_data(before, deadline)  # what a deletion that was cut off left behind

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
        return self._info(self.finish_pending(name, timeout=deadline.remaining()), deadline)

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

        return self._announce(name, announce, self._deadline(timeout))

    def seal(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """End the stream: it takes no further events, and readers that come to its end are done. Twice is no error."""
        return self._announce(name, lambda state: [] if state.sealing else [AnnounceSeal()], self._deadline(timeout))

    def configure(self, name: str, *, scaling: ScalingPolicy, timeout: float | None = None) -> StreamInfo:
        """Change the stream's config. The segments that it has stay as they are: see `scale`."""
        deadline = self._deadline(timeout)
        config = StreamConfig(scaling=scaling)
        self._existing(name, deadline).update_state(
            lambda state: [] if state.exists and state.config == config else [ConfigureStream(config=config)],
            timeout=deadline.remaining(),
        )
        return self._info(self.fetch_state(name, timeout=deadline.remaining()), deadline)

    def truncate(self, name: str, cut: StreamCut, *, timeout: float | None = None) -> None:
        """Give up the data before ``cut``. What lies before the present head already changes nothing.

        Data goes in whole blocks, so some events before the cut may stay readable.
        """
        check_type(cut, StreamCut, "cut")
        deadline = self._deadline(timeout)
        state = self.fetch_state(name, timeout=deadline.remaining())
        self.resolve(state, cut, timeout=deadline.remaining())
        offsets = state.check_cut(cut)
        at = self.clock.time()

        def move_head(now: StreamState) -> Iterable[Update[StreamState]]:
            _check_same(now, state)
            return [] if now.precedes(cut, now.head_cut) else [TruncateStream(head=Map(offsets), at=at)]

        state = self._existing(name, deadline).update_state(move_head, timeout=deadline.remaining())
        self._truncate_data(state, deadline)
        self._forget_retired(state, deadline)

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
        return copy_stream(
            self,
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
        deadline = self._deadline(timeout)
        while True:
            synchronizer = self._existing(name, deadline, or_being_copied=True)
            deleted = self._end(synchronizer, synchronizer.state, deadline)
            if deleted is not None:
                break
        self._delete_data(deleted, deadline)
        self._deletions.look_through()

    def _end(
        self, synchronizer: StateSynchronizer[StreamState], seen: StreamState, deadline: Deadline
    ) -> StreamState | None:
        """Let the metadata say that the stream is deleted; None if there is another one of the name by now."""
        try:
            self._deletions.announce(seen.name, seen.incarnation, timeout=deadline.remaining() / 2)
        except DeadlineExceededError as error:
            if not isinstance(error.__cause__, StoreFullError):
                raise
            _logger.warning(
                "the store is full, so the deletion of stream %s is not announced: if it is cut off, delete again",
                seen.name,
            )

        def end(now: StreamState) -> tuple[Iterable[Update[StreamState]], StreamState | None]:
            if now.incarnation != seen.incarnation:
                return [], None
            return ([DeleteStream()] if now.exists or now.is_being_copied else []), now

        return synchronizer.update_state_returning(end, timeout=deadline.remaining())

    def info(self, name: str, *, timeout: float | None = None) -> StreamInfo:
        """What the stream looks like now."""
        deadline = self._deadline(timeout)
        return self._info(self.fetch_state(name, timeout=deadline.remaining()), deadline)

    def exists(self, name: str, *, timeout: float | None = None) -> bool:
        try:
            self._existing(name, self._deadline(timeout))
        except NotFoundError:
            return False
        return True

    def list(self, scope: str | None = None, *, timeout: float | None = None) -> Iterator[str]:
        """The names of the streams, of all scopes or of one."""
        prefix = _LOG_PREFIX if scope is None else f"{_LOG_PREFIX}{check_name(scope, 'scope')}/"
        patience = self._patience(self._deadline(timeout))
        logs = patience.call(lambda: self._deleted.others(list(self.store.list(prefix))))
        return (log.removeprefix(_LOG_PREFIX) for log in logs if self._is_in_use(log, timeout))

    def _is_in_use(self, log: str, timeout: float | None) -> bool:
        name = log.removeprefix(_LOG_PREFIX)
        if name in self._synchronizers:
            return self.exists(name, timeout=timeout)
        length = self._patience(self._deadline(timeout)).call(lambda: self._deleted.length(log))
        exists = self.exists(name, timeout=timeout)
        if not exists:
            self._deleted.add(log, length)
        return exists

    # ------------------------------------------------------------------ for writers and readers

    def synchronizer(self, name: str, *, timeout: float | None = None) -> StateSynchronizer[StreamState]:
        """The synchronizer of the stream's metadata, shared by all who use this manager. Not to be closed."""
        return self._existing(name, self._deadline(timeout))

    def fetch_state(self, name: str, *, timeout: float | None = None) -> StreamState:
        """The stream's metadata, as new as this call, with its first segments created."""
        deadline = self._deadline(timeout)
        state = self._existing(name, deadline).state
        return state if state.current else self.finish_pending(name, timeout=deadline.remaining())

    def finish_pending(self, name: str, *, timeout: float | None = None, forget: str | None = None) -> StreamState:
        """Complete the creation, scale, seal or merge that a client began, if there is one; the state after it.

        ``forget`` is the key of a transaction that nobody but the caller will ask for.
        """
        deadline = self._deadline(timeout)
        synchronizer = self._existing(name, deadline)
        state = synchronizer.state
        while True:
            before = state
            if state.scale is not None:
                state = self._finish_scale(synchronizer, state, state.scale, deadline)
            if state.sealing and not state.sealed:
                state = self._finish_seal(synchronizer, state, deadline)
            if (transaction := state.known_transactions.open) is not None:
                state = self._finish_transaction(synchronizer, state, transaction, deadline, forget)
            if not state.exists:
                raise _not_found(name)
            if state.incarnation == before.incarnation:
                return state
            # Deleted and created again meanwhile: what is pending now is the other stream's.

    def forget_later(self, state: StreamState, key: str) -> None:
        """Nobody will ask for this key of a transaction again: the next commit of this client forgets it.

        ``state`` has seen the end of that transaction. If the process dies first, the key is forgotten when it is old.
        """
        if key in state.known_transactions.committers:
            with self._lock:
                self._finished_keys.setdefault(state.name, set()).add(key)

    def forgettable(self, state: StreamState) -> Sequence[ForgetTransactions]:
        """The update, if any, that lets the stream forget the keys that nobody will ask for again."""
        with self._lock:
            finished = sorted(self._finished_keys.get(state.name, ()))
        keys = tuple(key for key in finished if key in state.known_transactions.committers)
        return [ForgetTransactions(keys=keys)] if keys else []

    def are_forgotten(self, name: str, updates: Iterable[ForgetTransactions]) -> None:
        """These updates, from `forgettable`, are stored."""
        with self._lock:
            for update in updates:
                self._finished_keys[name].difference_update(update.keys)

    def forget_transactions(self, name: str) -> None:
        """Let the stream forget these keys now. If that fails, they are forgotten when they are old."""
        with self._lock:
            if not self._finished_keys.get(name):
                return
        deadline = self._deadline(None)
        try:
            forgotten = self._existing(name, deadline).update_state_returning(
                lambda state: (updates := self.forgettable(state), updates), timeout=deadline.remaining()
            )
        except ReaderGroupError:
            return
        self.are_forgotten(name, forgotten)

    def segment_lengths(
        self, state: StreamState, numbers: Iterable[int], *, timeout: float | None = None
    ) -> Mapping[int, int]:
        """How long these data segments are now."""
        patience = self._patience(self._deadline(timeout))
        return {number: self._segment_info(state.data_segment(number), patience).length for number in numbers}

    def tail_cut(self, state: StreamState, *, timeout: float | None = None) -> StreamCut:
        """Where the data of the newest epoch in ``state`` ends now."""
        return state.cut(self.segment_lengths(state, state.current, timeout=timeout))

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
        deadline = self._deadline(timeout)
        if place == "head":
            return state.head_cut
        if place == "tail":
            return tail or self.tail_cut(state, timeout=deadline.remaining())
        if not isinstance(place, StreamCut):
            raise InvalidArgumentError(f"{argument} is a StreamCut, 'head' or 'tail'", place=place)
        patience = self._patience(deadline)
        for number, offset in state.check_cut(place).items():
            patience.call(partial(check_offset, self.store, state.segment(number), state.incarnation, offset))
        return place

    def delete_staged(
        self, prefix: str, is_given_up: Callable[[StagedName], bool], *, timeout: float | None = None
    ) -> None:
        """Delete what is staged under the prefix and given up. What cannot be deleted now is when it is old."""
        is_given_up = checked(is_given_up, "what says whether a part is given up")
        patience = self._patience(self._deadline(timeout))
        try:
            for segment in patience.call(lambda: list(self.store.list(prefix))):
                if is_given_up(StagedName.of(segment)):
                    patience.call(partial(self.store.forget, segment))
        except InvalidArgumentError:
            raise
        except ReaderGroupError:
            return

    def close(self) -> None:
        """Close the writers, and the synchronizers of all streams. Twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        with ExitStack() as closing:  # each of them, whatever the others raise; the last one first
            closing.callback(self._close_synchronizers)
            for writer in list(self.open_writers):
                closing.callback(writer.close)

    def _close_synchronizers(self) -> None:
        self._deletions.close()
        self._closing.set()
        with self._lock:
            synchronizers = self._synchronizers.values()
        for synchronizer in synchronizers:
            synchronizer.close()

    # ------------------------------------------------------------------ completing what was announced

    def _announce(
        self,
        name: str,
        announce: Callable[[StreamState], Iterable[Update[StreamState]]],
        deadline: Deadline,
    ) -> StreamInfo:
        """Announce it when nothing else is, and complete it."""

        def when_nothing_is_pending(state: StreamState) -> tuple[Iterable[Update[StreamState]], StreamState | None]:
            if not state.exists:
                raise _not_found(name)
            return ([], None) if state.is_pending else (announce(state), state)

        while True:
            self.finish_pending(name, timeout=deadline.remaining())
            synchronizer = self._existing(name, deadline)
            then = synchronizer.update_state_returning(when_nothing_is_pending, timeout=deadline.remaining())
            if then is not None:
                now = self.finish_pending(name, timeout=deadline.remaining())
                _check_same(now, then)
                return self._info(now, deadline)
            if deadline.passed:
                raise DeadlineExceededError("other clients kept scaling the stream; nothing was done", stream=name)

    def _finish_scale(
        self, synchronizer: StateSynchronizer[StreamState], state: StreamState, scale: Scale, deadline: Deadline
    ) -> StreamState:
        patience = self._patience(deadline)
        created = [state.data_segment(each.number) for each in scale.successors]
        try:
            for segment in created:
                self._create_segment(segment, patience)
            for number in scale.predecessors:
                self._seal_segment(state.data_segment(number), patience)
        except (AlreadyExistsError, NotFoundError):
            # A name that was deleted: this scale is long done, or the stream is deleted. Its state tells.
            now = synchronizer.fetch_updates(timeout=deadline.remaining())
            if now.exists and now.incarnation == state.incarnation and now.scale == scale:
                raise
        else:
            now = synchronizer.update_state(
                lambda now: [PublishScale(epoch=now.epoch + 1)] if _is_open(now, state, scale) else [],
                timeout=deadline.remaining(),
            )
        if now.incarnation != state.incarnation or not now.exists:
            for segment in created:
                self._delete_segment(segment, patience)
        return now

    def _finish_seal(
        self, synchronizer: StateSynchronizer[StreamState], state: StreamState, deadline: Deadline
    ) -> StreamState:
        patience = self._patience(deadline)
        try:
            for number in state.current:
                self._seal_segment(state.data_segment(number), patience)
        except NotFoundError:  # deleted meanwhile
            return synchronizer.fetch_updates(timeout=deadline.remaining())
        return synchronizer.update_state(
            lambda now: (
                [SealStream()] if now.incarnation == state.incarnation and now.sealing and not now.sealed else []
            ),
            timeout=deadline.remaining(),
        )

    def _finish_transaction(
        self,
        synchronizer: StateSynchronizer[StreamState],
        state: StreamState,
        transaction: CommittedTransaction,
        deadline: Deadline,
        forget: str | None,
    ) -> StreamState:
        def is_open(now: StreamState) -> bool:
            return now.incarnation == state.incarnation and now.known_transactions.open == transaction

        try:
            Merge(self.store, state, transaction, deadline, self._patience(deadline)).run()
        except (NotFoundError, SealedError) as error:
            # It was merged meanwhile, and the stream has gone on; or it is deleted. Its state tells.
            now = synchronizer.fetch_updates(timeout=deadline.remaining())
            if is_open(now):
                raise CorruptDataError(
                    "the store has lost what belongs to a committed transaction; restore it, or delete the stream",
                    stream=state.name,
                    cause=str(error),
                ) from error
            return now
        finished = FinishTransaction(sequence=transaction.sequence, forget=forget == transaction.key or None)
        try:
            now = synchronizer.update_state(
                lambda now: [finished] if is_open(now) else [], timeout=deadline.remaining()
            )
        except ReaderGroupError:
            if not finished.forget:
                raise
            # All events are there; and who asks again for a key that may be forgotten would commit it again.
            now = synchronizer.state
        prefix = staging_prefix(state.name, state.incarnation, transaction.key, transaction.generation)
        self.delete_staged(prefix, lambda _: True, timeout=deadline.remaining())
        return now

    # ------------------------------------------------------------------ data

    def _truncate_data(self, state: StreamState, deadline: Deadline) -> None:
        patience = self._patience(deadline)
        for number, each in state.segments.items():
            segment = state.data_segment(number)
            if each.retired_at is not None:
                self._truncate_segment(segment, None, patience)
            elif number in state.head:
                self._truncate_segment(segment, state.head[number], patience)

    def _truncate_segment(self, segment: str, offset: int | None, patience: Patience) -> None:
        """Give up the blocks that lie wholly before ``offset``; None: all."""
        try:
            info = self._segment_info(segment, patience)
            to = info.length if offset is None else offset
            if to > info.start_offset:
                start = patience.call(lambda: block_start(self.store, segment, to))
                patience.call(lambda: self.store.truncate(segment, start))
        except NotFoundError:
            return  # deleted already

    def _forget_retired(self, state: StreamState, deadline: Deadline) -> None:
        """Delete what was retired so long ago that no writer asks for it any more."""
        before = self.clock.time() - WRITER_RETENTION_SECONDS
        old = [n for n, each in state.segments.items() if each.retired_at is not None and each.retired_at < before]
        if not old:
            return
        patience = self._patience(deadline)
        for number in old:
            self._delete_segment(state.data_segment(number), patience)

        def forget(now: StreamState) -> Iterable[Update[StreamState]]:
            left = tuple(number for number in old if number in now.segments)
            return [ForgetSegments(numbers=left)] if left and now.incarnation == state.incarnation else []

        self._existing(state.name, deadline).update_state(forget, timeout=deadline.remaining())

    def _delete_data(self, state: StreamState, deadline: Deadline) -> None:
        if state.incarnation:
            patience = self._patience(deadline)
            staged = staging_prefix(state.name, state.incarnation)
            for segment in patience.call(lambda: list(self.store.list(state.data_prefix))):
                if segment.startswith(staged):
                    patience.call(partial(self.store.forget, segment))
                else:
                    self._delete_segment(segment, patience)

    def _finish_deletion(self, deletion: Deletion) -> bool:
        """Delete what is left of the stream; False if its metadata does not say that it is deleted."""
        deadline = self._deadline(None)
        state = self._synchronizer(deletion.stream, create=False).fetch_updates(timeout=deadline.remaining())
        if state.incarnation == deletion.incarnation and (state.exists or state.is_being_copied):
            return False
        self._delete_data(StreamState(name=deletion.stream, incarnation=deletion.incarnation), deadline)
        return True

    def _create_segment(self, segment: str, patience: Patience) -> None:
        patience.call(lambda: self.store.create(segment))

    def _seal_segment(self, segment: str, patience: Patience) -> None:
        patience.call(lambda: self.store.seal(segment))

    def _segment_info(self, segment: str, patience: Patience) -> SegmentInfo:
        return patience.call(lambda: self.store.info(segment))

    def _delete_segment(self, segment: str, patience: Patience) -> None:
        try:
            patience.call(lambda: self.store.delete(segment))
        except NotFoundError:
            return  # it was never created

    # ------------------------------------------------------------------ metadata

    def _info(self, state: StreamState, deadline: Deadline) -> StreamInfo:
        return StreamInfo(
            name=state.name,
            incarnation=state.incarnation,
            config=state.config,
            epoch=state.epoch,
            segments={state.segment(n): state.segments[n].keys for n in state.current},
            head=state.head_cut,
            tail=self.tail_cut(state, timeout=deadline.remaining()),
            sealed=state.sealed,
        )

    def _existing(
        self, name: str, deadline: Deadline, *, or_being_copied: bool = False
    ) -> StateSynchronizer[StreamState]:
        """The stream's synchronizer, just fetched; `NotFoundError` if there is no such stream."""
        synchronizer = self._synchronizer(check_stream_name(name), create=False)
        state = synchronizer.fetch_updates(timeout=deadline.remaining())
        if state.is_being_copied and not or_being_copied:
            raise StreamBeingCopiedError(
                "the stream is being copied; streams.copy completes it, streams.delete gives it up", stream=name
            )
        with self._lock:
            if state.exists or state.is_being_copied:
                self._synchronizers.keep(name, synchronizer)
                return synchronizer
            self._synchronizers.let_go(name)
        raise _not_found(name)

    def _synchronizer(self, name: str, *, create: bool) -> StateSynchronizer[StreamState]:
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("the client is closed; open another", stream=name)
            if (found := self._synchronizers.get(name)) is not None:
                return found
        try:
            opened = StateSynchronizer(
                self.store,
                f"{_LOG_PREFIX}{name}",
                initial=StreamState(name=name) if create else None,
                state_type=StreamState,
                updates=STREAM_UPDATES,
                clock=self.clock,
                timeout=self.timeout,
                state_limit_bytes=self._state_limit_bytes,
            )
            _ = opened.state  # there is none where a creation was cut off before its first entry
        except NotFoundError as error:
            raise _not_found(name) from error
        with self._lock:
            synchronizer = self._synchronizers.keep(name, opened)
            unused = self._closing.is_set() or synchronizer is not opened
        if unused:
            opened.close()
        return synchronizer

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    def _patience(self, deadline: Deadline) -> Patience:
        return Patience(self.clock, deadline, self._closing)


def _is_open(now: StreamState, then: StreamState, scale: Scale) -> bool:
    return now.exists and now.incarnation == then.incarnation and now.scale == scale


def _check_same(now: StreamState, then: StreamState) -> None:
    if not now.exists or now.incarnation != then.incarnation:
        raise NotFoundError("the stream was deleted meanwhile", stream=then.name)


def _not_found(name: str) -> NotFoundError:
    return NotFoundError("there is no stream of this name; create it with streams.create", stream=name)
