"""The state as far as one process has applied the log: values and pure steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Generic, NamedTuple

from ..callables import check_returned
from ..errors import CorruptStateError, InvalidArgumentError, ReaderGroupError
from ..state import S, StateCodec, Update
from .entries import Entry, Mark, Revision

#: Transitions that a feed keeps for a subscriber who does not drain it, before it forgets them all but for the gap.
MAX_TRANSITIONS: Final = 10_000


class Replica(NamedTuple, Generic[S]):
    """``state`` after all entries before ``next_offset``; None where none is there or it was deleted."""

    state: S | None = None
    revision: Revision = Revision(0, 0)
    next_offset: int = 0
    checksum: int = 0  # of the last entry: what the next one is to name

    @property
    def place(self) -> tuple[int, int]:
        """Where in its log it is. Two replicas at one place have the same state."""
        return self.next_offset, self.checksum

    def apply(self, entry: Entry, body: S | None | list[Update[S]]) -> tuple[Replica[S], Transition[S]]:
        """The replica after ``entry``, whose decoded body is given. Raises what ``apply_to`` raises."""
        assert entry.offset == self.next_offset, (entry.offset, self.next_offset)
        state = self.state
        updates: tuple[Update[S], ...] = ()
        if isinstance(body, list):
            if state is None:
                raise CorruptStateError("updates of a state that does not exist")
            updates = tuple(body)
            for index, update in enumerate(updates):
                revision = Revision(entry.offset, index)
                state = _applied(update, state, revision)
        else:
            state, revision = body, Revision(entry.offset, 0)
        after = Replica(state, revision, entry.end, entry.checksum)
        return after, Transition(self.state, state, revision, updates)

    def follow(self, entry: Entry, codec: StateCodec[S], segment: str) -> tuple[Replica[S], Transition[S]]:
        """`apply` for an entry that is in the log already: one that cannot be applied stops the replica."""
        place = {"segment": segment, "revision": str(Revision(entry.offset, 0))}
        with _located(place):
            body = codec.decode_body(entry.body)
        try:
            return self.apply(entry, body)
        except Exception as error:
            raise CorruptStateError(
                "an update in the log cannot be applied; did its apply_to change since it was written?", **place
            ) from error

    @classmethod
    def from_snapshot(cls, mark: Mark, body: bytes, codec: StateCodec[S]) -> Replica[S]:
        with _located({"segment": mark.snapshot, "revision": str(mark.revision)}):
            state, checksum = codec.decode_snapshot(body)
        return cls(state, mark.revision, mark.next_offset, checksum)


def _applied(update: Update[S], state: S, revision: Revision) -> S:
    after = update.apply_to(state, revision)
    if type(after) is not type(state):
        check_returned(after, "apply_to", update=type(update).__name__)
        raise InvalidArgumentError(
            "apply_to has to return a state of the same class",
            update=type(update).__name__,
            returned=type(after).__name__,
        )
    return after


@contextmanager
def _located(place: Mapping[str, str]) -> Iterator[None]:
    """Let errors say where in the store they were met."""
    try:
        yield
    except ReaderGroupError as error:
        error.facts = {**place, **error.facts}
        raise


class AppliedUpdate(NamedTuple, Generic[S]):
    """An update and the state that it made. Without an update, the state was begun or deleted, or there is a gap."""

    revision: Revision
    update: Update[S] | None
    state: S | None  # None: it was deleted
    gap: bool = False  # the updates between the one told before and this state are not known


class Transition(NamedTuple, Generic[S]):
    """One entry of the log as it was applied, or, with ``gap``, several that this process never saw one by one."""

    before: S | None
    after: S | None  # None: the state was deleted
    revision: Revision
    updates: tuple[Update[S], ...] = ()
    gap: bool = False

    def one_by_one(self) -> Iterator[AppliedUpdate[S]]:
        """Its updates in order, each with its own revision and the state that it made."""
        if not self.updates:
            yield AppliedUpdate(self.revision, None, self.after, self.gap)
        state = self.before
        for index, update in enumerate(self.updates):
            assert state is not None
            revision = Revision(self.revision.offset, index)
            state = self.after if revision == self.revision else update.apply_to(state, revision)
            yield AppliedUpdate(revision, update, state)


class TransitionFeed(Generic[S]):
    """Every transition of a synchronizer since the feed was opened, in order. The first is from None to the present."""

    def __init__(self, present: Replica[S], close: Callable[[TransitionFeed[S]], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._queue: deque[Transition[S]] = deque()
        self._last = present.revision if present.next_offset else None
        if present.state is not None:
            self._queue.append(Transition(None, present.state, present.revision))

    def drain(self) -> Sequence[Transition[S]]:
        """The transitions since the last call."""
        with self._lock:
            drained = list(self._queue)
            self._queue.clear()
        return drained

    def close(self) -> None:
        self._close(self)

    def put(self, transition: Transition[S]) -> None:
        """Add what comes next. One that was put before is passed over, so an interrupted call can be repeated."""
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
