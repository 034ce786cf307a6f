"""A store in the memory of this process: the contract in its simplest form, for tests and as the reference."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from ..clock import Clock, Deadline, SystemClock
from ..store import (
    ANY,
    MAX_DELTA_BYTES,
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
    UnknownOutcome,
)
from ..threads.flag import Flag
from .checks import (
    all_are_new,
    are_new,
    check_append,
    check_appends,
    check_attributes,
    check_concat,
    check_copies,
    check_copy,
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
    check_source,
    check_truncate,
    check_wait,
    check_within,
    name_is_used_up,
    not_found,
    sealed,
)
from .waiting import Waiter


class _Segment:
    def __init__(self, name: str, data: bytes = b"", start_offset: int = 0) -> None:
        self.name = name
        self.start_offset = start_offset
        self.data = bytearray(data)  # from start_offset on
        self.sealed = False
        self.attributes: dict[str, bytes] = {}

    @property
    def length(self) -> int:
        return self.start_offset + len(self.data)

    def info(self) -> SegmentInfo:
        return SegmentInfo(self.name, self.start_offset, self.length, self.sealed)

    def copied(self, copy: SegmentCopy) -> _Segment:
        check_copy(copy, self.start_offset, self.length)
        made = _Segment(copy.segment, start_offset=copy.start)
        made.data += self.data[copy.start - self.start_offset : copy.end - self.start_offset]
        made.sealed = True
        return made

    def bytes_from(self, offset: int, max_bytes: int) -> bytes:
        first = offset - self.start_offset
        return bytes(self.data[first : first + max_bytes]) if first >= 0 else b""


class Memory:
    """The segments that the stores of one ``memory://`` address share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segments: dict[str, _Segment | None] = {}  # None: deleted
        self.waiters: set[Waiter] = set()
        self.fair_queues: dict[str, deque[Flag]] = {}

    def segment(self, name: str) -> _Segment:
        segment = self.segments.get(name)
        if segment is None:
            raise not_found(name)
        return segment

    def conflict(self, append: Append) -> Conflict | None:
        """Return the conflict that prevents the append; None if there is none."""
        found = self.segment(append.segment)
        if found.sealed:
            raise sealed(found.name, found.length)
        if _as_expected(found, append.expected_offset, append.attributes):
            return None
        return _conflict(found, append.expected_offset, append.attributes)

    def append(self, append: Append) -> Appended:
        found = self.segment(append.segment)
        offset = found.length
        attributes = found.attributes
        if append.attributes:
            changed = {**attributes, **{name: change.new for name, change in append.attributes.items()}}
            attributes = {name: value for name, value in changed.items() if value is not None}
        # No call stands between these two, so no interrupt comes between them.
        found.data += append.data
        found.attributes = attributes
        if append.data:
            self.wake(append.segment)
        return Appended(offset, found.length)

    def append_together(self, appends: Sequence[Append]) -> tuple[Appended, ...]:
        segments = [self.segment(append.segment) for append in appends]
        before = [(found, found.length, found.attributes) for found in segments]
        try:
            return tuple(self.append(append) for append in appends)
        except BaseException:  # interrupted: undo all
            for found, length, attributes in before:
                del found.data[length - found.start_offset :]
                found.attributes = attributes
            raise

    def wake(self, name: str) -> None:
        for waiter in list(self.waiters):
            if name in waiter.known:
                waiter.woken.set()


