"""Leaving a group, a lock or the like at its close. While the store does not answer, only the first to leave waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from ..clock import Clock
from ..errors import OutcomeUnknownError, ReaderGroupError, StoreUnavailableError
from ..store import SegmentStore
from .keeper import is_store_unavailable

#: A store that has not answered within this time is silent. An error that comes sooner may be that of one connection.
PATIENCE_SECONDS: Final = 1.0
#: What leaves a silent store this soon after another one does not ask, unless the store has answered an append since.
#: Short: the store may be back, and what does not ask leaves its lease behind.
SILENCE_SECONDS: Final = 1.0


class _Silence(NamedTuple):
    clock: Clock
    until: float
    answers: int


_silences: Final[WeakKeyDictionary[SegmentStore, _Silence]] = WeakKeyDictionary()


@contextmanager
def leaving(store: SegmentStore, clock: Clock, *, insists: bool = False) -> Iterator[None]:
    """Around the calls of the store by which one thing leaves.

    Raise `StoreUnavailableError` at once if the store has just left another one without an answer, unless this one
    ``insists``. A renewal that failed is no reason: the store may be back since.
    """
    silence, answers, began = _silences.get(store), _answers(store), clock.monotonic()
    is_silent = silence is not None and silence.clock is clock and began < silence.until and silence.answers == answers
    if is_silent and not insists:
        raise StoreUnavailableError("the store does not answer")
    try:
        yield
    except ReaderGroupError as error:
        now = clock.monotonic()
        is_unanswered = is_store_unavailable(error) or isinstance(error, OutcomeUnknownError)
        if is_unanswered and now >= began + PATIENCE_SECONDS:
            _silences[store] = _Silence(clock, now + SILENCE_SECONDS, answers)
        raise


def _answers(store: SegmentStore) -> int:
    """Return how many appends the store has answered."""
    return sum(store.counters.appends.counts)
