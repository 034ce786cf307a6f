"""Reads segments from JetStream: heads from the stream's leader, bulk data from any replica, checked against heads.

The leader answers one message at a time. Any replica sends many, but may be behind: its messages are used only as far
as they match the leader's answer, and missing ones are requested again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import CorruptStoreError, StoreUnavailableError, TruncatedError
from synchronizer.loggers import get_logger
from synchronizer.store import SegmentStart
from synchronizer.threads.flag import Flag

from ..checks import not_found, sealed
from .connection import NatsConnection
from .frames import Answer, Outgoing, error_in
from .hints import AttributeValue, Hints, MessageStart
from .rights import Api
from .wire import (
    BATCH_ID,
    OPEN,
    ROLLUP,
    SEALED,
    Head,
    Stored,
    Subjects,
    carried_in,
    changes_of,
    directly_stored,
    head_of,
    is_carried,
    name_in,
    number_in,
    request,
    stored,
    stored_head,
    value_of,
)

#: The server sends a batch without flow control, so request no more than this at a time.
_MAX_READ_BYTES: Final = 4 * 1024 * 1024
_MAX_MESSAGES: Final = 1000
#: Within this distance of a known place, read the bytes in between instead of searching.
_NEAR_BYTES: Final = 256 * 1024
#: The server returns the last values of at most this many subjects in one request.
_MAX_SUBJECTS: Final = 1000
_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.1
#: After this many answers of replicas that are behind, ask the leader itself.
_PATIENCE: Final = 5
#: A deposed leader that has not noticed may return old data for this time.
_DEPOSED_SECONDS: Final = 3.0

#: An append of several messages takes less than this from the first to the last, unless it is torn.
_TORN_SECONDS: Final = 1.0

_clock: Final = SystemClock()
_logger = get_logger(__name__)


class Snapshot(NamedTuple):
    """The attributes at one moment, with removed ones (None) as far as they are still stored."""

    values: Mapping[str, AttributeValue]
    #: The values that the head of that moment carries.
    carried: Mapping[str, bytes] = {}

    def under(self, carried: Mapping[str, bytes]) -> Snapshot:
        """Return the attributes with the values that a head carries."""
        over = {name: AttributeValue(value, 0) for name, value in carried.items()}
        return Snapshot({**self.values, **over}, carried)

    def value(self, name: str) -> AttributeValue:
        return self.values.get(name, AttributeValue(None, 0))


class Listing(NamedTuple):
    """Subjects with the number of messages on each, at the time when ``last_sequence`` was the stream's last."""

    messages: Mapping[str, int]
    last_sequence: int


class _Moment(NamedTuple):
    """Messages of attributes at one moment, with the newest change and, if it was asked for, the segment's head."""

    changes: int
    head: Head | None
    messages: Sequence[Stored]


class _TooManySubjects(Exception):
    """A filter matches more subjects than the server returns in one request."""


class _Gap(Exception):
    """Bytes that existed a moment ago are gone."""


