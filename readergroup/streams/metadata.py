"""The metadata of streams: one synchronizer for each stream that a client uses, and the names in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from synchronizer import (
    Clock,
    ClosedError,
    Deadline,
    NotFoundError,
    SegmentStore,
    StateSynchronizer,
)
from synchronizer.backoff import Backoff
from synchronizer.threads.flag import Flag

from ..errors import StreamBeingCopiedError
from .config import check_name, check_stream_name
from .open_names import DeletedNames, OpenNames
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
        self._synchronizers: OpenNames[StateSynchronizer[StreamState]] = OpenNames()
        self._deleted = DeletedNames(store)
        self._lock = threading.Lock()
        self._closing = Flag()

    # ------------------------------------------------------------------ how long a call waits

    def deadline(self, timeout: float | None = None) -> Deadline:
        return Deadline(self.clock, self.timeout if timeout is None else timeout)

    def backoff(self, deadline: Deadline | None = None) -> Backoff:
        """Return a backoff for a store that is away or full. It ends at the deadline, or when the client is closed."""
        return Backoff(self.clock, deadline or self.deadline(), self._closing)

    # ------------------------------------------------------------------ one stream

    def existing(
        self, name: str, deadline: Deadline, *, or_being_copied: bool = False
    ) -> StateSynchronizer[StreamState]:
        """Return the stream's synchronizer, just fetched. Raise `NotFoundError` if there is no such stream."""
        synchronizer = self.open(check_stream_name(name), create=False)
        state = synchronizer.fetch_updates(timeout=deadline.remaining())
        if state.is_being_copied and not or_being_copied:
            raise StreamBeingCopiedError(
                "the stream is an unfinished copy; complete it with streams.copy, or discard it with streams.delete",
                stream=name,
            )
        with self._lock:
            if state.exists or state.is_being_copied:
                self._synchronizers.keep(name, synchronizer)
                return synchronizer
            self._synchronizers.let_go(name)
        raise not_found(name)

    def open(self, name: str, *, create: bool) -> StateSynchronizer[StreamState]:
        """Return the synchronizer of this name, whether or not such a stream exists now.

        A name that was never used raises `NotFoundError`, unless ``create`` begins its metadata.
        """
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
            _ = opened.state  # raises if a creation was interrupted before its first entry
        except NotFoundError as error:
            raise not_found(name) from error
        with self._lock:
            synchronizer = self._synchronizers.keep(name, opened)
            unused = self._closing.is_set() or synchronizer is not opened
        if unused:
            opened.close()
        return synchronizer

    # ------------------------------------------------------------------ the names

    def exists(self, name: str, deadline: Deadline) -> bool:
        try:
            self.existing(name, deadline)
        except NotFoundError:
            return False
        return True

    def names(
        self, scope: str | None, timeout: float | None, is_wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[str]:
        """Iterate over the names of the streams, of all scopes or of one. ``timeout`` is for each name."""
        prefix = _LOG_PREFIX if scope is None else f"{_LOG_PREFIX}{check_name(scope, 'scope')}/"
        backoff = self.backoff(self.deadline(timeout))
        logs = backoff.retry(lambda: self._deleted.others(list(self.store.list(prefix))))
        wanted = [log for log in logs if is_wanted(log.removeprefix(_LOG_PREFIX))]
        return (log.removeprefix(_LOG_PREFIX) for log in wanted if self._is_in_use(log, timeout))

    def _is_in_use(self, log: str, timeout: float | None) -> bool:
        name = log.removeprefix(_LOG_PREFIX)
        if name in self._synchronizers:
            return self.exists(name, self.deadline(timeout))
        length = self.backoff(self.deadline(timeout)).retry(lambda: self._deleted.length(log))
        exists = self.exists(name, self.deadline(timeout))
        if not exists:
            self._deleted.add(log, length)
        return exists

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
