"""Stores batches of events, each once: every append moves the writer's event number on the segment, or does nothing."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from typing import Final, Protocol

from synchronizer import (
    Deadline,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    SealedError,
    SegmentStore,
    StorePermissionError,
    SystemClock,
)
from synchronizer.backoff import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS
from synchronizer.clock import Clock
from synchronizer.compare_and_set import Cell, Outcome, remove_attributes
from synchronizer.liveness.leaving import leaving
from synchronizer.threads.background import survive

from ...telemetry.counters import StreamCounters
from ..data.write_batch import Batch
from ..state import StreamState
from . import event_numbers

_CLOCK: Final = SystemClock()  # a clock that a test moves stands still while a writer closes


class OnTrouble(Protocol):
    def __call__(self, error: BaseException, *, is_late: bool) -> object:
        """Note that the store has not taken an append; ``is_late``: for the timeout, or because a right is missing."""


class Effort:
    """Attempts at one thing until the store answers. A failed attempt is repeated after a pause."""

    def __init__(self, name: str, clock: Clock, timeout: float, on_trouble: OnTrouble) -> None:
        self._name = name
        self._clock = clock
        self._late = Deadline(clock, timeout)
        self._on_trouble = on_trouble
        self._pause = FIRST_PAUSE_SECONDS

    def failed(self, error: Exception) -> None:
        """Note a failed attempt. Raise the error if no retry can solve it."""
        if not isinstance(error, ReaderGroupError):
            survive(error, self._name)
        elif not error.retryable and not isinstance(error, OutcomeUnknownError):
            raise error
        self._on_trouble(error, is_late=self._late.passed or isinstance(error, StorePermissionError))

    def next_attempt(self) -> float:
        """Return when the next attempt is due. The pauses grow with each call."""
        pause, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE_SECONDS)
        return self._clock.monotonic() + pause


class BatchAppender:
    """Appends the batches of one writer. Threads may append to different segments at the same time."""

    def __init__(self, store: SegmentStore, clock: Clock, counters: StreamCounters) -> None:
        self.writer_id = secrets.token_bytes(16)
        self._attribute = event_numbers.attribute_of(self.writer_id)
        self._store = store
        self._clock = clock
        self._counters = counters
        self._state: StreamState | None = None
        self._cells: dict[int, Cell] = {}  # the writer's event number on each segment
        self._unanswered: dict[int, tuple[bytes, bytes]] = {}  # the encoded batch of each segment, and its last number
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

    def append(self, batch: Batch, effort: Effort) -> bool | None:
        """Store the batch and return True; False if its segment is sealed or deleted and does not have it.

        None: the store did not answer. Append the same batch again, before any other batch of the segment.
        """
        cell = self._cell(batch.segment)
        if batch.segment not in self._unanswered:
            self._unanswered[batch.segment] = self._encode(batch)
        data, new_number = self._unanswered[batch.segment]
        while True:
            batch.in_doubt = True  # until there is an answer
            number, answer_lost = cell.stored, cell.is_in_doubt(new_number)
            try:
                outcome = cell.change(new_number, data)
            except SealedError:
                is_stored = answer_lost and _has(cell, new_number, effort)
                if is_stored is None:
                    return None
                return self._answered(batch, is_stored=is_stored)
            except NotFoundError as error:
                if answer_lost:
                    raise _outcome_unknown(cell.segment) from error
                return self._answered(batch, is_stored=False)
            except ReaderGroupError as error:
                batch.in_doubt = cell.is_in_doubt(new_number)
                if batch.in_doubt:
                    self._unsettled.add(batch.segment)
                if not error.retryable:
                    raise
                effort.failed(error)
                return None
            except Exception as error:  # an unknown error: the append may have arrived
                self._unsettled.add(batch.segment)
                effort.failed(error)
                return None
            else:
                if outcome is Outcome.STORED or cell.stored == new_number:
                    return self._answered(batch, is_stored=True)
                if cell.stored is None and number is not None and not answer_lost:
                    continue  # another writer swept the event number of this one after a long silence
                batch.in_doubt = answer_lost
                raise OutcomeUnknownError(
                    "another client changed this writer's event number on the segment; check whether the last events "
                    "are stored before you write them again",
                    segment=cell.segment,
                )

    def _answered(self, batch: Batch, *, is_stored: bool) -> bool:
        batch.in_doubt = False
        data, _ = self._unanswered.pop(batch.segment)
        if is_stored:
            self._counters.count(len(batch.events), len(data))
        return is_stored

    def remove_event_numbers(self) -> None:
        """Remove the writer's event numbers, except where one still keeps out a late append of this writer."""
        for number, cell in self._cells.items():
            if cell.stored is not None and number not in self._unsettled:
                with suppress(ReaderGroupError), leaving(self._store, _CLOCK):  # else it goes with the segment
                    remove_attributes(self._store, cell.segment, {cell.attribute: cell.stored})

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


def _has(cell: Cell, new_number: bytes, effort: Effort) -> bool | None:
    """Return whether a sealed segment has the batch that ends at ``new_number``; None: the store did not answer.

    No append can arrive there.
    """
    try:
        return cell.load() == new_number
    except NotFoundError as error:
        raise _outcome_unknown(cell.segment) from error
    except Exception as error:
        effort.failed(error)
        return None


def _outcome_unknown(segment: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        "an answer was lost, and then the segment was deleted; check whether the last events are stored before you "
        "write them again",
        segment=segment,
    )
