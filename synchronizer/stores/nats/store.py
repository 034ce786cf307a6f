"""A store in a JetStream stream of NATS: shared by the processes of many machines, on one server or on three.

Module `wire` describes how the stream holds segments. This store differs from the others in two ways. It compares every
append with the state that the process knows of the segment, and retries after a lost race, because a server knows no
sealed segments. And a client cannot see whether the servers write to disk before they acknowledge, so the operator
states that in the address.
"""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import Final, NamedTuple

from synchronizer.clock import Clock, Deadline, SystemClock
from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.loggers import get_logger
from synchronizer.store import (
    ANY,
    MAX_APPEND_BYTES,
    MAX_ATTRIBUTE_CHANGES,
    MAX_DELTA_BYTES,
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
    UnknownOutcome,
)
from synchronizer.threads.flag import Flag

from ..checks import (
    all_are_new,
    check_append,
    check_appends,
    check_attributes,
    check_create,
    check_create_together,
    check_fair_lock,
    check_forget,
    check_infos,
    check_name,
    check_open,
    check_prefix,
    check_read,
    check_read_call,
    check_read_starts,
    check_truncate,
    check_wait,
    check_within,
    not_found,
    sealed,
)
from ..parts import in_parts
from .address import NatsAddress, parse_address
from .connection import AnswerLostError, NatsConnection, NotSentError
from .fair_lock import TicketLock
from .frames import Answer, Outgoing, error_in
from .hints import AttributeValue, Hints
from .jetstream import FULL, JetStream
from .reading import NatsReader, Snapshot, read_answer
from .rights import Api
from .waiting import NatsWaiters
from .wire import (
    ATTRIBUTE,
    BATCH_ID,
    CARRIED,
    DELETED,
    EXPECTED,
    EXPECTED_OF,
    FORGOTTEN,
    GROUP,
    MAX_BATCH,
    OPEN,
    PART,
    REMOVED,
    ROLLUP,
    SEALED,
    SET,
    Head,
    Subjects,
    carried_in,
    carrying,
    head_header,
    name_header,
    request,
    stored,
)

_logger = get_logger(__name__)

#: Up to this size, data is in the message with the head. Larger data goes into parts before it: heads must stay small.
_MAX_INLINE_BYTES: Final = 64 * 1024 + 2048
_MAX_PART_BYTES: Final = 256 * 1024
#: The most that headers and subject add to the data of a message, apart from what its head carries.
_HEADER_BYTES: Final = 1024
#: The most that a head carries: attributes, bytes of one of them, and of all. Each append stores them again.
_MAX_CARRIED: Final = 16
_MAX_ENTRY_BYTES: Final = 192
_MAX_CARRIED_BYTES: Final = 768

#: One purge deletes about this much: meanwhile the server does nothing else, 40 ms for 27 MB. It rewrites a block of
#: 8 MB that has lost half of its data, which takes some 30 ms; a larger purge of one of several segments that share
#: blocks rewrites several.
_PURGE_BYTES: Final = 512 * 1024

#: Threads of a process that append to one segment take turns, because one at a time can succeed. This is the number of
#: locks that they share. A thread goes on without its turn after this time, as when the answer to another was lost.
_TURNS: Final = 64
_TURN_SECONDS: Final = 1.0

#: How many segments one round of requests asks for, at most.
_AT_ONCE: Final = 250

_CONFLICTS: Final = (10071, 10164)  # wrong sequence; conflict with an earlier proposal that is still in flight


_warned = Flag()


