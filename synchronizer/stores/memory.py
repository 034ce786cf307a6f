"""A store in the memory of this process: the contract in its plainest form, for tests and as the reference."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from ..clock import Clock, SystemClock
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
    SegmentStore,
    UnknownOutcome,
)
from .contract import (
    are_new,
    check_append,
    check_appends,
    check_attributes,
    check_concat,
    check_copies,
    check_copy,
    check_name,
    check_open,
    check_prefix,
    check_read,
    check_source,
    check_within,
    name_is_used_up,
    not_found,
    sealed,
)


class _Segment:
    def __init__(self, name: str) -> None:
        self.name = name
        self.start_offset = 0
        self.data = bytearray()  # from start_offset on
        self.sealed = False
        self.attributes: dict[str, bytes] = {}

    @property
    def length(self) -> int:
        return self.start_offset + len(self.data)

    def info(self) -> SegmentInfo:
        return SegmentInfo(self.name, self.start_offset, self.length, self.sealed)

    def copied(self, copy: SegmentCopy) -> _Segment:
        check_copy(copy, self.start_offset, self.length)
        made = _Segment(copy.segment)
        made.start_offset = copy.start
        made.data += self.data[copy.start - self.start_offset : copy.end - self.start_offset]
        made.sealed = True
        return made

    def bytes_from(self, offset: int, max_bytes: int) -> bytes:
        first = offset - self.start_offset
        return bytes(self.data[first : first + max_bytes]) if first >= 0 else b""


class _Waiter:
    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = dict(known)
        self.woken = threading.Event()


class Memory:
    """The segments that the stores of one ``memory://`` address share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segments: dict[str, _Segment | None] = {}  # None: deleted
        self.waiters: set[_Waiter] = set()
        self.fair_queues: dict[str, deque[threading.Event]] = {}

    def segment(self, name: str) -> _Segment:
        segment = self.segments.get(name)
        if segment is None:
            raise not_found(name)
        return segment

    def conflict(self, append: Append) -> Conflict | None:
        """Why the append cannot be made, if it cannot."""
        held = self.segment(append.segment)
        if held.sealed:
            raise sealed(held.name, held.length)
        if _as_expected(held, append.expected_offset, append.attributes):
            return None
        return _conflict(held, append.expected_offset, append.attributes)

    def append(self, append: Append) -> Appended:
        held = self.segment(append.segment)
        offset = held.length
        held.data += append.data
        for name, change in append.attributes.items():
            if change.new is None:
                held.attributes.pop(name, None)
            else:
                held.attributes[name] = change.new
        if append.data:
            self.wake(append.segment)
        return Appended(offset, held.length)

    def wake(self, name: str) -> None:
        for waiter in self.waiters:
            if name in waiter.known:
                waiter.woken.set()