class _Acquisition(AbstractContextManager[bool]):
    """One acquisition of the fair lock of a segment, with its position in the queue.

    It may be left twice, and after an interrupted entry.
    """

    def __init__(self, memory: Memory, segment: str, clock: Clock, timeout: float, patience: float) -> None:
        self._memory = memory
        self._segment = segment
        self._clock = clock
        self._timeout = timeout
        self._patience = patience
        self._granted = Flag()

    def __enter__(self) -> bool:
        with self._memory.lock:
            queue = self._memory.fair_queues.setdefault(self._segment, deque())
            queue.append(self._granted)
            queue[0].set()
        timeout = Deadline(self._clock, max(0.0, self._timeout))
        while True:
            holder = queue[0]
            if self._clock.wait(self._granted, timeout.remaining(self._patience)):
                return True
            if timeout.passed or queue[0] is holder:
                return False

    def __exit__(self, *error: object) -> None:
        with self._memory.lock:
            queue = self._memory.fair_queues.get(self._segment, deque())
            if self._granted in queue:
                queue.remove(self._granted)
            if queue:
                queue[0].set()
            else:
                self._memory.fair_queues.pop(self._segment, None)


class MemoryStore(SegmentStore):
    """A store whose segments live as long as the process. No other process sees them."""

    guarantees = Guarantees(
        durable=False,
        linearizable_append=True,
        linearizable_read=True,
        push=True,
        many_processes=False,
        many_hosts=False,
        atomic_multi_append=True,
        atomic_multi_create=True,
        server_side_copy=True,
        fair_lock=True,
    )

    def __init__(self, memory: Memory | None = None, *, url: str = "memory://", clock: Clock | None = None) -> None:
        self.url = url
        self._memory = memory or Memory()
        self._clock = clock or SystemClock()
        self._process_id = os.getpid()
        self._closed = False
        self._waiters: set[Waiter] = set()

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        check_create(segment, start_offset)
        with self._opened().lock:
            memory = self._opened()
            if segment not in memory.segments:
                memory.segments[segment] = _Segment(segment, start_offset=start_offset)
                return True
            if memory.segments[segment] is None:
                raise name_is_used_up(segment)
            return False

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        starts = check_create_together(segments, start_offsets)
        with self._opened().lock:
            memory = self._opened()
            known = segments.keys() & memory.segments.keys()
            is_new = all_are_new({name: memory.segments[name] is None for name in known})
            if is_new:
                made = {name: _Segment(name, data, starts[name]) for name, data in segments.items()}
                memory.segments.update(made)
            return is_new

    def delete(self, segment: str) -> None:
        check_name(segment)
        with self._opened().lock:
            memory = self._opened()
            if segment not in memory.segments:
                raise not_found(segment)
            memory.segments[segment] = None
            memory.wake(segment)

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        check_forget(segment, expected_offset)
        with self._opened().lock:
            memory = self._opened()
            found = memory.segments.get(segment)
            if expected_offset is None or (found is not None and found.length == expected_offset):
                memory.segments.pop(segment, None)
                memory.wake(segment)

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._opened().lock:
            memory = self._opened()
            return memory.segment(segment).info()

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        check_infos(segments)
        with self._opened().lock:
            memory = self._opened()
            found = {name: memory.segments.get(name) for name in segments}
            return {name: each.info() for name, each in found.items() if each is not None}

    def list(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        with self._opened().lock:
            memory = self._opened()
            names = [name for name, found in memory.segments.items() if found is not None and name.startswith(prefix)]
        return iter(sorted(names))

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_append(segment, data, expected_offset, attributes)
        append = Append(segment, data, expected_offset, attributes or {})
        with self._opened().lock:
            memory = self._opened()
            return memory.conflict(append) or memory.append(append)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        check_appends(appends)
        with self._opened().lock:
            memory = self._opened()
            answers = {append.segment: memory.conflict(append) for append in appends}
            conflicts = {segment: conflict for segment, conflict in answers.items() if conflict}
            return conflicts or memory.append_together(appends)

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_concat(segment, source, expected_offset, attributes)
        with self._opened().lock:
            memory = self._opened()
            copied = memory.segment(source)
            check_source(source, copied.sealed)
            append = Append(segment, bytes(copied.data), expected_offset, attributes or {})
            return memory.conflict(append) or memory.append(append)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        check_copies(copies)
        with self._opened().lock:
            memory = self._opened()
            known = {each.segment for each in copies} & memory.segments.keys()
            if not are_new(copies, {name: memory.segments[name] is None for name in known}):
                return False
            made = [memory.segment(each.source).copied(each) for each in copies]
            memory.segments.update((segment.name, segment) for segment in made)
            return True

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        check_read_call(segment, offset, max_bytes)
        with self._opened().lock:
            memory = self._opened()
            found = memory.segment(segment)
            check_read(segment, offset, max_bytes, found.start_offset, found.length)
            return found.bytes_from(offset, max_bytes)

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        check_read_starts(segments, max_bytes)
        with self._opened().lock:
            memory = self._opened()
            found = {name: memory.segments.get(name) for name in segments}
            return {
                name: SegmentStart(each.start_offset, each.bytes_from(each.start_offset, max_bytes))
                for name, each in found.items()
                if each is not None
            }

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        check_attributes(segment, prefix, names)
        with self._opened().lock:
            memory = self._opened()
            found = memory.segment(segment).attributes
            among = found if names is None else found.keys() & names
            return {name: found[name] for name in among if name.startswith(prefix)}

    def truncate(self, segment: str, offset: int) -> None:
        check_truncate(segment, offset)
        with self._opened().lock:
            memory = self._opened()
            found = memory.segment(segment)
            check_within(segment, offset, found.length)
            if offset > found.start_offset:
                del found.data[: offset - found.start_offset]
                found.start_offset = offset  # no call in between, so no interrupt

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._opened().lock:
            memory = self._opened()
            found = memory.segment(segment)
            found.sealed = True
            memory.wake(segment)
            return found.info()

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        check_wait(known, timeout)
        waiter = Waiter(dict(known))
        with self._opened().lock:
            memory = self._opened()
            changed = self._changed(known)
            if changed:
                return changed
            memory.waiters.add(waiter)
            self._waiters.add(waiter)
        try:
            self._clock.wait(waiter.woken, timeout)
            with self._memory.lock:
                self._check_open()
                return self._changed(known)
        finally:
            self._memory.waiters.discard(waiter)
            self._waiters.discard(waiter)

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        check_fair_lock(segment, timeout, patience)
        self._check_open()
        return _Acquisition(self._memory, segment, self._clock, timeout, patience)

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return
        with self._memory.lock:
            self._closed = True
            for waiter in list(self._waiters):
                waiter.woken.set()

    def _opened(self) -> Memory:
        self._check_open()
        return self._memory

    def _check_open(self) -> None:
        check_open(self._process_id, self._closed, self.url)

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        changed = set()
        for name, length in known.items():
            if name not in self._memory.segments:
                raise not_found(name)
            found = self._memory.segments[name]
            if found is None or found.sealed or found.length != length:
                changed.add(name)
        return frozenset(changed)


def _as_expected(found: _Segment, expected_offset: int | None, changes: Mapping[str, AttributeChange]) -> bool:
    if expected_offset is not None and expected_offset != found.length:
        return False
    return all(
        change.expected is ANY or change.expected == found.attributes.get(name) for name, change in changes.items()
    )


def _conflict(found: _Segment, expected_offset: int | None, changes: Mapping[str, AttributeChange]) -> Conflict:
    delta = b"" if expected_offset is None else found.bytes_from(expected_offset, MAX_DELTA_BYTES)
    return Conflict(found.length, delta, {name: found.attributes.get(name) for name in changes})


_named: dict[str, Memory] = {}
_named_lock = threading.Lock()


def named_memory(name: str) -> Memory:
    """Return the memory of this name, the same one at every call in this process."""
    with _named_lock:
        return _named.setdefault(name, Memory())


def _forget_names_in_child() -> None:
    """Forget the memory of the parent: threads that do not exist in the child may hold its locks."""
    global _named_lock
    _named_lock = threading.Lock()
    _named.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_names_in_child)
