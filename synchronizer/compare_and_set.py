"""Conditional appends whose lost answers are found out. All code above the stores appends through here, or to a log.

An append whose answer is lost is stored, or not, or arrives later. What settles it is the comparison that it carries:
a further append with the same expectation either succeeds, and then the lost one never does, or conflicts, and then
the store says what is there. `Cell` does that with an attribute, `append_at` with the length of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Literal, NamedTuple

from .errors import ReaderGroupError, StoreUnavailableError
from .store import AnyValue, Append, Appended, AttributeChange, SegmentStore, UnknownOutcome


class Outcome(Enum):
    """What became of a change of a `Cell`."""

    #: This change is stored.
    STORED = auto()
    #: An earlier change of this cell is stored, whose answer was lost. Nothing of this one is.
    EARLIER = auto()
    #: Another process has changed the attribute. Nothing of this change is stored.
    CONFLICT = auto()


class Cell:
    """An attribute of a segment that is changed by compare-and-set. For one thread at a time.

    ``stored`` is the last value that is known to be there; None: the attribute does not exist. A change succeeds only
    if it still is. ``length`` is that of the segment, as the last answer told it.

    A lost answer is found out by comparing values, so the values that one process writes have to differ, as with a
    counter in them.
    """

    __slots__ = ("_store", "_tried", "attribute", "length", "segment", "stored")

    def __init__(self, store: SegmentStore, segment: str, attribute: str, stored: bytes | None = None) -> None:
        self.segment = segment
        self.attribute = attribute
        self.stored = stored
        self.length = 0
        self._store = store
        self._tried: set[bytes | None] = set()  # sent since `stored` was, and the answers lost

    def load(self) -> bytes | None:
        """Read the value from the store."""
        stored = self._store.attributes(self.segment, names=[self.attribute]).get(self.attribute)
        self._know(stored)
        return stored

    def is_in_doubt(self, value: bytes | None) -> bool:
        """Whether a change to ``value`` was sent of which it is not known whether it is stored."""
        return value in self._tried

    def change(self, value: bytes | None, data: bytes = b"", *, source: str | None = None) -> Outcome:
        """Set the attribute to ``value``, None to remove it, and append ``data``, or all of ``source``, in one step.

        Afterwards ``stored`` is what the attribute holds. Raises what the store raises, and `StoreUnavailableError` if
        the answer is lost. The next change finds out what became of a lost one, and so does the same change again.
        """
        if value == self.stored and value is not None:  # stored by a change that was interrupted when it was
            return Outcome.EARLIER
        was_tried = value in self._tried
        self._tried.add(value)  # before it is sent: an interrupt may keep the answer from being noted
        changes = {self.attribute: AttributeChange(self.stored, value)}
        try:
            if source is None:
                answer = self._store.append(self.segment, data, attributes=changes)
            else:
                answer = self._store.concat(self.segment, source, attributes=changes)
        except ReaderGroupError:
            if not was_tried:
                self._tried.discard(value)
            raise
        if isinstance(answer, Appended):
            self._know(value)
            self.length = answer.length
            return Outcome.STORED
        if isinstance(answer, UnknownOutcome):
            raise _answer_lost(answer, self.segment) from answer.cause
        self.length = answer.length
        if not was_tried:
            self._tried.discard(value)  # another process may have written the same
        found = answer.attributes[self.attribute]
        was_own = found in self._tried
        self._know(found)
        return Outcome.EARLIER if was_own else Outcome.CONFLICT

    def _know(self, stored: bytes | None) -> None:
        self.stored = stored
        self._tried.clear()


class Change(NamedTuple):
    """One part of `change_together`: as the arguments of `Cell.change`."""

    cell: Cell
    value: bytes
    data: bytes


def change_together(store: SegmentStore, changes: Sequence[Change]) -> bool:
    """Change cells of several segments in one step; False if one of them was not as expected, and nothing is changed.

    Only the cells' own `Cell.load` says what became of a lost answer, which raises `StoreUnavailableError`.
    """
    answer = store.append_together(
        [
            Append(cell.segment, data, attributes={cell.attribute: AttributeChange(cell.stored, value)})
            for cell, value, data in changes
        ]
    )
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, changes[0].cell.segment) from answer.cause
    return isinstance(answer, tuple)


def remove_attributes(store: SegmentStore, segment: str, known: Mapping[str, bytes | Literal[AnyValue.ANY]]) -> bool:
    """Remove these attributes if each is as known, or `ANY`; whether they were.

    Raises `StoreUnavailableError` if the answer is lost.
    """
    changes = {name: AttributeChange(value, None) for name, value in known.items()}
    answer = store.append(segment, b"", attributes=changes)
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, segment) from answer.cause
    return isinstance(answer, Appended)


def append_at(store: SegmentStore, segment: str, data: bytes, offset: int, *, unread: bool = False) -> int:
    """Append ``data`` if the segment ends at ``offset``; how long it is now.

    For a segment that one process fills: behind a lost answer it finds its own bytes. Raises `StoreUnavailableError` if
    the answer is lost; the same call again finds out. ``unread`` uses `SegmentStore.append_unread`.
    """
    append = store.append_unread if unread else store.append
    answer = append(segment, data, expected_offset=offset)
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, segment) from answer.cause
    return answer.length


def _answer_lost(answer: UnknownOutcome, segment: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the answer of the store was lost; repeat the call to find out what is stored",
        segment=segment,
        cause=repr(answer.cause),
    )
