"""Stores batches of events, each once: every append moves the writer's event number on the segment, or does nothing."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from synchronizer import Deadline, NotFoundError, OutcomeUnknownError, ReaderGroupError, SealedError, SegmentStore
from synchronizer.backoff import Backoff
from synchronizer.clock import Clock
from synchronizer.compare_and_set import Cell, Outcome, remove_attributes
from synchronizer.threads.background import survive
from synchronizer.threads.flag import Flag

from ..data.write_batch import Batch
from ..state import StreamState
from . import event_numbers

R = TypeVar("R")


class WriterClosedError(Exception):
    """The writer was closed while the store was away. ``__cause__`` is the store's last error."""


class OnTrouble(Protocol):
    def __call__(self, error: BaseException, *, is_late: bool) -> object:
        """Note that the store has not taken an append; ``is_late``: for longer than the timeout."""


class Effort:
    """Retries until the store answers or the writer stops. For one thread."""

    def __init__(self, name: str, clock: Clock, stop: Flag, timeout: float, on_trouble: OnTrouble) -> None:
        self.name: Final = name
        self._backoff = Backoff(clock, Deadline(clock, None), stop)
        self._late = Deadline(clock, timeout)
        self._on_trouble = on_trouble

    def pause(self, error: BaseException) -> None:
        """Wait after a failed attempt."""
        self._on_trouble(error, is_late=self._late.passed)
        if not self._backoff.wait():
            raise WriterClosedError from error

    def until_answered(self, attempt: Callable[[], R]) -> R:
        """Return the answer to a call that is safe to repeat. Raise errors that no retry can solve."""
        while True:
            try:
                return attempt()
            except OutcomeUnknownError as error:
                self.pause(error)
            except ReaderGroupError as error:
                if not error.retryable:
                    raise
                self.pause(error)
            except Exception as error:
                survive(error, self.name)
                self.pause(error)


class BatchAppender:
    """Appends the batches of one writer. Threads may append to different segments at the same time."""

    def __init__(self, store: SegmentStore, clock: Clock) -> None:
        self.writer_id = secrets.token_bytes(16)
        self._attribute = event_numbers.attribute_of(self.writer_id)
        self._store = store
        self._clock = clock
        self._state: StreamState | None = None
        self._cells: dict[int, Cell] = {}  # the writer's event number on each segment
        self._unsettled: set[int] = set()  # segments where an append with a lost answer may still arrive
        self._numbering = threading.Lock()
        self._last_number = 0

    def begin(self, state: StreamState) -> None:
        """Append to the segments of this epoch. One writer of many removes old event numbers first."""
        self.follow(state)
        if event_numbers.is_to_sweep(self.writer_id):
            segments = [state.data_segment(number) for number in state.current]
            event_numbers.sweep(self._store, segments, self._clock.time())

    def follow(self, state: StreamState) -> None:
        """Append to the segments of this epoch. The others are sealed: no append can arrive there any more."""
        self._state = state
        self._cells = {number: self._cells[number] for number in state.current if number in self._cells}
        self._unsettled.intersection_update(state.current)

    def append(self, batch: Batch, effort: Effort) -> bool:
        """Store the batch and return True; False if its segment is sealed or deleted and does not have it."""
        cell = self._cell(batch.segment)
        data, new_number = self._encode(batch)
        while True:
            batch.in_doubt = True  # until there is an answer
            number, answer_lost = cell.stored, cell.is_in_doubt(new_number)
            try:
                outcome = cell.change(new_number, data)
            except SealedError:
                is_stored = answer_lost and _has(cell, new_number, effort)
                batch.in_doubt = False
                return is_stored
            except NotFoundError as error:
                if answer_lost:
                    raise _outcome_unknown(cell.segment, "was deleted") from error
                batch.in_doubt = False
                return False
            except ReaderGroupError as error:
                batch.in_doubt = cell.is_in_doubt(new_number)
                if batch.in_doubt:
                    self._unsettled.add(batch.segment)
                if not error.retryable:
                    raise
                effort.pause(error)
            except Exception as error:  # an unknown error: the append may have arrived
                survive(error, effort.name)
                self._unsettled.add(batch.segment)
                effort.pause(error)
            else:
                if outcome is Outcome.STORED or cell.stored == new_number:
                    batch.in_doubt = False
                    return True
                if cell.stored is None and number is not None and not answer_lost:
                    continue  # another writer swept the event number of this one after a long silence
                batch.in_doubt = answer_lost
                raise OutcomeUnknownError(
                    "another client changed this writer's event number on the segment; check whether the last events "
                    "are stored before you write them again",
                    segment=cell.segment,
                )

    def remove_event_numbers(self) -> None:
        """Remove the writer's event numbers, except where one still keeps out a late append of this writer."""
        for number, cell in self._cells.items():
            if cell.stored is not None and number not in self._unsettled:
                try:
                    remove_attributes(self._store, cell.segment, {cell.attribute: cell.stored})
                except ReaderGroupError:
                    continue  # it goes with the segment

    def _cell(self, number: int) -> Cell:
        """Return the cell of the writer's event number on a segment."""
        cell = self._cells.get(number)
        if cell is None:
            assert self._state is not None
            cell = self._cells[number] = Cell(self._store, self._state.data_segment(number), self._attribute)
        return cell

    def _encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """Encode the batch under the next numbers. Return it with the event number that shows that it is stored."""
        with self._numbering:
            # Numbered here and not by `write`: after a merge, the unstored events of two segments go to one, and lower
            # numbers would look like repetitions unless sorted. From one counter, numbers grow in every segment. Gaps
            # are harmless: the event number is compared for equality only. A round waits for its slowest segment.
            first_number, self._last_number = self._last_number + 1, self._last_number + len(batch.events)
            last_number = self._last_number
        now = self._clock.time()
        data = batch.encode(first_number, self.writer_id, int(now * 1_000_000))
        return data, event_numbers.encode(last_number, now)


def _has(cell: Cell, new_number: bytes, effort: Effort) -> bool:
    """Return whether a sealed segment has the batch that ends at ``new_number``. No append can arrive there."""
    try:
        return effort.until_answered(cell.load) == new_number
    except NotFoundError as error:
        raise _outcome_unknown(cell.segment, "was deleted") from error


def _outcome_unknown(segment: str, happened: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"an answer was lost, and then the segment {happened}; check whether the last events are stored before "
        "you write them again",
        segment=segment,
    )