class NatsStore(SegmentStore):
    """Segments in the JetStream stream that the address names. The stream is created if it does not exist.

    ``nats://user:password@host:4222,host:4222?option=value`` takes these options:

    - ``stream`` (default `readergroup`): the name of the stream; one stream is one store.
    - ``replicas`` (1, or those of the existing stream): with 3 the store survives the loss of a server.
    - ``max_bytes`` (no limit): the size limit of a new stream. Choose one for which the servers have room: at this
      limit they keep an append whole, but not always at the limit of an account or a disk (`docs/operations.md`).
    - ``durable=always``: states that all servers run with ``sync_interval: always``, which a client cannot see.
      Without it ``guarantees.durable`` is False, and a warning says what may be lost.
    - ``timeout_seconds`` (5): how long a call waits for an answer.
    - ``credentials`` and ``nkey``: the path of a credentials file, or of a file with an NKey seed. Write a token alone
      before the host.
    - ``tls=require``, ``tls_ca``, ``tls_cert``, ``tls_key``, ``tls_hostname``; ``inbox_prefix``.

    Args:
        url: The address.
        clock: The clock for waits.
        must_exist: Do not create the stream, and raise `NotFoundError` if it does not exist.

    Raises:
        InvalidArgumentError: The address is wrong.
        StoreUnavailableError: The servers cannot be reached.
        StorePermissionError: The user lacks a right.
        UnsupportedError: A server is older than 2.12, has no JetStream, or there are fewer servers than replicas.
        AlreadyExistsError: The stream is not a store of this SDK.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, must_exist: bool = False) -> None:
        address = parse_address(url)
        self.url = address.url
        self._process_id = os.getpid()
        self._is_closed = False
        self._timeout_seconds = address.timeout_seconds
        self._subjects = Subjects(address.stream)
        self._api = Api(address.stream)
        self._connection = NatsConnection(address)
        try:
            self._open(address, clock or SystemClock(), must_exist)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, address: NatsAddress, clock: Clock, must_exist: bool) -> None:
        self._connection.open()
        replicas = JetStream(self._connection, self._subjects, self.url, address.timeout_seconds).open(
            address.replicas, address.max_bytes, must_exist
        )
        self._part_bytes = max(
            1, min(_MAX_PART_BYTES, self._connection.max_payload - _HEADER_BYTES - _MAX_CARRIED_BYTES)
        )
        self.guarantees = Guarantees(
            durable=address.is_durable,
            linearizable_append=True,
            # A deposed leader that has not noticed may return old data.
            linearizable_read=replicas == 1,
            push=True,
            many_processes=True,
            many_hosts=True,
            atomic_multi_append=True,
            atomic_multi_create=True,
            fair_lock=True,
            largest_append=min(
                MAX_APPEND_BYTES, self._part_bytes * (MAX_BATCH - MAX_ATTRIBUTE_CHANGES - _MAX_CARRIED - 10)
            ),
        )
        self._hints = Hints()
        self._turns = [threading.RLock() for _ in range(_TURNS)]
        self._reader = NatsReader(self._connection, self._subjects, self._hints, address.timeout_seconds, replicas > 1)
        self._waiters = NatsWaiters(self._connection, self._subjects, self._hints, self._reader.heads, clock)
        self._fair_lock = TicketLock(self._connection, address.stream, clock)
        if not address.is_durable:
            _warn_once(self.url)

    def __del__(self) -> None:
        """Close a store without references, for instance after an interrupt between its constructor and the caller."""
        try:
            self._connection.abandon()
        except Exception:  # the constructor refused the address, or the process ends
            return

    # The verbs

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        check_create(segment, start_offset)
        return self._create({segment: b""}, {segment: start_offset})

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        starts = check_create_together(segments, start_offsets)
        return self._create(segments, starts) if segments else True

    def _create(self, segments: Mapping[str, bytes], starts: Mapping[str, int]) -> bool:
        self._check_open()
        messages: list[_Message] = []
        for segment, data in segments.items():
            start = starts[segment]
            head = Head(0, start, start, start, OPEN)
            messages += self._data_messages(_Plan(Append(segment, data), head, 0, Snapshot({})))
            messages.append(_Message(self._subjects.name(segment), segment.encode()))
            messages.append(_Message(self._subjects.changes(segment), b"", {GROUP: "1"}))
        for _ in self._attempts(min(segments)):
            last = self._store_repeatable(messages)
            if last is not None:
                self._see_created(segments, starts, _sequences(messages, last))
                return True
            known = {}
            for name, present in zip(segments, self._reader.heads(list(segments)), strict=True):
                if present is not None and present.is_forgotten:
                    self._purge_ended(name, present)  # the process that forgot it may have died before it did
                elif present is not None:
                    known[name] = present.is_deleted
            if not all_are_new(known):
                return False
        raise self._contended(min(segments))

    def _see_created(
        self, segments: Mapping[str, bytes], starts: Mapping[str, int], sequences: Mapping[str, int]
    ) -> None:
        for segment, data in segments.items():
            sequence, start = sequences[self._subjects.data(segment)], starts[segment]
            self._hints.see_head(segment, Head(sequence, start, start + len(data), start, OPEN))
            self._hints.see_life(segment, sequences[self._subjects.name(segment)])
            self._hints.see_changes(segment, sequences[self._subjects.changes(segment)])

    def delete(self, segment: str) -> None:
        check_name(segment)
        self._check_open()
        if not self._end(segment, DELETED):
            raise not_found(segment)

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        check_forget(segment, expected_offset)
        self._check_open()
        self._end(segment, FORGOTTEN, expected_offset)

    def _end(self, segment: str, status: str, expected_offset: int | None = None) -> bool:
        """Delete or forget the segment; return whether there was one, or its deleted name."""
        for _ in self._attempts(segment):
            (head,) = self._reader.heads([segment])
            if head is None:
                return False
            if expected_offset is not None and not head.is_forgotten:
                if head.is_deleted or head.length != expected_offset:
                    return True
            elif head.length - head.start_offset > _PURGE_BYTES and not head.is_deleted:
                with suppress(NotFoundError):  # deleted meanwhile
                    self.truncate(segment, head.length)  # the server deletes the rest at once
                continue
            if head.is_deleted:
                self._purge_ended(segment, head, with_name=status == FORGOTTEN)
                return not head.is_forgotten
            if (ended := self._try_end(segment, head, status)) is not None:
                self._purge_ended(segment, ended)
                return True
        raise self._contended(segment)

    def _purge_ended(self, segment: str, head: Head, *, with_name: bool = False) -> None:
        """Delete what is left of a segment that ended with this head, and no message that was stored after it."""
        # The messages of `_try_end` follow each other.
        self._purge(self._subjects.attributes(segment), head.sequence)
        self._purge(self._subjects.name(segment), head.sequence + 2)
        self._purge(self._subjects.changes(segment), head.sequence + 3)
        if with_name or head.is_forgotten:
            self._purge(self._subjects.data(segment), head.sequence + 1)
            self._hints.forget(segment)

    def _try_end(self, segment: str, head: Head, status: str) -> Head | None:
        """Store the last head of the segment, with this status, and return it; None if the segment has changed."""
        header = head_header(head.length, head.length, head.length, status)
        messages = [
            _Message(self._subjects.data(segment), b"", {EXPECTED: str(head.sequence), **ROLLUP, **header}),
            _Message(self._subjects.name(segment), b""),  # a second message here: the name is no longer listed
            _Message(self._subjects.changes(segment), b"", {GROUP: DELETED, **ROLLUP}),
        ]
        try:
            sequence = self._store_repeatable(messages)
        except StoreFullError:
            # A full store must accept a deletion: first make room for it.
            self._purge(self._subjects.data(segment), head.sequence)
            sequence = self._store_repeatable(messages)
        if sequence is None:
            return None
        ended = Head(sequence - 2, head.length, head.length, head.length, status)
        self._see(segment, ended)
        return ended

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        self._check_open()
        return _info(segment, self._reader.head(segment))

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        check_infos(segments)
        self._check_open()
        found: dict[str, SegmentInfo] = {}
        for part in in_parts(segments, _AT_ONCE):
            heads = zip(part, self._reader.heads(part), strict=True)
            found |= {name: _info(name, head) for name, head in heads if head is not None and not head.is_deleted}
        return found

    def list(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        self._check_open()
        names = []
        for subject_filter in self._subjects.names(prefix):
            for subject, messages in self._reader.subjects(subject_filter).messages.items():
                if messages != 1:
                    continue  # deleted
                name = self._subjects.name_at(subject)
                names.append(self._long_name(subject) if name is None else name)
        return iter(sorted(name for name in names if name.startswith(prefix)))

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_append(segment, data, expected_offset, attributes)
        result = self._append([Append(segment, data, expected_offset, attributes or {})])
        if isinstance(result, tuple):
            return result[0]
        return result if isinstance(result, UnknownOutcome) else result[segment]

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        check_appends(appends)
        self._check_open()
        return self._append(appends) if appends else ()

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        check_read_call(segment, offset, max_bytes)
        self._check_open()
        if max_bytes < 1 or offset < 0:
            head, data = self._reader.head(segment), b""
        else:
            head, data = self._reader.read(segment, offset, max_bytes)
        check_read(segment, offset, max_bytes, head.start_offset, head.length)
        return data

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        check_read_starts(segments, max_bytes)
        self._check_open()
        found: dict[str, SegmentStart] = {}
        for part in in_parts(segments, _AT_ONCE):
            found |= self._reader.starts(part, max_bytes)
        return found

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        check_attributes(segment, prefix, names)
        self._check_open()
        wanted = None if names is None else {name for name in names if name.startswith(prefix)}
        snapshot = self._reader.attributes(segment, wanted)
        return {
            name: value for name, (value, _) in snapshot.values.items() if value is not None and name.startswith(prefix)
        }

    def truncate(self, segment: str, offset: int) -> None:
        check_truncate(segment, offset)
        self._check_open()
        for _ in self._attempts(segment):
            head = self._reader.head(segment)
            check_within(segment, offset, head.length)
            if offset < head.start_offset:
                return
            first = head.sequence
            if offset < head.length:
                first = self._reader.first_needed(segment, head, offset)
            if offset == head.start_offset or self._try_truncate(segment, head, offset, first):
                self._purge_in_portions(segment, min(first, head.sequence), offset - head.start_offset)
                return
        raise self._contended(segment)

    def _try_truncate(self, segment: str, head: Head, offset: int, first: int) -> bool:
        header = head_header(head.length, head.length, offset, head.status, head.carried)
        message = _Message(self._subjects.data(segment), b"", {EXPECTED: str(head.sequence), **header})
        try:
            sequence = self._store_repeatable([message])
        except StoreFullError:
            # Truncation must be able to make room. A reader in between correctly gets the error for truncated bytes.
            self._purge(self._subjects.data(segment), first)
            sequence = self._store_repeatable([message])
        if sequence is not None:
            self._see(segment, Head(sequence, head.length, head.length, offset, head.status, head.carried))
        return sequence is not None

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        self._check_open()
        for _ in self._attempts(segment):
            head = self._reader.head(segment)
            if head.is_sealed:
                return _info(segment, head)
            header = head_header(head.length, head.length, head.start_offset, SEALED, head.carried)
            sequence = self._store_repeatable(
                [
                    _Message(self._subjects.data(segment), b"", {EXPECTED: str(head.sequence), **header}),
                    _Message(self._subjects.name(segment), segment.encode(), ROLLUP),
                ]
            )
            if sequence is not None:
                head = Head(sequence - 1, head.length, head.length, head.start_offset, SEALED, head.carried)
                self._see(segment, head)
                return _info(segment, head)
        raise self._contended(segment)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        check_wait(known, timeout)
        self._check_open()
        return self._waiters.wait(known, timeout)

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        check_fair_lock(segment, timeout, patience)
        self._check_open()
        return self._fair_lock.acquire(segment, timeout, patience, store=self)

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return
        self._is_closed = True  # if an interrupt comes after this, `close` can be called again
        self._waiters.close()
        self._fair_lock.close()
        self._connection.close()

    # Appending

    def _append(self, parts: Sequence[Append]) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        self._check_size(parts)
        turn = self._turns[hash(parts[0].segment) % len(self._turns)]
        try:
            if any(part.data for part in parts):
                turn.acquire(timeout=_TURN_SECONDS)
            return self._append_in_turn(parts)
        finally:
            # No call stands before the release, so no interrupt comes. It raises if this thread did not acquire it.
            try:  # noqa: SIM105  which would be a call
                turn.release()
            except RuntimeError:
                pass

    def _append_in_turn(
        self, parts: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        for attempt in self._attempts(parts[0].segment):
            plans: list[_Plan] = []
            conflicts: dict[str, Conflict] = {}
            for part in parts:
                plan = self._plan(part, is_fresh=attempt > 0, is_only_one=len(parts) == 1)
                if isinstance(plan, Conflict):
                    conflicts[part.segment] = plan
                elif plan is not None:
                    plans.append(plan)
            if conflicts:
                return conflicts
            if len(plans) < len(parts):
                continue
            messages = self._messages(plans)
            try:
                sequence = self._store(messages)
            except AnswerLostError as error:
                for plan in plans:
                    self._hints.forget_head(plan.part.segment)
                return UnknownOutcome(error)
            if sequence is not None:
                return self._appended(plans, messages, sequence)
        raise self._contended(parts[0].segment)

    def _plan(self, part: Append, *, is_fresh: bool, is_only_one: bool) -> _Plan | Conflict | None:
        """Return what to append where, or the conflict; None if the segment changes meanwhile.

        Uses the hints unless ``is_fresh``, as after a lost race.
        """
        if not is_fresh:
            plan = self._plan_by_hints(part, is_only_one=is_only_one)
            if plan is not None:
                return plan
        segment = part.segment
        head, delta = self._head_and_delta(part)
        if head.is_sealed:
            raise sealed(segment, head.length)
        present = self._reader.attributes(segment, part.attributes) if part.attributes else Snapshot({})
        carried = carried_in(head)
        for name in part.attributes:
            self._hints.see_value(segment, name, None if name in present.carried else present.value(name))
        if any(name in present.carried and name not in carried for name in part.attributes):
            return None
        present = present.under(carried)
        if part.expected_offset not in (None, head.length) or not _are_as_expected(part, present):
            attributes = {name: present.value(name).value for name in part.attributes}
            return Conflict(head.length, delta, attributes)
        return self._planned(part, head, None, present, is_only_one=is_only_one)

    def _plan_by_hints(self, part: Append, *, is_only_one: bool) -> _Plan | None:
        """Plan without asking the server; return None if the hints are not enough or suggest a conflict."""
        head = self._hints.head(part.segment)
        if head is None or part.expected_offset not in (None, head.length) or head.status != OPEN:
            return None
        values = {}
        carried = carried_in(head)
        for name, change in part.attributes.items():
            if name in carried:
                continue
            value = self._hints.value(part.segment, name)
            if value is None and change.expected is None:
                value = AttributeValue(None, 0)  # most likely the attribute never existed
            if value is None:
                return None
            values[name] = value
        present = Snapshot(values).under(carried)
        if not _are_as_expected(part, present):
            return None
        return self._planned(part, head, self._hints.life(part.segment), present, is_only_one=is_only_one)

    def _planned(self, part: Append, head: Head, life: int | None, present: Snapshot, *, is_only_one: bool) -> _Plan:
        """Return the plan, which says where the values will be.

        The head carries the attributes that one process changes with append after append of data, as a writer does. If
        there is no room for a new one, another one makes it, but not in an append to many segments: these are as many
        messages as it may have.
        """
        carried = dict(present.carried)
        moved: dict[str, tuple[str, bytes]] = {}
        for name, change in part.attributes.items():
            was_carried = carried.pop(name, None) is not None
            is_new = present.value(name).value is None
            if change.new is None:
                if not was_carried:
                    moved[name] = (REMOVED, b"")
            elif (
                part.data
                and (was_carried or is_new or self._hints.was_written(part.segment, name))
                and len(carrying({name: change.new})) <= _MAX_ENTRY_BYTES
            ):
                carried[name] = change.new
                if not was_carried:
                    moved[name] = (CARRIED, b"")
            else:
                moved[name] = (SET, change.new)
        while len(carried) > _MAX_CARRIED or len(carrying(carried)) > _MAX_CARRIED_BYTES:
            # Not the one that was changed longest ago: the writers of a segment take turns.
            names = [name for name in carried if is_only_one or name in part.attributes] or [*carried]
            name = names[head.sequence % len(names)]
            moved[name] = (SET, carried.pop(name))
        is_in_data = bool(part.data) or any(name in present.carried for name in part.attributes)
        return _Plan(
            part, head, 0 if is_in_data else self._life(part, life), present, carrying(carried), moved, is_in_data
        )

    def _head_and_delta(self, part: Append) -> tuple[Head, bytes]:
        if part.expected_offset is None:
            return self._reader.head(part.segment), b""
        return self._reader.read(part.segment, part.expected_offset, MAX_DELTA_BYTES)

    def _life(self, part: Append, known: int | None) -> int:
        """Return the sequence that an append of attributes only depends on, which appends of data leave; else 0."""
        if part.data or part.expected_offset is not None:
            return 0
        return known or self._reader.life(part.segment)

    def _messages(self, plans: Sequence[_Plan]) -> Sequence[_Message]:
        """Return the messages to store, attributes last. Each change says how many messages there are from it on."""
        messages: list[_Message] = []
        changes: list[_Message] = []
        for plan in plans:
            if plan.is_in_data:
                messages += self._data_messages(plan)
            if plan.moved or not plan.is_in_data:
                changes += self._attribute_messages(plan)
        for index, message in enumerate(changes):
            messages.append(message.counting(len(changes) - index) if GROUP in message.headers else message)
        return messages

    def _data_messages(self, plan: _Plan) -> Iterator[_Message]:
        """Yield the data in as many messages as it needs. The first one compares, the last one is the head."""
        subject = self._subjects.data(plan.part.segment)
        data, head = plan.part.data, plan.head
        length = head.length + len(data)
        expected: Mapping[str, str] = {EXPECTED: str(head.sequence)}
        if len(data) <= min(_MAX_INLINE_BYTES, self._part_bytes):
            header = head_header(head.length, length, head.start_offset, OPEN, plan.carried)
            yield _Message(subject, data, {**expected, **header})
            return
        view = memoryview(data)
        for first in range(0, len(data), self._part_bytes):
            part = bytes(view[first : first + self._part_bytes])
            header = head_header(head.length + first, length, head.start_offset, PART)
            yield _Message(subject, part, {**expected, **header})
            expected = {}
        yield _Message(subject, b"", head_header(length, length, head.start_offset, OPEN, plan.carried))

    def _attribute_messages(self, plan: _Plan) -> Iterator[_Message]:
        segment = plan.part.segment
        condition: Mapping[str, str] = {}
        if plan.life:
            condition = {EXPECTED: str(plan.life), EXPECTED_OF: self._subjects.name(segment)}
        elif not plan.is_in_data:
            condition = {EXPECTED: str(plan.head.sequence), EXPECTED_OF: self._subjects.data(segment)}
        yield _Message(self._subjects.changes(segment), b"", {**condition, GROUP: "", **ROLLUP})
        for name, (kind, value) in plan.moved.items():
            before = plan.present.value(name)
            is_carried = name in plan.present.carried  # changes of it change the head, which is compared
            expected = {} if is_carried else {EXPECTED: str(before.sequence)}
            restored = (CARRIED, b"") if is_carried else before.value if before.value is None else (SET, before.value)
            yield _Message(
                self._subjects.attribute(segment, name),
                value,
                {**expected, ATTRIBUTE: kind, **name_header(name), **ROLLUP},
                restored,
            )

    def _appended(self, plans: Sequence[_Plan], messages: Sequence[_Message], last: int) -> tuple[Appended, ...]:
        """Remember what was stored and return the answers. ``last`` is the sequence of the last message."""
        sequences = _sequences(messages, last)
        results = []
        for plan in plans:
            segment, data = plan.part.segment, plan.part.data
            length = plan.head.length + len(data)
            if plan.is_in_data:
                sequence = sequences[self._subjects.data(segment)]
                self._see(segment, Head(sequence, plan.head.length, length, plan.head.start_offset, OPEN, plan.carried))
            self._hints.see_changes(segment, sequences.get(self._subjects.changes(segment), 0))
            for name, change in plan.part.attributes.items():
                self._hints.see_written(segment, name, with_data=bool(data))
                if change.new is None and name in plan.present.carried:
                    self._purge_unheard(self._subjects.attribute(segment, name), sequence)
            for name, (kind, value) in plan.moved.items():
                subject = self._subjects.attribute(segment, name)
                known = AttributeValue(None if kind == REMOVED else value, sequences[subject])
                self._hints.see_value(segment, name, None if kind == CARRIED else known)
                if kind == REMOVED:
                    self._purge_unheard(subject, sequences[subject] + 1)
            results.append(Appended(plan.head.length, length))
        return tuple(results)

    def _check_size(self, parts: Sequence[Append]) -> None:
        size, messages = 0, _MAX_CARRIED if len(parts) == 1 else 0
        for part in parts:
            size += len(part.data)
            messages += len(part.data) // self._part_bytes + 3 + len(part.attributes)
            for name, change in part.attributes.items():
                self._check_value(name, change)
        if size > self.guarantees.largest_append or messages > MAX_BATCH:
            raise InvalidArgumentError(
                "the append is too large for the servers; split it, or raise their max_payload",
                bytes=size,
                limit=self.guarantees.largest_append,
                max_payload=self._connection.max_payload,
            )

    def _check_value(self, name: str, change: AttributeChange) -> None:
        needed = len(change.new or b"") + sum(map(len, name_header(name).values())) + 4 * _HEADER_BYTES
        if needed > self._connection.max_payload:
            raise InvalidArgumentError(
                "the value of an attribute is too large for one message; raise max_payload of the servers",
                attribute=name,
                max_payload=self._connection.max_payload,
            )

    # Storing

    def _store(self, messages: Sequence[_Message]) -> int | None:
        """Store all messages in one step; return the sequence of the last, None if an expectation failed.

        Raises `StoreUnavailableError` if certainly nothing was stored, `AnswerLostError` if that is not known.
        """
        batch_id = ""
        if len(messages) > 1:
            batch_id = uuid.uuid4().hex
            outgoing = _batch(batch_id, messages)
        else:
            outgoing = [Outgoing(*messages[0][:3])]
        try:
            answer = self._connection.exchange(outgoing)[-1][0]
        except NotSentError as error:
            raise self._connection.failed(error) from error
        if answer.is_from_nobody:
            raise self._connection.unavailable(
                "no server leads the stream, as during the election of a leader; try again"
            )
        try:
            return self._stored_sequence(answer, len(messages))
        except StoreFullError:
            if batch_id:
                self._undo(batch_id, messages)
            raise

    def _undo(self, batch_id: str, messages: Sequence[_Message]) -> None:
        """Remove the stored part of a refused batch: a server checks some limits for each message separately."""
        self._reader.undo(batch_id, dict.fromkeys(message.subject for message in reversed(messages)))
        for message in messages:
            if message.before is not None:
                kind, value = message.before
                self._store([_Message(message.subject, value, {**message.headers, ATTRIBUTE: kind, EXPECTED: "0"})])

    def _store_repeatable(self, messages: Sequence[_Message]) -> int | None:
        """Do `_store` for messages that may be stored twice: an unknown outcome is a `StoreUnavailableError` too."""
        try:
            return self._store(messages)
        except AnswerLostError as error:
            raise self._connection.failed(error) from error

    def _stored_sequence(self, answer: Answer, messages: int) -> int | None:
        try:
            document = answer.document
        except CorruptStoreError as error:
            raise AnswerLostError(str(error)) from error
        if "error" not in document:
            if messages > 1 and document.get("count") != messages:
                raise CorruptStoreError(
                    "a server older than 2.12 stored an atomic batch in parts; stop all processes, upgrade the "
                    "server and restore the store from a backup",
                    url=self.url,
                )
            if not isinstance(document.get("seq"), int):
                raise AnswerLostError("the answer has no sequence number")
            return int(document["seq"])
        code, description = error_in(document)
        if code in _CONFLICTS:
            return None
        if code in FULL:
            raise StoreFullError(
                "the stream or account has reached its limit; raise it, then truncate or delete streams",
                url=self.url,
                server_says=description,
            )
        raise self._connection.unavailable(f"{description} ({code})")

    def _purge(self, subject: str, before: int | None = None) -> None:
        """Delete the messages on the subject, or only those before a sequence."""
        answer = self._connection.ask(self._api.purge, request(filter=subject, seq=before))
        read_answer(self._connection, answer)

    def _purge_in_portions(self, segment: str, before: int, size: int) -> None:
        """Delete the data of a segment before a sequence, about ``size`` bytes, so that others get in between."""
        subject, portions = self._subjects.data(segment), size // _PURGE_BYTES + 1
        first = self._reader.first_sequence(segment) if portions > 1 else None
        if first is not None:
            for number in range(1, portions):
                self._purge(subject, first + (before - first) * number // portions)
        self._purge(subject, before)

    def _purge_unheard(self, subject: str, before: int) -> None:
        """Do `_purge` without waiting for an answer. If it is lost, the messages only take space."""
        message = Outgoing(self._api.purge, request(filter=subject, seq=before), None, has_answer=False)
        self._connection.send(message)

    def _see(self, segment: str, head: Head) -> None:
        self._hints.see_head(segment, head)
        self._waiters.see(segment, head)

    def _attempts(self, segment: str) -> Iterator[int]:
        """Yield attempts until the timeout. Each failed attempt has lost a race."""
        deadline = Deadline(SystemClock(), self._timeout_seconds)
        for attempt in count():
            self._check_open()
            yield attempt
            if deadline.passed:
                return

    def _contended(self, segment: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            "other processes changed the segment before every attempt; try again", segment=segment
        )

    def _long_name(self, subject: str) -> str:
        answer = self._connection.ask(self._api.get, request(last_by_subj=subject))
        return stored(read_answer(self._connection, answer)).data.decode("utf-8", "replace")

    def _check_open(self) -> None:
        check_open(self._process_id, self._is_closed, self.url)


class _Message(NamedTuple):
    """A message to store."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = {}
    before: tuple[str, bytes] | None = None  # the kind and the value that it replaces

    def counting(self, messages: int) -> _Message:
        """Return the message with the number of messages from it to the end of the batch."""
        return self._replace(headers={**self.headers, GROUP: str(messages)})