class MemoryStore(SegmentStore):
    """Segments that live as long as the process. Nothing survives it, and no other process sees them."""

    guarantees = Guarantees(
        durable=False,
        linearizable_append=True,
        linearizable_read=True,
        push=True,
        many_processes=False,
        many_hosts=False,
        atomic_multi_append=True,
        server_side_copy=True,
        fair_lock=True,
    )

    def __init__(self, memory: Memory | None = None, *, url: str = "memory://", clock: Clock | None = None) -> None:
        self.url = url
        self._memory = memory or Memory()
        self._clock = clock or SystemClock()
        self._process_id = os.getpid()
        self._closed = False
        self._waiters: set[_Waiter] = set()

    def create(self, segment: str) -> bool:
        check_name(segment)
        with self._locked() as memory:
            if segment not in memory.segments:
                memory.segments[segment] = _Segment(segment)
                return True
            if memory.segments[segment] is None:
                raise name_is_used_up(segment)
            return False

    def delete(self, segment: str) -> None:
        check_name(segment)
        with self._locked() as memory:
            if segment not in memory.segments:
                raise not_found(segment)
            memory.segments[segment] = None
            memory.wake(segment)

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._locked() as memory:
            return memory.segment(segment).info()

    def list(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        with self._locked() as memory:
            names = [name for name, held in memory.segments.items() if held is not None and name.startswith(prefix)]
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
        with self._locked() as memory:
            return memory.conflict(append) or memory.append(append)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        check_appends(appends)
        with self._locked() as memory:
            answers = {append.segment: memory.conflict(append) for append in appends}
            conflicts = {segment: conflict for segment, conflict in answers.items() if conflict}
            return conflicts or tuple(memory.append(append) for append in appends)

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_concat(segment, source, expected_offset, attributes)
        with self._locked() as memory:
            copied = memory.segment(source)
            check_source(source, copied.sealed)
            append = Append(segment, bytes(copied.data), expected_offset, attributes or {})
            return memory.conflict(append) or memory.append(append)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        check_copies(copies)
        with self._locked() as memory:
            known = {each.segment for each in copies} & memory.segments.keys()
            if not are_new(copies, {name: memory.segments[name] is None for name in known}):
                return False
            made = [memory.segment(each.source).copied(each) for each in copies]
            memory.segments.update((segment.name, segment) for segment in made)
            return True

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        check_name(segment)
        with self._locked() as memory:
            held = memory.segment(segment)
            check_read(segment, offset, max_bytes, held.start_offset, held.length)
            return held.bytes_from(offset, max_bytes)

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        check_attributes(segment, prefix, names)
        with self._locked() as memory:
            held = memory.segment(segment).attributes
            among = held if names is None else held.keys() & names
            return {name: held[name] for name in among if name.startswith(prefix)}

    def truncate(self, segment: str, offset: int) -> None:
        check_name(segment)
        with self._locked() as memory:
            held = memory.segment(segment)
            check_within(segment, offset, held.length)
            if offset > held.start_offset:
                del held.data[: offset - held.start_offset]
                held.start_offset = offset

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._locked() as memory:
            held = memory.segment(segment)
            held.sealed = True
            memory.wake(segment)
            return held.info()

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        for name in known:
            check_name(name)
        waiter = _Waiter(known)
        with self._locked() as memory:
            changed = self._changed(known)
            if changed:
                return changed
            memory.waiters.add(waiter)
            self._waiters.add(waiter)
        try:
            self._clock.wait(waiter.woken, timeout)
            with self._locked():
                return self._changed(known)
        finally:
            with self._memory.lock:
                self._memory.waiters.discard(waiter)
                self._waiters.discard(waiter)

    def fair_lock(self, segment: str, timeout: float) -> AbstractContextManager[bool]:
        check_name(segment)
        self._check_open()
        return self._in_turn(segment, timeout)

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return
        with self._memory.lock:
            self._closed = True
            for waiter in self._waiters:
                waiter.woken.set()

    @contextmanager
    def _locked(self) -> Iterator[Memory]:
        self._check_open()
        with self._memory.lock:
            self._check_open()
            yield self._memory

    def _check_open(self) -> None:
        check_open(self._process_id, self._closed, self.url)

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        changed = set()
        for name, length in known.items():
            if name not in self._memory.segments:
                raise not_found(name)
            held = self._memory.segments[name]
            if held is None or held.sealed or held.length != length:
                changed.add(name)
        return frozenset(changed)

    @contextmanager
    def _in_turn(self, segment: str, timeout: float) -> Iterator[bool]:
        memory = self._memory
        turn = threading.Event()
        with memory.lock:
            queue = memory.fair_queues.setdefault(segment, deque())
            queue.append(turn)
            queue[0].set()
        try:
            yield self._clock.wait(turn, timeout)
        finally:
            with memory.lock:
                queue.remove(turn)
                if queue:
                    queue[0].set()
                else:
                    del memory.fair_queues[segment]


def _as_expected(held: _Segment, expected_offset: int | None, changes: Mapping[str, AttributeChange]) -> bool:
    if expected_offset is not None and expected_offset != held.length:
        return False
    return all(
        change.expected is ANY or change.expected == held.attributes.get(name) for name, change in changes.items()
    )


def _conflict(held: _Segment, expected_offset: int | None, changes: Mapping[str, AttributeChange]) -> Conflict:
    delta = b"" if expected_offset is None else held.bytes_from(expected_offset, MAX_DELTA_BYTES)
    return Conflict(held.length, delta, {name: held.attributes.get(name) for name in changes})


_named: dict[str, Memory] = {}
_named_lock = threading.Lock()


def named_memory(name: str) -> Memory:
    """The memory of this name: the same one at every call in this process."""
    with _named_lock:
        return _named.setdefault(name, Memory())
