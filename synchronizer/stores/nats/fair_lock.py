"""A fair lock by tickets: first come, first served between processes. The lock of a dead holder expires.

Tickets are messages in a stream of their own, in the memory of one server: if that queue is lost, only the order is
lost. The owner of the first ticket on the lock's subject has the lock. On release it sends a message to the next owner.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Final, NamedTuple

from synchronizer.clock import Clock, Deadline
from synchronizer.errors import CorruptStoreError, ReaderGroupError
from synchronizer.threads.flag import Flag

from .connection import AnswerLostError, NatsConnection, NotSentError
from .frames import Answer, Headers, Outgoing
from .rights import Api, grant_prefix_of, queue_stream_of
from .wire import EXPECTED, request, sequence_in, token

#: Tickets expire after this time, so those of dead or stopped processes do too.
_TICKET_SECONDS: Final = 5
#: The interval to poll the first ticket: no message reports that a ticket has expired.
_LOOK_SECONDS: Final = 0.25
_TICKET: Final = "Rg-Ticket"
_NUMBER: Final = re.compile(r"[0-9]{1,19}")


class _Ticket(NamedTuple):
    """A place in the queue, and the subject on which its owner hears that it is first (None: not a valid one)."""

    number: int
    word: str | None


class _Place:
    """A thread's place in the queue for a lock."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.ticket: int | None = None
        self.has_turn = False
        self.is_abandoned = False

    @property
    def number(self) -> int:
        assert self.ticket is not None
        return self.ticket


class _Holding(AbstractContextManager[bool]):
    """The context manager of one lock: waits for the lock, holds it and releases it."""

    def __init__(self, lock: FairLock, place: _Place, timeout: float, store: object) -> None:
        self._store = store  # keep the store alive: one without references closes, and its locks with it
        self._lock = lock
        self._place = place
        self._timeout = timeout

    def __enter__(self) -> bool:
        return self._lock.enter(self._place, self._timeout)

    def __exit__(self, *exc_info: object) -> None:
        self._lock.leave(self._place)

    def __del__(self) -> None:
        """Leave the queue if an interrupt came at the first instruction of ``__exit__``."""
        try:
            self._lock.abandon(self._place)
        except Exception:  # the constructor was interrupted, or the process ends
            return