class NatsReader:
    """Reads the segments of one stream."""

    def __init__(
        self, connection: NatsConnection, subjects: Subjects, hints: Hints, timeout_seconds: float, is_replicated: bool
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._api = Api(subjects.stream)
        self._hints = hints
        self._timeout_seconds = timeout_seconds
        self._is_replicated = is_replicated

    # Heads

    def head(self, segment: str) -> Head:
        """Return the current head of an existing segment, from the stream's leader."""
        return self._existing(segment, self.heads([segment])[0])

    def heads(self, segments: Sequence[str]) -> list[Head | None]:
        """Return the current heads of the segments; None for those that were never created."""
        found: dict[str, Head | None] = {}
        past = Deadline(_clock, _DEPOSED_SECONDS if self._is_replicated else 0)
        missing = list(segments)
        for pause in _pauses():
            answers = self._connection.ask_all([self._last(self._subjects.data(name)) for name in missing])
            for name, (answer, *_) in zip(missing, answers, strict=True):
                found[name] = self._whole(name, self._head_in(answer))
            missing = [name for name in missing if self._is_of_the_past(name, found[name])]
            if not missing or past.passed:
                break
            _sleep(pause)
        for name in segments:
            self._remember(name, found[name], anyhow=name in missing)
        return [found[name] for name in segments]

    def _whole(self, segment: str, head: Head | None) -> Head | None:
        """Return the head. If it is in the middle of an append of several messages, wait for the one after the append.

        A server stores the messages one after the other. If it reaches a limit of its own or of an account, it leaves
        the messages stored so far and sends no answer. So after 1 s without progress they are removed, and the head
        is the one before the append.
        """
        deadline, part = Deadline(_clock, _TORN_SECONDS), head
        for pause in _pauses():
            if head is None or not head.is_part:
                return head
            if head != part:
                deadline, part = Deadline(_clock, _TORN_SECONDS), head
            elif deadline.passed:
                self._remove_torn(segment, head)
            _sleep(pause)
            head = self._head_in(self._connection.ask_all([self._last(self._subjects.data(segment))])[0][0])
        raise AssertionError("the pauses do not end")

    def _remove_torn(self, segment: str, part: Head) -> None:
        subject = self._subjects.data(segment)
        message = stored(self._read(self._connection.ask_all([self._last(subject)])[0][0]))
        if message.sequence == part.sequence:
            if BATCH_ID not in message.headers:
                raise CorruptStoreError(
                    "a message belongs to an atomic append but does not name it; restore the store from a backup",
                    segment=segment,
                )
            _logger.warning("removed the first part of an append that the server did not complete: segment=%r", segment)
            self.undo(message.headers[BATCH_ID], [subject])

    def undo(self, batch_id: str, subjects: Iterable[str]) -> None:
        """Remove the stored messages of a batch that the server refused, from the end."""
        for subject in subjects:
            while True:
                answer = self._connection.ask_all([self._last(subject)])[0][0]
                if _error_code(answer) == _NOT_FOUND:
                    break
                message = stored(self._read(answer))
                if message.headers.get(BATCH_ID) != batch_id:
                    break
                self.delete(message.sequence)

    def delete(self, sequence: int) -> None:
        """Remove one message. A missing one is no error."""
        body = request(seq=sequence, no_erase=True)
        self._connection.ask(self._api.delete, body)

    def life(self, segment: str) -> int:
        """Return the sequence of the message that says that the segment exists and is not sealed."""
        answer = self._connection.ask_all([self._last(self._subjects.name(segment))])[0][0]
        if _error_code(answer) == _NOT_FOUND:
            raise not_found(segment)
        message = stored(self._read(answer))
        if not message.data:
            raise not_found(segment)
        if any(message.headers.get(name) == value for name, value in ROLLUP.items()):  # the segment was sealed since
            raise sealed(segment, self.head(segment).length)
        self._hints.see_life(segment, message.sequence)
        return message.sequence

    def _existing(self, segment: str, head: Head | None) -> Head:
        if head is None or head.is_deleted:
            raise not_found(segment)
        return head

    def _head_in(self, answer: Answer) -> Head | None:
        head = stored_head(answer.data)
        if head is None and _error_code(answer) != _NOT_FOUND:
            self._read(answer)  # raises
        return head

    def _is_of_the_past(self, segment: str, head: Head | None) -> bool:
        known = self._hints.head(segment)
        return known is not None and (0 if head is None else head.sequence) < known.sequence

    def _remember(self, segment: str, head: Head | None, *, anyhow: bool) -> None:
        if anyhow:
            self._hints.forget(segment)  # the store has lost data, as after the loss of a disk
        if head is not None:
            self._hints.see_head(segment, head)

    # Bytes

    def read(self, segment: str, offset: int, max_bytes: int) -> tuple[Head, bytes]:
        """Return the head and the bytes from the offset on, up to ``max_bytes`` or the end of the segment.

        The bytes are read from a known place, while the leader is asked for the head.
        """
        for _ in range(_PATIENCE):
            head, messages = self._head_and_messages(segment, offset, max_bytes)
            if not head.start_offset <= offset <= head.length:
                return head, b""
            try:
                return head, self._bytes(segment, head, offset, min(head.length, offset + max_bytes), messages)
            except _Gap:
                self._hints.forget(segment)  # the store may have lost data: then the known places are wrong
        raise TruncatedError(
            "the data before the segment's start was truncated; continue from start_offset",
            segment=segment,
            offset=offset,
            start_offset=self._first_offset(segment, head),
        )

    def starts(self, segments: Sequence[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        """Return the first bytes of these segments. Leave out each that takes more than one answer of the server."""
        found = {} if self._is_replicated else self._starts_in_heads(segments, max_bytes)
        segments = [name for name in segments if name not in found]
        if not segments:
            return found
        answers = self._connection.ask_all(
            [
                request
                for name in segments
                for request in (self._last(self._subjects.data(name)), self._next(name, 1, max_bytes))
            ]
        )
        for name, (last, *_), messages in zip(segments, answers[::2], answers[1::2], strict=True):
            head = self._head_in(last)
            if head is None or head.is_part or head.is_deleted or self._is_of_the_past(name, head):
                continue
            start = head.start_offset
            data = _joined(_messages(messages), start, min(head.length, start + max_bytes))
            if data is not None:
                found[name] = SegmentStart(start, data)
        return found

    def _starts_in_heads(self, segments: Sequence[str], max_bytes: int) -> dict[str, SegmentStart]:
        """Return the first bytes of those segments that are in one message, as the only server has it."""
        names = {self._subjects.data(name): name for name in segments}
        asked = [
            Outgoing(self._api.direct_get, request(multi_last=group), None, True, True)
            for group in _groups(names, self._connection.max_payload // 2)
        ]
        found: dict[str, SegmentStart] = {}
        for answers in self._connection.ask_all(asked):
            for message in _messages(answers):
                name, head = names[message.subject], head_of(message.sequence, message.headers)
                if head.status in (OPEN, SEALED) and head.offset == head.start_offset:
                    found[name] = SegmentStart(head.start_offset, message.data[:max_bytes])
        return found

    def first_sequence(self, segment: str) -> int | None:
        """Return the sequence of the first message of the segment; None if a replica has none yet."""
        messages = _messages(self._connection.ask_all([self._next(segment, 1, 1)])[0])
        return messages[0].sequence if messages else None

    def first_needed(self, segment: str, head: Head, offset: int) -> int:
        """Return the sequence of the message that holds the byte at the offset; earlier messages can be purged.

        The message itself confirms this. Returns 1 (purge nothing) if it is not found, because another process
        truncates as well or the known places are wrong.
        """
        sequence, empty_answers = self._locate(segment, head, offset).sequence, 0
        while True:
            try:
                messages = self._more(segment, sequence, _NEAR_BYTES, empty_answers)
            except _Gap:
                self._hints.forget(segment)
                return 1
            for message in messages:
                begin = head_of(message.sequence, message.headers).offset
                if begin > offset:
                    self._hints.forget(segment)
                    return 1
                if begin + len(message.data) > offset:
                    return message.sequence
                sequence = message.sequence + 1
            empty_answers = 0 if messages else empty_answers + 1

    def _head_and_messages(self, segment: str, offset: int, max_bytes: int) -> tuple[Head, list[Stored]]:
        place = self._hints.start_before(segment, offset)
        if place is None or offset - place.offset > _NEAR_BYTES:
            return self.head(segment), []
        wanted = offset - place.offset + max_bytes
        answers = self._connection.ask_all(
            [self._last(self._subjects.data(segment)), self._next(segment, place.sequence, wanted)]
        )
        head = self._head_in(answers[0][0])
        if self._is_of_the_past(segment, head) or (head is not None and head.is_part):
            return self.head(segment), []
        self._remember(segment, head, anyhow=False)
        return self._existing(segment, head), _messages(answers[1])

    def _bytes(self, segment: str, head: Head, offset: int, end: int, messages: list[Stored]) -> bytes:
        parts: list[bytes] = []
        position, following, empty_answers = offset, 0, 0
        while position < end:
            for message in messages:
                begin = head_of(message.sequence, message.headers).offset
                following = message.sequence + 1
                if begin + len(message.data) <= position:
                    continue
                if begin > position:
                    raise _Gap
                part = message.data
                if position > begin or begin + len(part) > end:
                    part = part[position - begin : end - begin]
                parts.append(part)
                position += len(part)
                if position == end:
                    self._see_places(segment, message, begin)
                    break
            else:
                empty_answers = 0 if messages else empty_answers + 1
                following = following or self._locate(segment, head, position).sequence
                messages = self._more(segment, following, end - position, empty_answers)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _more(self, segment: str, sequence: int, wanted: int, empty_answers: int) -> list[Stored]:
        if empty_answers > 1:
            _sleep(_FIRST_PAUSE_SECONDS * 2**empty_answers)
        if empty_answers < _PATIENCE:
            return self._from_any(segment, sequence, wanted)
        message = self._from_leader(segment, sequence)
        if message is None:
            raise _Gap
        return [message]

    def _see_places(self, segment: str, message: Stored, begin: int) -> None:
        self._hints.note_start(segment, MessageStart(begin, message.sequence))
        self._hints.note_start(segment, MessageStart(begin + len(message.data), message.sequence + 1))

    def _locate(self, segment: str, head: Head, offset: int) -> MessageStart:
        """Return a place at or shortly before the offset."""
        low = self._hints.start_before(segment, offset) or MessageStart(head.start_offset, 0)
        high = self._hints.start_after(segment, offset) or MessageStart(head.length, head.sequence + 1)
        is_guess = True
        while high.sequence - low.sequence > 1 and high.offset - low.offset > _NEAR_BYTES:
            share = (offset - low.offset) / (high.offset - low.offset) if is_guess else 0.5
            is_guess = not is_guess  # alternate with halving, so that uneven messages cannot slow it down
            span = high.sequence - low.sequence
            middle = low.sequence + min(max(1, int(span * share)), span - 1)
            message = self._at(segment, middle)
            if message is None or message.sequence >= high.sequence:
                high = MessageStart(high.offset, middle)
                continue
            begin = head_of(message.sequence, message.headers).offset
            self._hints.note_start(segment, MessageStart(begin, message.sequence))
            if begin > offset:
                high = MessageStart(begin, middle)
            else:
                low = MessageStart(begin, message.sequence)
        return low

    def _first_offset(self, segment: str, head: Head) -> int:
        message = self._from_leader(segment, 0)
        return head.length if message is None else head_of(message.sequence, message.headers).offset

    def _from_any(self, segment: str, sequence: int, wanted: int) -> list[Stored]:
        return _messages(self._connection.ask_all([self._next(segment, sequence, wanted)])[0])

    def _at(self, segment: str, sequence: int) -> Stored | None:
        body = request(seq=max(1, sequence), next_by_subj=self._subjects.data(segment))
        answer = self._connection.ask(self._api.direct_get, body)
        return None if answer.status else directly_stored(answer.headers, answer.data)

    def _from_leader(self, segment: str, sequence: int) -> Stored | None:
        body = request(seq=max(1, sequence), next_by_subj=self._subjects.data(segment))
        answer = self._connection.ask(self._api.get, body)
        if _error_code(answer) == _NOT_FOUND:
            return None
        return stored(self._read(answer))

    # Attributes

    def attributes(self, segment: str, names: Collection[str] | None) -> Snapshot:
        """Return all attributes or those in ``names``, at one moment not before the start of the call."""
        deadline = Deadline(_clock, self._timeout_seconds)
        past = Deadline(_clock, _DEPOSED_SECONDS if self._is_replicated else 0)
        for pause in _pauses():
            snapshot = self._try_attributes(segment, names, past)
            if snapshot is not None:
                return snapshot
            if deadline.passed:
                break
            _sleep(pause)
        raise StoreUnavailableError("the attributes changed during every read; try again", segment=segment)

    def _try_attributes(self, segment: str, names: Collection[str] | None, past: Deadline) -> Snapshot | None:
        if names is not None:
            return self._values(segment, [self._subjects.attribute(segment, name) for name in names], past)
        try:
            return self._values(segment, [self._subjects.attributes(segment)], past)
        except _TooManySubjects:
            listing = self.subjects(self._subjects.attributes(segment))
            return self._values(segment, listing.messages, past, listing.last_sequence)

    def _values(
        self, segment: str, subjects: Collection[str], past: Deadline, listed_to: int | None = None
    ) -> Snapshot | None:
        """Return the last messages on the subjects, if all are of one moment that is not before this call; else None.

        If the subjects were listed, the moment must not be later than the list: a later change may have added some.
        """
        known = self._hints.head(segment)
        found = self._messages_of_a_moment(segment, subjects, past, listed_to, with_head=bool(known and known.carried))
        if found is not None and found.head is None and any(map(is_carried, found.messages)):
            found = self._messages_of_a_moment(segment, subjects, past, listed_to, with_head=True)
        if found is None:
            return None
        self._hints.see_changes(segment, found.changes)
        carried = {} if found.head is None else carried_in(found.head)
        values = {}
        for message in found.messages:
            name = name_in(message.subject, message.headers)
            value = carried.get(name) if is_carried(message) else value_of(message)
            values[name] = AttributeValue(value, message.sequence)
        return Snapshot(values, carried)

    def _messages_of_a_moment(
        self, segment: str, subjects: Collection[str], past: Deadline, listed_to: int | None, *, with_head: bool
    ) -> _Moment | None:
        changes, data = self._subjects.changes(segment), self._subjects.data(segment)
        always = [changes, data] if with_head else [changes]
        asked = [
            Outgoing(self._api.direct_get, request(multi_last=[*always, *group]), None, True, True)
            for group in _groups(subjects, self._connection.max_payload // 2)
        ]
        answers = self._connection.ask_all([*map(self._last, always), *asked])
        leaders = self._changes_in(segment, answers[0][0], past)
        if leaders is None:
            return None  # the leader's answer is old
        newest = {changes: leaders.sequence}
        if with_head:
            head = self._head_in(answers[1][0])
            if head is None or self._is_of_the_past(segment, head) or head.is_part:
                self.head(segment)  # waits, removes what is torn, or raises
                return None
            newest[data] = head.sequence
        moments = set()
        messages: list[Stored] = []
        for group in answers[len(always) :]:
            if group[-1].status == _TOO_MANY:
                raise _TooManySubjects
            found = {message.subject: message for message in _messages(group)}
            if not found or len(found) != number_in(group[0].headers, "Nats-Num-Pending") + 1:
                return None  # a value was replaced while the server gathered them
            if any(name not in found or found[name].sequence < sequence for name, sequence in newest.items()):
                return None  # the replica is behind
            seen = found.pop(changes)
            end = seen.sequence + (changes_of(seen) or 1) - 1
            if number_in(group[-1].headers, "Nats-UpTo-Sequence") < end:
                return None  # in the middle of a change of several attributes
            if listed_to is not None and listed_to < end:
                return None
            stored_data = found.pop(data, None)
            head = None if stored_data is None else head_of(stored_data.sequence, stored_data.headers)
            if head is not None and head.is_part:
                return None
            moments.add((seen.sequence, head))
            messages += found.values()
        if len(moments) != 1:
            return None
        ((sequence, head),) = moments
        return _Moment(sequence, head, messages)

    def _changes_in(self, segment: str, answer: Answer, past: Deadline) -> Stored | None:
        """Return the leader's message of the newest change; None if this process has seen a newer one."""
        if _error_code(answer) == _NOT_FOUND:
            if past.passed or not self._hints.changes(segment):
                raise not_found(segment)
            self.head(segment)  # raises, if it was deleted
            return None
        message = stored(self._read(answer))
        if changes_of(message) is None:
            raise not_found(segment)
        if message.sequence < self._hints.changes(segment):
            if not past.passed:
                return None
            self._hints.forget(segment)  # the store has lost data
        return message

    def subjects(self, subject_filter: str) -> Listing:
        """Return the subjects that match, from a leader that is not behind what this process has seen."""
        past = Deadline(_clock, _DEPOSED_SECONDS if self._is_replicated else 0)
        for pause in _pauses():
            listing = self._listed(subject_filter)
            if listing.last_sequence >= self._hints.newest:
                return listing
            if past.passed:
                self._hints.newest = listing.last_sequence  # the store has lost data
                return listing
            _sleep(pause)
        raise AssertionError("the pauses do not end")

    def _listed(self, subject_filter: str) -> Listing:
        found: dict[str, int] = {}
        last_sequence: int | None = None
        while True:
            body = request(subjects_filter=subject_filter, offset=len(found))
            info = self._read(self._connection.ask(self._api.info, body))
            try:
                page, last = dict(info["state"].get("subjects") or {}), int(info["state"]["last_seq"])
                total = int(info.get("total", 0))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptStoreError("the server's answer lists no subjects") from error
            found |= page
            last_sequence = min(last, last_sequence if last_sequence is not None else last)
            if not page or len(found) >= total:
                return Listing(found, last_sequence)

    # Requests

    def _last(self, subject: str) -> Outgoing:
        return Outgoing(self._api.get, request(last_by_subj=subject))

    def _next(self, segment: str, sequence: int, wanted: int) -> Outgoing:
        body = request(
            seq=max(1, sequence),
            next_by_subj=self._subjects.data(segment),
            batch=_MAX_MESSAGES,
            max_bytes=min(wanted, _MAX_READ_BYTES),
        )
        return Outgoing(self._api.direct_get, body, None, True, True)

    def _read(self, answer: Answer) -> Mapping[str, Any]:
        return read_answer(self._connection, answer)


_NOT_FOUND: Final = 10037
_TOO_MANY: Final = "413"


def read_answer(connection: NatsConnection, answer: Answer) -> Mapping[str, Any]:
    """Return the document in an answer of the JetStream API; raise if it is an error."""
    document = answer.document
    if "error" in document:
        raise connection.unavailable(error_in(document)[1])
    return document


def _error_code(answer: Answer) -> int | None:
    if not answer.data.startswith(b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error"'):
        return None
    return error_in(answer.document)[0]


def _messages(answers: Sequence[Answer]) -> list[Stored]:
    return [directly_stored(answer.headers, answer.data) for answer in answers if answer.status is None]


def _joined(messages: Sequence[Stored], start: int, end: int) -> bytes | None:
    """Return the bytes of a segment from ``start`` to ``end``; None if these messages do not begin and end so."""
    data = b""
    for message in messages:
        if head_of(message.sequence, message.headers).offset != start + len(data):
            return None
        data += message.data
    return data[: end - start] if start + len(data) >= end else None


def _groups(subjects: Collection[str], max_bytes: int) -> Iterator[list[str]]:
    """Yield the subjects in groups small enough for one request each; one empty group if there are none."""
    group: list[str] = []
    size = 0
    for subject in subjects:
        size += len(subject) + 4
        if len(group) == _MAX_SUBJECTS or size > max_bytes:
            yield group
            group, size = [], len(subject)
        group.append(subject)
    yield group


def _pauses() -> Any:
    pause = 0.0
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE_SECONDS, max(_FIRST_PAUSE_SECONDS, pause * 2))


def _sleep(seconds: float) -> None:
    if seconds:
        _clock.wait(Flag(), seconds)