class _Plan(NamedTuple):
    """An append and the state that it is compared with."""

    part: Append
    head: Head
    life: int
    present: Snapshot
    carried: str = ""  # by the head that follows
    #: What the subjects of attributes will say: the kind and the value of each.
    moved: Mapping[str, tuple[str, bytes]] = {}
    is_in_data: bool = True  # whether it stores a new head


def _sequences(messages: Sequence[_Message], last: int) -> Mapping[str, int]:
    """Return the sequences of stored messages by subject. Of several messages on one subject the last one counts."""
    return {message.subject: sequence for sequence, message in enumerate(messages, last - len(messages) + 1)}


def _batch(batch_id: str, messages: Sequence[_Message]) -> list[Outgoing]:
    last = len(messages)
    return [
        Outgoing(
            message.subject,
            message.data,
            {
                BATCH_ID: batch_id,
                "Nats-Batch-Sequence": str(number),
                **({"Nats-Batch-Commit": "1"} if number == last else {}),
                **message.headers,
            },
            has_answer=number == last,
        )
        for number, message in enumerate(messages, 1)
    ]


def _are_as_expected(part: Append, present: Snapshot) -> bool:
    return all(
        change.expected is ANY or change.expected == present.value(name).value
        for name, change in part.attributes.items()
    )


def _info(segment: str, head: Head) -> SegmentInfo:
    return SegmentInfo(segment, head.start_offset, head.length, head.is_sealed)


def _warn_once(url: str) -> None:
    if not _warned.is_set():
        _warned.set()
        _logger.warning(
            "NATS servers flush to disk every two minutes by default: if all servers of a stream lose power at "
            "once, acknowledged appends may be lost. Run them with 'sync_interval: always' and add "
            "durable=always to the address (url=%s)",
            url,
        )
