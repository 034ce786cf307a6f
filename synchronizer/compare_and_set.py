"""Conditional appends that settle lost answers. All code above the stores appends through here, or to a log.

An append whose answer is lost is stored, or not, or arrives later. Its comparison settles it: another append with the
same expectation either succeeds, and then the lost one never does, or conflicts, and then the answer has the current
value. `Cell` compares an attribute, `append_at` the length of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Literal, NamedTuple

from .errors import ReaderGroupError, StoreUnavailableError
from .store import AnyValue, Append, Appended, AttributeChange, SegmentStore, UnknownOutcome


class Outcome(Enum):
    """The outcome of a change of a `Cell`."""

    #: This change is stored.
    STORED = auto()
    #: An earlier call of this cell has stored what is there, and its answer was lost. This call stored nothing, but the
    #: earlier one may have been for the same value: compare ``stored``.
    STORED_EARLIER = auto()
    #: Another process has changed the attribute. Nothing of this change is stored.
    CONFLICT = auto()


class Cell:
    """An attribute of a segment that is changed by compare-and-set. For one thread at a time.

    ``stored`` is the last known value; None: the attribute does not exist. A change succeeds only if the attribute
    still has it. ``length`` is that of the segment in the last answer.

    A lost answer is settled by comparing values, so all values that one process writes must differ, for example by a
    counter in them.
    """

    __slots__ = ("_store", "_tried", "attribute", "length", "segment", "stored")

    def __init__(self, store: SegmentStore, segment: str, attribute: str, stored: bytes | None = None) -> None:
        self.segment = segment
        self.attribute = attribute
        self.stored = stored
        self.length = 0
        self._store = store
        self._tried: set[bytes | None] = set()  # sent since `stored` was, with lost answers

    def load(self) -> bytes | None:
        """Read the value from the store."""
        stored = self._store.attributes(self.segment, names=[self.attribute]).get(self.attribute)
        self._know(stored)
        return stored

    @property
    def has_doubts(self) -> bool:
        """Whether a change was sent and its outcome is unknown."""
        return bool(self._tried)

    def is_in_doubt(self, value: bytes | None) -> bool:
        """Return whether a change to ``value`` was sent and its outcome is unknown."""
        return value in self._tried

    def change(
        self, value: bytes | None, data: bytes = b"", *, source: str | None = None, unread: bool = False
    ) -> Outcome:
        """Set the attribute to ``value``, None to remove it, and append ``data``, or all of ``source``, in one step.

        ``unread`` uses `SegmentStore.concat_unread`.

        Afterwards ``stored`` is the value of the attribute. Raise what the store raises, and `StoreUnavailableError` if
        the answer is lost. The next change, or the same one again, finds out the outcome of a lost one.
        """
        if value == self.stored and value is not None:  # an interrupted change has stored it
            return Outcome.STORED_EARLIER
        was_tried = value in self._tried
        self._tried.add(value)  # before it is sent: an interrupt may keep the answer from being noted
        changes = {self.attribute: AttributeChange(self.stored, value)}
        try:
            if source is None:
                answer = self._store.append(self.segment, data, attributes=changes)
            else:
                concat = self._store.concat_unread if unread else self._store.concat
                answer = concat(self.segment, source, attributes=changes)
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
        return Outcome.STORED_EARLIER if was_own else Outcome.CONFLICT

    def _know(self, stored: bytes | None) -> None:
        self.stored = stored
        self._tried.clear()


class CellChange(NamedTuple):
    """One part of `change_together`: a cell, and the arguments of `Cell.change`."""

    cell: Cell
    value: bytes
    data: bytes


def change_together(store: SegmentStore, changes: Sequence[CellChange]) -> bool:
    """Change cells of several segments in one step. Return False, with nothing changed, if one is not as expected.

    Raise `StoreUnavailableError` if the answer is lost. Only `Cell.load` of the cells then finds out the outcome.
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
    """Remove these attributes if each is as known, or `ANY`; return whether they were removed.

    Raise `StoreUnavailableError` if the answer is lost.
    """
    changes = {name: AttributeChange(value, None) for name, value in known.items()}
    answer = store.append(segment, b"", attributes=changes)
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, segment) from answer.cause
    return isinstance(answer, Appended)


def append_at(store: SegmentStore, segment: str, data: bytes, offset: int, *, unread: bool = False) -> int:
    """Append ``data`` if the segment ends at ``offset``; return the length of the segment now.

    It is for a segment that only one process fills: after a lost answer the process finds its own bytes. Raise
    `StoreUnavailableError` if the answer is lost; the same call again finds out. ``unread`` uses
    `SegmentStore.append_unread`.
    """
    append = store.append_unread if unread else store.append
    answer = append(segment, data, expected_offset=offset)
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, segment) from answer.cause
    return answer.length


def append_anyhow(store: SegmentStore, segment: str, data: bytes) -> None:
    """Append ``data``, whatever the length of the segment.

    Raise `StoreUnavailableError` if the answer is lost. The same call again may append the data twice.
    """
    answer = store.append(segment, data)
    if isinstance(answer, UnknownOutcome):
        raise _answer_lost(answer, segment) from answer.cause


def _answer_lost(answer: UnknownOutcome, segment: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the store's answer was lost; repeat the call to see what is stored",
        segment=segment,
        cause=repr(answer.cause),
    )
