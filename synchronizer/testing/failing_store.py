"""`FailingStore`: a store with the faults of real stores, at points that a test chooses."""

from __future__ import annotations

import enum
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from ..arguments import check_names
from ..errors import StoreUnavailableError
from ..store import (
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
    UnknownOutcome,
)

R = TypeVar("R")


class Operation(NamedTuple):
    """A call of a `FailingStore`. ``segment`` is "" if the call concerns no segment or several."""

    verb: str
    segment: str


class _AppendFault(enum.Enum):
    FAIL = enum.auto()
    LOSE_REQUEST = enum.auto()
    LOSE_ANSWER = enum.auto()


class FailingStore(SegmentStore, translate_errors=False):
    """Passes every call on to ``inner``, except for the ordered faults.

    One-shot faults (`fail_appends`, `lose_requests`, `lose_answers`, `cut_reads`, `miss_changes`) hit the next calls
    in the given order, once each. While ``unavailable`` is true, every verb raises `StoreUnavailableError`.

    ``before`` is called before each operation and may do anything: let another process act at this point, order a
    fault for this operation, or raise. ``after`` is called after an operation that did not raise, before the caller has
    its answer. Both run in the caller's thread, and their errors reach the caller unchanged. ``operations`` lists all
    calls in order.

    Args:
        inner: The store that carries out the calls.
        rng: The source of random faults. The same seed and the same calls give the same faults.
        fault_rate: The share of calls that fail at random, from 0 to 1.
    """

    def __init__(self, inner: SegmentStore, *, rng: random.Random | None = None, fault_rate: float = 0.0) -> None:
        self.inner = inner
        self.url = inner.url
        self.guarantees = inner.guarantees
        self.unavailable = False
        self.before: Callable[[Operation], None] | None = None
        self.after: Callable[[Operation], None] | None = None
        self.operations: list[Operation] = []
        self._rng = rng or random.Random(0)
        self._fault_rate = fault_rate
        self._lock = threading.Lock()
        self._append_faults: list[_AppendFault] = []
        self._reads_to_cut = 0
        self._waits_to_miss = 0

    def fail_appends(self, count: int = 1) -> None:
        """Make the next ``count`` appends raise `StoreUnavailableError`; nothing is stored."""
        self._append_faults += [_AppendFault.FAIL] * count

    def lose_requests(self, count: int = 1) -> None:
        """Answer the next ``count`` appends with `UnknownOutcome`; nothing is stored."""
        self._append_faults += [_AppendFault.LOSE_REQUEST] * count

    def lose_answers(self, count: int = 1) -> None:
        """Answer the next ``count`` appends with `UnknownOutcome`, although they are carried out."""
        self._append_faults += [_AppendFault.LOSE_ANSWER] * count

    def cut_reads(self, count: int = 1) -> None:
        """Make the next ``count`` reads return only the first half of their data, at least one byte."""
        self._reads_to_cut += count

    def miss_changes(self, count: int = 1) -> None:
        """Make the next ``count`` waits last their whole timeout and report no change."""
        self._waits_to_miss += count

    def count(self, verb: str) -> int:
        """Return the number of calls of ``verb``, such as "append"."""
        return Counter(operation.verb for operation in self.operations)[verb]

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        self._begin("create", segment)
        created = self.inner.create(segment, start_offset=start_offset)
        self._end("create", segment)
        return created

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        self._begin("create_together")
        created = self.inner.create_together(segments, start_offsets=start_offsets)
        self._end("create_together")
        return created

    def delete(self, segment: str) -> None:
        self._begin("delete", segment)
        self.inner.delete(segment)
        self._end("delete", segment)

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        self._begin("forget", segment)
        self.inner.forget(segment, expected_offset=expected_offset)
        self._end("forget", segment)

    def info(self, segment: str) -> SegmentInfo:
        self._begin("info", segment)
        info = self.inner.info(segment)
        self._end("info", segment)
        return info

    def list(self, prefix: str = "") -> Iterator[str]:
        self._begin("list")
        names = self.inner.list(prefix)
        self._end("list")
        return names

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        return self._appended(
            "append",
            segment,
            lambda: self.inner.append(segment, data, expected_offset=expected_offset, attributes=attributes),
        )

    def append_unflushed(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        return self._appended(
            "append",
            segment,
            lambda: self.inner.append_unflushed(segment, data, expected_offset=expected_offset, attributes=attributes),
        )

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        return self._appended("append_together", "", lambda: self.inner.append_together(appends))

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        return self._appended(
            "concat",
            segment,
            lambda: self.inner.concat(segment, source, expected_offset=expected_offset, attributes=attributes),
        )

    def concat_unread(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        return self._appended(
            "concat",
            segment,
            lambda: self.inner.concat_unread(segment, source, expected_offset=expected_offset, attributes=attributes),
        )

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        self._begin("copy_segments")
        made = self.inner.copy_segments(copies)
        self._end("copy_segments")
        return made

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        self._begin("read", segment)
        data = self.inner.read(segment, offset, max_bytes)
        self._end("read", segment)
        with self._lock:
            is_cut = self._reads_to_cut > 0
            self._reads_to_cut -= is_cut
        return data[: max(1, len(data) // 2)] if is_cut else data

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        check_names(segments)
        first = next(iter(segments), "")
        self._begin("infos", first)
        found = self.inner.infos(segments)
        self._end("infos", first)
        return found

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        check_names(segments)
        first = next(iter(segments), "")
        self._begin("read_starts", first)
        found = self.inner.read_starts(segments, max_bytes)
        self._end("read_starts", first)
        return found

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        self._begin("attributes", segment)
        attributes = self.inner.attributes(segment, prefix, names=names)
        self._end("attributes", segment)
        return attributes

    def truncate(self, segment: str, offset: int) -> None:
        self._begin("truncate", segment)
        self.inner.truncate(segment, offset)
        self._end("truncate", segment)

    def seal(self, segment: str) -> SegmentInfo:
        self._begin("seal", segment)
        info = self.inner.seal(segment)
        self._end("seal", segment)
        return info

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        self._begin("wait")
        with self._lock:
            is_missed = self._waits_to_miss > 0
            self._waits_to_miss -= is_missed
        changed = self.inner.wait({} if is_missed else known, timeout)
        self._end("wait")
        return changed

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        self._begin("fair_lock", segment)
        lock = self.inner.fair_lock(segment, timeout, patience)
        self._end("fair_lock", segment)
        return lock

    def close(self) -> None:
        self.inner.close()

    def _appended(self, verb: str, segment: str, call: Callable[[], R]) -> R | UnknownOutcome:
        self._announce(verb, segment)
        fault = self._next_append_fault()
        if fault is _AppendFault.FAIL:
            raise _unavailable(verb, segment)
        if fault is _AppendFault.LOSE_REQUEST:
            return UnknownOutcome(_unavailable(verb, segment))
        result = call()
        self._end(verb, segment)
        if fault is _AppendFault.LOSE_ANSWER:
            return UnknownOutcome(_unavailable(verb, segment))
        return result

    def _announce(self, verb: str, segment: str = "") -> None:
        operation = Operation(verb, segment)
        with self._lock:
            self.operations.append(operation)
        if self.before is not None:
            self.before(operation)
        if self.unavailable:
            raise _unavailable(verb, segment)

    def _begin(self, verb: str, segment: str = "") -> None:
        self._announce(verb, segment)
        if self._is_unlucky():
            raise _unavailable(verb, segment)

    def _end(self, verb: str, segment: str = "") -> None:
        if self.after is not None:
            self.after(Operation(verb, segment))

    def _next_append_fault(self) -> _AppendFault | None:
        with self._lock:
            if self._append_faults:
                return self._append_faults.pop(0)
        if self._is_unlucky():
            with self._lock:
                return self._rng.choice(list(_AppendFault))
        return None

    def _is_unlucky(self) -> bool:
        with self._lock:
            return self._fault_rate > 0 and self._rng.random() < self._fault_rate


def _unavailable(verb: str, segment: str) -> StoreUnavailableError:
    return StoreUnavailableError("a fault injected by the test", verb=verb, segment=segment)
