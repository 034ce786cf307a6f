"""The state as far as one process has applied the log: values and pure functions."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, NamedTuple

from ..callables import check_returned
from ..errors import CorruptStateError, InvalidArgumentError, ReaderGroupError
from ..state import AWAIT_FIRST, S, StateCodec, Update
from .entries import Entry, Mark, Revision

#: How many transitions a feed keeps undrained. It replaces more of them by one with ``gap``.
MAX_TRANSITIONS: Final = 10_000


class Replica(NamedTuple, Generic[S]):
    """``state`` after all entries before ``next_offset``; None if it was not initialized, or was deleted."""

    state: S | None = None
    revision: Revision = Revision(0, 0)
    next_offset: int = 0
    checksum: int = 0  # of the last entry; the next one repeats it

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the log. Two replicas at the same place have the same state."""
        return self.next_offset, self.checksum

    def apply(self, entry: Entry, body: S | None | list[Update[S]]) -> tuple[Replica[S], Transition[S]]:
        """Return the replica after ``entry``, whose decoded body is ``body``. Raise what ``apply_to`` raises."""
        assert entry.offset == self.next_offset, (entry.offset, self.next_offset)
        state = self.state
        updates: tuple[Update[S], ...] = ()
        if isinstance(body, list):
            if state is None:
                raise CorruptStateError("the log contains updates of a state that does not exist")
            updates = tuple(body)
            for index, update in enumerate(updates):
                revision = Revision(entry.offset, index)
                state = _applied(update, state, revision)
        else:
            state, revision = body, Revision(entry.offset, 0)
        after = Replica(state, revision, entry.end, entry.checksum)
        return after, Transition(self.state, state, revision, updates)

    def follow(self, entry: Entry, codec: StateCodec[S], segment: str) -> tuple[Replica[S], Transition[S]]:
        """Decode and apply an entry of the log. Raise an error that stops the replica if that fails."""
        try:
            body = codec.decode_body(entry.body)
        except ReaderGroupError as error:
            _locate(error, segment, Revision(entry.offset, 0))
            raise
        try:
            return self.apply(entry, body)
        except Exception as error:
            raise CorruptStateError(
                "an update in the log cannot be applied; check whether its apply_to changed after it was written",
                segment=segment,
                revision=str(Revision(entry.offset, 0)),
            ) from error

    @classmethod
    def from_snapshot(cls, mark: Mark, body: bytes, codec: StateCodec[S]) -> Replica[S]:
        try:
            state, checksum = codec.decode_snapshot(body)
        except ReaderGroupError as error:
            _locate(error, mark.snapshot, mark.revision)
            raise
        return cls(state, mark.revision, mark.next_offset, checksum)


def _applied(update: Update[S], state: S, revision: Revision) -> S:
    after = update.apply_to(state, revision)
    if type(after) is not type(state):
        check_returned(after, "apply_to", advice=AWAIT_FIRST, update=type(update).__name__)
        raise InvalidArgumentError(
            "apply_to must return a state of the same class",
            update=type(update).__name__,
            returned=type(after).__name__,
        )
    return after


def _locate(error: ReaderGroupError, segment: str, revision: Revision) -> None:
    """Add the place to the facts of an error."""
    error.facts = {"segment": segment, "revision": str(revision), **error.facts}


class AppliedUpdate(NamedTuple, Generic[S]):
    """An update and the state that it made. None as update: the state was initialized or deleted, or there is a gap."""

    revision: Revision
    update: Update[S] | None
    state: S | None  # None: it was deleted
    gap: bool = False  # the updates between the previous call and this state are not known


class Transition(NamedTuple, Generic[S]):
    """One entry of the log as it was applied, or, with ``gap``, several that this process did not see one by one."""

    before: S | None
    after: S | None  # None: the state was deleted
    revision: Revision
    updates: tuple[Update[S], ...] = ()
    gap: bool = False

    def one_by_one(self) -> Iterator[AppliedUpdate[S]]:
        """Yield its updates in order, each with its own revision and the state that it made."""
        if not self.updates:
            yield AppliedUpdate(self.revision, None, self.after, self.gap)
        state = self.before
        for index, update in enumerate(self.updates):
            assert state is not None
            revision = Revision(self.revision.offset, index)
            state = self.after if revision == self.revision else update.apply_to(state, revision)
            yield AppliedUpdate(revision, update, state)


class TransitionFeed(Generic[S]):
    """Every transition of a synchronizer since the feed was opened, in order.

    The first leads from None to the state at the opening, if there was one.
    """

    def __init__(self, present: Replica[S], close: Callable[[TransitionFeed[S]], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._queue: deque[Transition[S]] = deque()
        self._last = present.revision if present.next_offset else None
        if present.state is not None:
            self._queue.append(Transition(None, present.state, present.revision))

    def drain(self) -> Sequence[Transition[S]]:
        """Return the transitions since the last call."""
        with self._lock:
            drained = list(self._queue)
            self._queue.clear()
        return drained

    def close(self) -> None:
        """Stop filling the feed."""
        self._close(self)

    def put(self, transition: Transition[S]) -> None:
        """Add the next transition. Ignore one that was put before, so that an interrupted call can be repeated."""
        with self._lock:
            if self._last is not None and transition.revision <= self._last:
                return
            queue = self._queue
            if len(queue) >= MAX_TRANSITIONS:
                queue = deque()
                transition = Transition(self._queue[0].before, transition.after, transition.revision, gap=True)
            # No interrupt comes between these three: it would come after the call at the earliest.
            self._last = transition.revision
            self._queue = queue
            queue.append(transition)
