"""A fair lock by tickets: first come, first served between processes. The lock of a dead holder expires.

Tickets are messages in a stream of their own, in the memory of one server: if that queue is lost, only the order is
lost. The owner of the first ticket on the lock's subject has the lock. On release it sends a message, the *grant*, to
the owner of the next ticket.
"""

from __future__ import annotations

import json
import math
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
#: How many of the tickets that left the queue a store remembers, to pass on a grant that comes too late for them.
_MOST_LEFT: Final = 100
_TICKET: Final = "Rg-Ticket"
_NUMBER: Final = re.compile(r"[0-9]{1,19}")


class _Ticket(NamedTuple):
    """A position in the queue, and the subject on which its owner hears that it is first (None: not a valid one)."""

    number: int
    grant_subject: str | None


class _QueuePosition:
    """A thread's position in the queue for a lock."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.ticket: int | None = None
        self.granted = Flag()
        #: The next ticket, if there was one when this one became first. Its owner may have left the queue since.
        self.following: _Ticket | None = None
        self.has_lock = False
        self.is_abandoned = False

    @property
    def number(self) -> int:
        assert self.ticket is not None
        return self.ticket


class _Holding(AbstractContextManager[bool]):
    """The context manager of one lock: waits for the lock, holds it and releases it."""

    def __init__(
        self, lock: TicketLock, position: _QueuePosition, timeout: float, patience: float, store: object
    ) -> None:
        self._store = store  # keep the store alive: one without references closes, and its locks with it
        self._lock = lock
        self._position = position
        self._timeout = timeout
        self._patience = patience

    def __enter__(self) -> bool:
        return self._lock.enter(self._position, self._timeout, self._patience)

    def __exit__(self, *exc_info: object) -> None:
        self._lock.leave(self._position)

    def __del__(self) -> None:
        """Leave the queue if an interrupt came at the first instruction of ``__exit__``."""
        try:
            self._lock.abandon(self._position)
        except Exception:  # the constructor was interrupted, or the process ends
            return


class TicketLock:
    """The fair locks of one store."""

    def __init__(self, connection: NatsConnection, stream: str, clock: Clock) -> None:
        self._connection = connection
        self._stream = queue_stream_of(stream)
        self._api = Api(self._stream)
        self._clock = clock
        self._grant_subject = f"{grant_prefix_of(stream)}.{uuid.uuid4().hex}"
        #: Any user may have published a ticket. Send messages only to subjects of this form, where the SDK listens.
        self._any_grant_subject = re.compile(re.escape(grant_prefix_of(stream)) + r"\.[0-9a-f]{32}")
        self._tickets: dict[int, Flag] = {}  # those of this store, and the flag that a grant sets
        self._left: dict[int, str] = {}  # tickets that left the queue before their turn, and their subjects
        self._contended: set[str] = set()  # subjects on which other tickets were last found
        self._is_listening = False
        self._is_closed = False

    def acquire(
        self, name: str, timeout: float, patience: float = math.inf, *, store: object
    ) -> AbstractContextManager[bool]:
        """Hold the lock of ``store`` in a block: see `SegmentStore.fair_lock`."""
        return _Holding(self, _QueuePosition(f"{self._stream}.{token(name)}"), timeout, patience, store)

    def enter(self, position: _QueuePosition, timeout: float, patience: float) -> bool:
        try:
            position.has_lock = self._take(position, Deadline(self._clock, timeout), patience)
            if position.has_lock and position.subject in self._contended:
                self._ask_for_following(position)
        except BaseException:
            self.abandon(position)
            raise
        return position.has_lock

    def _take(self, position: _QueuePosition, deadline: Deadline, patience: float) -> bool:
        if deadline.passed or position.subject not in self._contended:
            if self._draw(position, only_first=True):
                return True
            if deadline.passed:
                return False
        self._listen()
        return self._queue(position, deadline, patience)

    def _queue(self, position: _QueuePosition, deadline: Deadline, patience: float) -> bool:
        """Wait until this ticket is first. Give up at the deadline, or if the queue does not move for ``patience``."""
        self._draw(position, only_first=False)
        self._contended.discard(position.subject)
        holder, impatient = 0, Deadline(self._clock, patience)
        while True:
            first = self._first(position.subject, 1)
            if first is not None and first.number == position.ticket:
                return True
            self._contended.add(position.subject)
            if first is not None and first.number != holder:
                holder, impatient = first.number, Deadline(self._clock, patience)
            if deadline.passed or impatient.passed:
                return False
            if first is None or first.number > position.number:  # expired in a long queue, or lost by a server restart
                self._tickets.pop(position.number, None)
                self._draw(position, only_first=False)
            elif self._clock.wait(position.granted, deadline.remaining(impatient.remaining(_LOOK_SECONDS))):
                return True

    def leave(self, position: _QueuePosition) -> None:
        """Release the lock to the next ticket. It may be called again after an interrupt."""
        try:
            if (ticket := position.ticket) is not None:
                self._release(position, ticket)
        except BaseException:  # interrupted
            self.abandon(position)
            raise

    def _release(self, position: _QueuePosition, ticket: int) -> None:
        # The hidden thread may abandon the position meanwhile, so its ticket is asked for once.
        try:
            if position.has_lock and position.following is not None:
                # No answer is waited for, during which nobody would use the lock. If the next one has left, it passes
                # the grant on.
                self._ask([*self._grant_to(position.following), self._deletion_of(ticket, has_answer=False)])
            else:
                if not position.has_lock:
                    self._note_left(position.subject, ticket)
                following = self._delete_and_look(position.subject, ticket)
                if position.has_lock or position.granted.is_set():
                    for message in self._grant_to(following or self._first(position.subject, 1)):
                        self._connection.send(message)
        except ReaderGroupError:
            pass  # the ticket expires
        self._tickets.pop(ticket, None)
        position.ticket = None

    def _note_left(self, subject: str, ticket: int) -> None:
        """Pass on a grant that comes from now on: its sender may have looked for the next ticket earlier."""
        self._left[ticket] = subject
        for earlier in list(self._left)[:-_MOST_LEFT]:
            self._left.pop(earlier, None)
        self._tickets.pop(ticket, None)

    def _grant_to(self, following: _Ticket | None) -> list[Outgoing]:
        """Return the message by which the owner of the next ticket hears that it has the lock, if there is one."""
        if following is None or following.grant_subject is None:
            return []
        return [Outgoing(following.grant_subject, b"", {_TICKET: str(following.number)}, has_answer=False)]

    def abandon(self, position: _QueuePosition) -> None:
        """Leave the queue without waiting for an answer. The next owner finds out when it polls."""
        position.is_abandoned = True
        ticket = position.ticket
        if ticket is not None:
            self._tickets.pop(ticket, None)
            self._take_back(ticket)
            position.ticket = None

    def close(self) -> None:
        """Take back the tickets of threads that still wait or hold a lock: without the connection they only expire."""
        self._is_closed = True
        for ticket in list(self._tickets):
            self._take_back(ticket)

    def _take_back(self, ticket: int) -> None:
        """Delete a ticket without waiting for an answer."""
        with suppress(ReaderGroupError):  # it expires
            self._connection.send(self._deletion_of(ticket, has_answer=False))

    def _draw(self, position: _QueuePosition, *, only_first: bool) -> bool:
        """Draw a new ticket. With ``only_first``, return False if there are other tickets."""
        headers = {EXPECTED: "0"} if only_first else {}
        outgoing = Outgoing(position.subject, self._grant_subject.encode(), headers)
        position.ticket, position.granted = None, Flag()
        answer = self._ask([outgoing], heard=partial(self._note, position))[0]
        if answer.is_from_nobody:
            self._make_stream()
            answer = self._ask([outgoing], heard=partial(self._note, position))[0]
        if answer.is_from_nobody:
            raise self._connection.unavailable("the stream of the fair lock is unreachable; try again")
        if position.ticket is not None:
            return True
        if only_first and b'"error"' in answer.data:
            return False
        raise self._connection.unavailable(f"the fair lock gave no ticket; try again: {answer.data[:200]!r}")

    def _note(self, position: _QueuePosition, answers: list[list[Answer]]) -> None:
        """Store the ticket. Runs in the hidden thread, so that a ticket is known even if its call was interrupted."""
        answer = answers[0][0]
        if answer.is_from_nobody:
            return
        with suppress(CorruptStoreError):
            document = answer.document
            if "error" not in document and isinstance(document.get("seq"), int):
                ticket = document["seq"]
                self._tickets[ticket] = position.granted
                position.ticket = ticket
                if position.is_abandoned:
                    self.abandon(position)
                elif self._is_closed:
                    self._take_back(ticket)

    def _first(self, subject: str, sequence: int) -> _Ticket | None:
        """Return the first ticket from this number on; None if there is none."""
        return self._ticket_in(self._ask([self._next(subject, sequence)])[0])

    def _ask_for_following(self, position: _QueuePosition) -> None:
        """Find out which ticket is next while this one has the lock."""

        def note(following: _Ticket | None) -> None:
            position.following = following

        self._look_later(position.subject, position.number + 1, note)

    def _look_later(self, subject: str, sequence: int, use: Callable[[_Ticket | None], None]) -> None:
        """Give ``use`` the first ticket from this number on. The hidden thread calls it, if an answer comes."""

        def hear(answers: list[list[Answer]]) -> None:
            with suppress(ReaderGroupError):
                use(self._ticket_in(answers[0][0]))

        with suppress(ReaderGroupError):  # a release asks again, and the owners of tickets poll
            self._connection.ask_later([self._next(subject, sequence)], hear)

    def _delete_and_look(self, subject: str, ticket: int) -> _Ticket | None:
        following = self._next(subject, ticket + 1)
        return self._ticket_in(self._ask([self._deletion_of(ticket), following])[1])

    def _deletion_of(self, ticket: int, *, has_answer: bool = True) -> Outgoing:
        return Outgoing(self._api.delete, request(seq=ticket, no_erase=True), has_answer=has_answer)

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
            self._connection.listen(self._grant_subject, self._hear)

    def _hear(self, headers: Headers) -> None:
        number = _NUMBER.fullmatch(headers.get(_TICKET, ""))
        if number is None:
            return
        ticket = int(number[0])
        granted = self._tickets.get(ticket)
        if granted is not None:
            granted.set()
        elif (subject := self._left.pop(ticket, None)) is not None:
            self._pass_on(subject, ticket)

    def _pass_on(self, subject: str, ticket: int) -> None:
        """Send the grant to the ticket behind one that left. Runs in the hidden thread, which must not wait."""

        def send(following: _Ticket | None) -> None:
            for message in self._grant_to(following):
                self._connection.send(message)

        self._look_later(subject, ticket + 1, send)

    def _ticket_in(self, answer: Answer) -> _Ticket | None:
        if answer.status is not None:
            return None
        number = sequence_in(answer.headers)
        if number is None:
            raise self._connection.unavailable("the answer of the fair lock cannot be read; try again")
        grant_subject = answer.data.decode("ascii", "replace")
        return _Ticket(number, grant_subject if self._any_grant_subject.fullmatch(grant_subject) else None)
