"""The dead letters of a queue, as those of a stream are listed, replayed and discarded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from synchronizer import Clock, CorruptStoreError, Deadline, NotFoundError, SegmentStore
from synchronizer.backoff import Backoff
from synchronizer.recipes.queue.dead_letters import DeadEvent, DoneLetters
from synchronizer.recipes.queue.dead_letters import DeadLetters as QueueLetters
from synchronizer.recipes.queue.event_queue import check_queue_name

from ..scaling.retry import DeadLetter
from ..streams.config import SegmentId
from ..streams.event import EventPointer
from .letters import (
    QUEUE_INCARNATION,
    DeadLetters,
    Filters,
    OnProgress,
    StoredDeadLetter,
    chunks,
    is_number,
    parse_pointer,
)


class QueueDeadLetters(DeadLetters):
    """The dead letters of one queue. Replaying adds an event to the queue and marks its letter in one append."""

    def __init__(self, queue: str, store: SegmentStore, clock: Clock, timeout: float) -> None:
        self.stream = check_queue_name(queue)
        self._letters = QueueLetters(store, queue)
        self._clock = clock
        self._timeout = timeout

    def _select(self, filters: Filters, timeout: float | None) -> Iterator[StoredDeadLetter]:
        status, error, since, until, routing_key, _ = filters
        backoff = partial(self._backoff, timeout)
        done = backoff().retry(self._done)
        letters = (self._stored(each, done) for each in self._letters.read(backoff))
        return (
            each
            for each in letters
            if routing_key is None
            and status in (None, each.status)
            and (error is None or error in each.letter.error)
            and (since is None or each.written_at >= since)
            and (until is None or each.written_at < until)
        )

    def _show(self, pointer: EventPointer, timeout: float | None) -> StoredDeadLetter:
        backoff = partial(self._backoff, timeout)
        done = backoff().retry(self._done)
        with suppress(CorruptStoreError):  # no letter begins there
            found = next(self._letters.read(backoff, pointer.offset), None)
            if found is not None and found.place == pointer.offset:
                return self._stored(found, done)
        raise NotFoundError("there is no such dead letter, or it was forgotten", pointer=str(pointer))

    def _parse(self, text: str, timeout: float | None) -> EventPointer:
        if is_number(text):
            return _pointer(self._letters.segment, int(text))
        return parse_pointer(text, "1234")

    def _contains(self, pointer: EventPointer) -> bool:
        return pointer.segment == self._letters.segment and pointer.incarnation == QUEUE_INCARNATION

    def _finish(
        self,
        what: str,
        named: Collection[EventPointer],
        filters: Filters,
        timeout: float | None,
        on_progress: OnProgress,
    ) -> int:
        found = self._named(named, what, timeout) if named else self._list(filters, timeout)
        finish = self._letters.replay if what == "replay" else self._letters.discard
        done = 0
        for chunk in chunks(found):
            done += finish([_dead_event(each) for each in chunk], self._backoff(timeout))
            on_progress(done)
        return done

    def _done(self) -> DoneLetters:
        try:
            return self._letters.done()
        except NotFoundError as error:
            raise NotFoundError("there is no queue of this name", queue=self.stream) from error

    def _backoff(self, timeout: float | None) -> Backoff:
        return Backoff(self._clock, Deadline(self._clock, self._timeout if timeout is None else timeout))

    def _stored(self, dead: DeadEvent, done: DoneLetters) -> StoredDeadLetter:
        letter = DeadLetter(
            data=dead.data,
            pointer=_pointer(self._letters.queue_segment, dead.offset),
            error=dead.error,
            attempts=dead.attempts,
        )
        return StoredDeadLetter(
            pointer=_pointer(self._letters.segment, dead.place),
            letter=letter,
            status=done.status_of(dead.place),
            routing_key=None,
            headers={},
            written_at=datetime.fromtimestamp(dead.written_at, UTC),
            end=dead.end,
        )


def _pointer(segment: str, offset: int) -> EventPointer:
    return EventPointer(SegmentId(segment), QUEUE_INCARNATION, offset)


def _dead_event(stored: StoredDeadLetter) -> DeadEvent:
    letter = stored.letter
    return DeadEvent(
        letter.data, letter.pointer.offset, letter.error, letter.attempts, stored.pointer.offset, stored.end
    )
