"""A fair lock by tickets: first come, first served between processes, and gone by itself when its holder is.

Tickets are messages in a stream of their own, in the memory of one server: a line that is lost costs politeness, and
never more. Whose ticket is the first on the lock's subject has the lock. Who lets go of it sends word to the next.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..clock import Clock, Deadline
from ..errors import StoreUnavailableError
from .nats_connection import Answer, AnswerLostError, Headers, NatsConnection, NotSentError, Outgoing
from .nats_wire import EXPECTED, request, token

#: Tickets of processes that died or stand still are dropped after this time.
_TICKET_SECONDS: Final = 5
#: Nobody sends word that a ticket was dropped.
_LOOK_SECONDS: Final = 0.25
_TICKET: Final = "Rg-Ticket"


class FairLine:
    """The fair locks of one store."""

    def __init__(self, connection: NatsConnection, stream: str, clock: Clock) -> None:
        self._connection = connection
        self._stream = f"{stream}_line"
        self._clock = clock
        self._word = f"{stream}_turn.{uuid.uuid4().hex}"
        self._waiting: dict[int, threading.Event] = {}
        self._is_listening = False

    @contextmanager
    def held(self, name: str, timeout: float) -> Iterator[bool]:
        """Hold the lock; False if ``timeout`` seconds did not suffice."""
        subject = f"{self._stream}.{token(name)}"
        deadline = Deadline(self._clock, timeout)
        ticket = self._draw(subject, only_first=True)
        if ticket is not None:
            has_turn = True
        elif deadline.passed:
            has_turn = False
        else:
            self._listen()
            ticket, has_turn = self._queue(subject, deadline)
        try:
            yield has_turn
        finally:
            if ticket is not None:
                self._leave(subject, ticket, has_turn)

    def _queue(self, subject: str, deadline: Deadline) -> tuple[int, bool]:
        """Stand in line until it is this ticket's turn, or the time is over."""
        ticket, word = self._draw_and_listen(subject)
        while True:
            first = self._first(subject, 1)
            if first is None or first[0] > ticket:  # dropped: a long line, or a server that was started anew
                self._waiting.pop(ticket, None)
                ticket, word = self._draw_and_listen(subject)
                continue
            if first[0] == ticket:
                return ticket, True
            if deadline.passed:
                return ticket, False
            if self._clock.wait(word, deadline.remaining(_LOOK_SECONDS)):
                return ticket, True

    def _draw_and_listen(self, subject: str) -> tuple[int, threading.Event]:
        ticket = self._draw(subject, only_first=False)
        if ticket is None:
            raise self._connection.unavailable("the line gives no ticket")
        # Word that came before is not missed: the first ticket is looked up next.
        word = self._waiting[ticket] = threading.Event()
        return ticket, word

    def _leave(self, subject: str, ticket: int, had_turn: bool) -> None:
        word = self._waiting.pop(ticket, None)
        try:
            following = self._delete_and_look(subject, ticket)
            if not had_turn and not (word is not None and word.is_set()):
                return
            following = following or self._first(subject, 1)
        except StoreUnavailableError:
            return  # the ticket is dropped in time
        if following is not None:
            number, address = following
            self._connection.send(Outgoing(address, b"", {_TICKET: str(number)}, has_answer=False))

    def _draw(self, subject: str, *, only_first: bool) -> int | None:
        """The number of a new ticket; None if it would not be the only one, and has to be."""
        headers = {EXPECTED: "0"} if only_first else {}
        outgoing = Outgoing(subject, self._word.encode(), headers)
        answer = self._ask([outgoing])[0]
        if answer.is_from_nobody:
            self._make_stream()
            answer = self._ask([outgoing])[0]
        if answer.is_from_nobody:
            raise self._connection.unavailable("the stream of the line cannot be reached")
        document = answer.document
        if "error" not in document:
            return int(document["seq"])
        if only_first:
            return None
        raise self._connection.unavailable(document["error"].get("description", "the line gives no ticket"))

    def _first(self, subject: str, sequence: int) -> tuple[int, str] | None:
        """The first ticket from this number on, and where its owner is told."""
        return _ticket_in(self._ask([self._next(subject, sequence)])[0])

    def _delete_and_look(self, subject: str, ticket: int) -> tuple[int, str] | None:
        body = request(seq=ticket, no_erase=True)
        delete = Outgoing(f"$JS.API.STREAM.MSG.DELETE.{self._stream}", body)
        return _ticket_in(self._ask([delete, self._next(subject, ticket + 1)])[1])

    def _next(self, subject: str, sequence: int) -> Outgoing:
        return Outgoing(f"$JS.API.DIRECT.GET.{self._stream}", request(seq=sequence, next_by_subj=subject))

    def _ask(self, messages: list[Outgoing]) -> list[Answer]:
        try:
            return [answers[0] for answers in self._connection.exchange(messages)]
        except (NotSentError, AnswerLostError) as error:
            raise self._connection.unavailable(str(error)) from error

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
        self._ask([Outgoing(f"$JS.API.STREAM.CREATE.{self._stream}", json.dumps(configuration).encode())])

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._connection.listen(self._word, self._hear)

    def _hear(self, headers: Headers) -> None:
        word = self._waiting.get(int(headers[_TICKET]))
        if word is not None:
            word.set()


def _ticket_in(answer: Answer) -> tuple[int, str] | None:
    if answer.status is not None:
        return None
    return int(answer.headers["Nats-Sequence"]), answer.data.decode()