class FairLock:
    """The fair locks of one store."""

    def __init__(self, connection: NatsConnection, stream: str, clock: Clock) -> None:
        self._connection = connection
        self._stream = queue_stream_of(stream)
        self._api = Api(self._stream)
        self._clock = clock
        self._word = f"{grant_prefix_of(stream)}.{uuid.uuid4().hex}"
        #: Any user may have published a ticket. Send messages only to subjects of this form, where the SDK listens.
        self._any_word = re.compile(re.escape(grant_prefix_of(stream)) + r"\.[0-9a-f]{32}")
        self._waiting: dict[int, Flag] = {}
        self._is_listening = False

    def held(self, name: str, timeout: float, *, store: object) -> AbstractContextManager[bool]:
        """Hold the lock of ``store`` in a block; yields False if ``timeout`` seconds were not enough."""
        return _Holding(self, _Place(f"{self._stream}.{token(name)}"), timeout, store)

    def enter(self, place: _Place, timeout: float) -> bool:
        try:
            place.has_turn = self._take(place, Deadline(self._clock, timeout))
        except BaseException:
            self.abandon(place)
            raise
        return place.has_turn

    def _take(self, place: _Place, deadline: Deadline) -> bool:
        if self._draw(place, only_first=True):
            return True
        if deadline.passed:
            return False
        self._listen()
        return self._queue(place, deadline)

    def _queue(self, place: _Place, deadline: Deadline) -> bool:
        """Wait in the queue until this ticket is first, or the deadline has passed."""
        word = self._draw_and_listen(place)
        while True:
            first = self._first(place.subject, 1)
            if first is not None and first.number == place.ticket:
                return True
            if deadline.passed:
                return False
            if first is None or first.number > place.number:  # expired in a long queue, or lost by a server restart
                self._waiting.pop(place.number, None)
                word = self._draw_and_listen(place)
            elif self._clock.wait(word, deadline.remaining(_LOOK_SECONDS)):
                return True

    def _draw_and_listen(self, place: _Place) -> Flag:
        self._draw(place, only_first=False)
        # A message that came earlier is not missed: the caller looks up the first ticket next.
        word = self._waiting[place.number] = Flag()
        return word

    def leave(self, place: _Place) -> None:
        """Release the lock to the next ticket. It may be called again after an interrupt."""
        try:
            if place.ticket is not None:
                self._release(place)
        except BaseException:  # interrupted
            self.abandon(place)
            raise

    def _release(self, place: _Place) -> None:
        word = self._waiting.get(place.number)
        try:
            following = self._delete_and_look(place)
            if place.has_turn or (word is not None and word.is_set()):
                self._send_word(following or self._first(place.subject, 1))
        except ReaderGroupError:
            pass  # the ticket expires
        self._waiting.pop(place.number, None)
        place.ticket = None

    def _send_word(self, following: _Ticket | None) -> None:
        if following is not None and following.word is not None:
            word = Outgoing(following.word, b"", {_TICKET: str(following.number)}, has_answer=False)
            self._connection.send(word)

    def abandon(self, place: _Place) -> None:
        """Leave the queue without waiting for an answer. The next owner finds out when it polls."""
        place.is_abandoned = True
        ticket = place.ticket
        if ticket is not None:
            self._waiting.pop(ticket, None)
            with suppress(ReaderGroupError):
                self._connection.send(self._deletion_of(ticket)._replace(has_answer=False))
            place.ticket = None

    def _draw(self, place: _Place, *, only_first: bool) -> bool:
        """Draw a new ticket. With ``only_first``, return False if there are other tickets."""
        headers = {EXPECTED: "0"} if only_first else {}
        outgoing = Outgoing(place.subject, self._word.encode(), headers)
        place.ticket = None
        answer = self._ask([outgoing], heard=partial(self._note, place))[0]
        if answer.is_from_nobody:
            self._make_stream()
            answer = self._ask([outgoing], heard=partial(self._note, place))[0]
        if answer.is_from_nobody:
            raise self._connection.unavailable("the stream of the line cannot be reached")
        if place.ticket is not None:
            return True
        if only_first and b'"error"' in answer.data:
            return False
        raise self._connection.unavailable(f"the line gives no ticket: {answer.data[:200]!r}")

    def _note(self, place: _Place, answers: list[list[Answer]]) -> None:
        """Store the ticket. Runs in the hidden thread, so that a ticket is known even if its call was interrupted."""
        answer = answers[0][0]
        if answer.is_from_nobody:
            return
        with suppress(CorruptStoreError):
            document = answer.document
            if "error" not in document and isinstance(document.get("seq"), int):
                place.ticket = document["seq"]
                if place.is_abandoned:
                    self.abandon(place)

    def _first(self, subject: str, sequence: int) -> _Ticket | None:
        """Return the first ticket from this number on; None if there is none."""
        return self._ticket_in(self._ask([self._next(subject, sequence)])[0])

    def _delete_and_look(self, place: _Place) -> _Ticket | None:
        following = self._next(place.subject, place.number + 1)
        return self._ticket_in(self._ask([self._deletion_of(place.number), following])[1])

    def _deletion_of(self, ticket: int) -> Outgoing:
        return Outgoing(self._api.delete, request(seq=ticket, no_erase=True))

    def _next(self, subject: str, sequence: int) -> Outgoing:
        return Outgoing(self._api.direct_get, request(seq=sequence, next_by_subj=subject))

    def _ask(
        self, messages: list[Outgoing], *, heard: Callable[[list[list[Answer]]], None] | None = None
    ) -> list[Answer]:
        try:
            return [answers[0] for answers in self._connection.exchange(messages, heard=heard)]
        except (NotSentError, AnswerLostError) as error:
            raise self._connection.failed(error) from error

    def _make_stream(self) -> None:
        configuration = {
            "name": self._stream,
            "subjects": [f"{self._stream}.>"],
            "storage": "memory",
            "num_replicas": 1,
            "retention": "limits",
            "max_age": _TICKET_SECONDS * 1_000_000_000,
            "duplicate_window": 1_000_000_000,
            "allow_direct": True,
        }
        self._ask([Outgoing(self._api.create, json.dumps(configuration).encode())])

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._connection.listen(self._word, self._hear)

    def _hear(self, headers: Headers) -> None:
        number = _NUMBER.fullmatch(headers.get(_TICKET, ""))
        word = self._waiting.get(int(number[0])) if number else None
        if word is not None:
            word.set()

    def _ticket_in(self, answer: Answer) -> _Ticket | None:
        if answer.status is not None:
            return None
        number = sequence_in(answer.headers)
        if number is None:
            raise self._connection.unavailable("the line's answer cannot be read")
        word = answer.data.decode("ascii", "replace")
        return _Ticket(number, word if self._any_word.fullmatch(word) else None)
