"""The metadata of streams: one synchronizer for each stream that a client uses, and the names in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from synchronizer import (
    AlreadyExistsError,
    Clock,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    Revision,
    SegmentStore,
    StateSynchronizer,
    StorePermissionError,
    StoreUnavailableError,
    Update,
)
from synchronizer.backoff import Backoff
from synchronizer.log.beginning import begins_in_one_step, first_entry
from synchronizer.log.peeking import LOGS_AT_ONCE, peek
from synchronizer.log.replica import Replica
from synchronizer.state import StateCodec
from synchronizer.store import MAX_CREATED
from synchronizer.threads.flag import Flag

from ..errors import StreamBeingCopiedError
from .config import check_name, check_stream_name
from .open_names import DeletedNames, OpenNames, first_offset
from .state import STREAM_UPDATES, StreamState

_LOG_PREFIX: Final = "stream/"


class StreamMetadata:
    """The metadata of a store's streams, as one client knows it. Threads may share it. It borrows the store.

    The client's threads share each synchronizer. `close` closes them all.
    """

    def __init__(self, store: SegmentStore, clock: Clock, timeout: float, state_limit_bytes: int) -> None:
        self.store = store
        self.clock = clock
        #: The default of all calls, in seconds.
        self.timeout = timeout
        self._state_limit_bytes = state_limit_bytes
        self._codec = StateCodec(StreamState, STREAM_UPDATES)
        self._synchronizers: OpenNames[StateSynchronizer[StreamState]] = OpenNames()
        self._deleted = DeletedNames(store)
        self._lock = threading.Lock()
        self._closing = Flag()

    # ------------------------------------------------------------------ how long a call waits

    def deadline(self, timeout: float | None = None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    @property
    def closing(self) -> threading.Event:
        """Set when the client is closed."""
        return self._closing

    def backoff(self, deadline: Deadline | None = None) -> Backoff:
        """Return a backoff for a store that is away or full. It ends at the deadline, or when the client is closed."""
        return Backoff(self.clock, deadline or self.deadline(), self._closing)

    # ------------------------------------------------------------------ one stream

    def existing(
        self, name: str, deadline: Deadline, *, or_being_copied: bool = False
    ) -> StateSynchronizer[StreamState]:
        """Return the stream's synchronizer, just fetched. Raise `NotFoundError` if there is no such stream."""
        synchronizer = self.open_fetched(check_stream_name(name), deadline)
        state = synchronizer.state
        if state.is_being_copied and not or_being_copied:
            raise StreamBeingCopiedError(
                "the stream is an unfinished copy; complete it with streams.copy, or discard it with streams.delete",
                stream=name,
            )
        with self._lock:
            if state.is_in_use:
                self._synchronizers.keep(name, synchronizer)
                return synchronizer
            self._synchronizers.let_go(name)
        raise not_found(name)

    def open_fetched(self, name: str, deadline: Deadline, *, create: bool = False) -> StateSynchronizer[StreamState]:
        """Return the synchronizer of this name as `open` does, just fetched, also if its log was forgotten before."""
        synchronizer = self.open(name, create=create, deadline=deadline)
        try:
            synchronizer.fetch_updates(timeout=deadline.remaining())
            return synchronizer
        except NotFoundError as error:  # the log was forgotten since this client opened it
            with self._lock:
                self._synchronizers.drop(name, synchronizer)
            if not create:
                raise not_found(name) from error
        return self.open_fetched(name, deadline, create=create)

    def open(self, name: str, *, create: bool, deadline: Deadline | None = None) -> StateSynchronizer[StreamState]:
        """Return the synchronizer of this name, whether or not such a stream exists now.

        A name that was never used raises `NotFoundError`, unless ``create`` begins its metadata. The first use of a
        name waits for the store until the deadline. Default: as long as the timeout of the client.
        """
        with self._lock:
            self._check_open(name)
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
                timeout=self.timeout if deadline is None else deadline.remaining(self.timeout),
                state_limit_bytes=self._state_limit_bytes,
                first_offset=first_offset(self.clock),
            )
            opened.timeout = self.timeout
            _ = opened.state  # raises if a creation was interrupted before its first entry
        except NotFoundError as error:
            raise not_found(name) from error
        with self._lock:
            synchronizer = self._synchronizers.keep(name, opened)
            unused = self._closing.is_set() or synchronizer is not opened
        if unused:
            opened.close()
        return synchronizer

    def has_room_for(self, update: Update[StreamState], state: StreamState) -> bool:
        """Return whether the state may become as large as the update makes it."""
        return self._codec.size(update.apply_to(state, Revision(0, 0))) <= self._state_limit_bytes

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Keep the stream open after the block only if it was before, so that many can be used one after the other."""
        was_open = name in self._synchronizers
        try:
            yield
        finally:
            if not was_open:
                self.let_go((name,))

    def let_go(self, names: Iterable[str]) -> None:
        """Forget these streams, as far as nothing else in this process uses them. The next use opens them again."""
        with self._lock:
            for name in names:
                self._synchronizers.let_go(name)

    def create(self, states: Sequence[StreamState], deadline: Deadline) -> bool:
        """Create the metadata of new streams, and their segments, in one step; return whether that was done.

        It is not if one of the names was used before, or if the store cannot do it in one step.
        """
        with self._lock:
            for state in states:
                self._check_open(state.name)
                if self._synchronizers.get(state.name) is not None:
                    return False
        created = {}
        starts = {f"{_LOG_PREFIX}{state.name}": first_offset(self.clock) for state in states}
        for log, state in zip(starts, states, strict=True):
            created[log] = first_entry(log, state, self._codec, self._state_limit_bytes)
            created |= dict.fromkeys(map(state.data_segment, state.current), b"")
        if len(created) > MAX_CREATED or not begins_in_one_step(self.store, b"".join(created.values())):
            return False
        try:
            return self.backoff(deadline).retry(lambda: self.store.create_together(created, start_offsets=starts))
        except AlreadyExistsError:
            return False
        except StorePermissionError:
            raise
        except StoreUnavailableError as error:
            raise DeadlineExceededError(
                "the store did not confirm in time that the stream was created; create it again",
                stream=states[0].name,
                cause=str(error),
            ) from error

    def _check_open(self, name: str) -> None:
        if self._closing.is_set():
            raise ClosedError("the client is closed; open another", stream=name)

    # ------------------------------------------------------------------ the names

    def exists(self, name: str, deadline: Deadline) -> bool:
        try:
            self.existing(name, deadline)
        except NotFoundError:
            return False
        return True

    def states(
        self, scope: str | None, timeout: float | None, is_wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[StreamState]:
        """Iterate over the metadata of the streams whose names are wanted, in order of their names.

        Many are read at once, and none is kept, so that a store may have any number of streams. ``timeout`` is for each
        of many steps.
        """
        prefix = _LOG_PREFIX if scope is None else f"{_LOG_PREFIX}{check_name(scope, 'scope')}/"
        backoff = self.backoff(self.deadline(timeout))
        logs = backoff.retry(lambda: self._deleted.others(list(self.store.list(prefix))))
        wanted = [log for log in logs if is_wanted(log.removeprefix(_LOG_PREFIX))]
        parts = (wanted[first : first + LOGS_AT_ONCE] for first in range(0, len(wanted), LOGS_AT_ONCE))
        return (state for part in parts for state in self._existing(part, timeout))

    def peek(self, names: Sequence[str], timeout: float | None) -> Sequence[StreamState]:
        """Return the metadata of those names whose metadata one read of the store finds."""
        peeked = self._peek([f"{_LOG_PREFIX}{name}" for name in names], timeout)
        return [replica.state for _, replica in peeked if replica is not None and replica.state is not None]

    def _peek(self, logs: Sequence[str], timeout: float | None) -> Iterator[tuple[str, Replica[StreamState] | None]]:
        return self.backoff(self.deadline(timeout)).retry(lambda: peek(self.store, logs, self._codec))

    def _existing(self, logs: Sequence[str], timeout: float | None) -> Iterator[StreamState]:
        for log, replica in self._peek(logs, timeout):
            state = self._read_alone(log, timeout) if replica is None else replica.state
            if state is not None and state.exists:
                yield state
            elif replica is not None and not (state and state.is_being_copied):
                self._note_deleted(log, replica.next_offset)

    def _note_deleted(self, log: str, length: int) -> None:
        self._deleted.add(log, length)
        self.let_go((log.removeprefix(_LOG_PREFIX),))

    def _read_alone(self, log: str, timeout: float | None) -> StreamState | None:
        name = log.removeprefix(_LOG_PREFIX)
        with self.used(name):
            try:
                length = self.backoff(self.deadline(timeout)).retry(lambda: self._deleted.length(log))
            except NotFoundError:
                return None  # the name was forgotten meanwhile
            try:
                return self.existing(name, self.deadline(timeout)).state
            except NotFoundError:
                self._deleted.add(log, length)
                return None

    def close(self) -> None:
        """End the calls that wait, and close all synchronizers. Closing twice is no error."""
        self._closing.set()
        with self._lock:
            synchronizers = self._synchronizers.values()
        for synchronizer in synchronizers:
            synchronizer.close()


def not_found(name: str) -> NotFoundError:
    return NotFoundError("there is no stream of this name; create it with streams.create", stream=name)


def check_not_replaced(now: StreamState, then: StreamState) -> None:
    """Raise `NotFoundError` if the stream of ``then`` was deleted, even if its name has another stream now."""
    if not now.exists or now.incarnation != then.incarnation:
        raise NotFoundError("the stream was deleted", stream=then.name)
