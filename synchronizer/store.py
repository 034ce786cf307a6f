"""The segment store: the small interface that every backend implements and all other code builds on.

A segment is a named, append-only sequence of bytes with small named values (attributes). Offsets are absolute byte
offsets and never reused: truncation moves the start, not the offsets. Each verb is one atomic step. The name of a
deleted segment is never used again, so a name always means the same segment. Only a name that no other process can use
may be forgotten, or one whose next segment begins at a greater offset.

Losing a race is an answer (`Conflict`), a missing segment is an exception (`NotFoundError`). A backend has no retry,
no cache and no timeout policy beyond those of its verbs.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self

from .arguments import check_names
from .counting import StoreCounters
from .error_translation import guarding
from .errors import InvalidArgumentError, NotFoundError, TruncatedError

MAX_NAME_LENGTH: Final = 1024
#: The most bytes of `Conflict.delta`, which the loser of an append has not seen yet.
MAX_DELTA_BYTES: Final = 64 * 1024
#: The largest `data` of one append that every backend must take.
MAX_APPEND_BYTES: Final = 16 * 1024 * 1024
#: The most attributes that one append may change, in every backend.
MAX_ATTRIBUTE_CHANGES: Final = 500
#: The most segments, and the most bytes in them together, that one `SegmentStore.create_together` may create.
MAX_CREATED: Final = 300
MAX_CREATED_BYTES: Final = 64 * 1024
#: The greatest offset at which a segment may begin. Microseconds since 1970 reach it in the year 2255.
MAX_START_OFFSET: Final = 2**53


class AnyValue(enum.Enum):
    """The type of `ANY`."""

    ANY = "any"


#: As `AttributeChange.expected`: any value, or none.
ANY: Final = AnyValue.ANY


# Named tuples where each append makes some: a frozen dataclass takes four times as long to make.


class AttributeChange(NamedTuple):
    """Set an attribute to ``new`` (None removes it) if it is ``expected`` now (None: it does not exist)."""

    expected: bytes | None | Literal[AnyValue.ANY]
    new: bytes | None


class Append(NamedTuple):
    """One part of `SegmentStore.append_together`: the arguments of `SegmentStore.append`."""

    segment: str
    data: bytes = b""
    expected_offset: int | None = None
    attributes: Mapping[str, AttributeChange] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """One part of `SegmentStore.copy_segments`: ``segment`` becomes a copy of ``source`` from ``start`` to ``end``."""

    source: str
    segment: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The facts about a segment. Its bytes are those from ``start_offset`` up to ``length``."""

    name: str
    start_offset: int
    length: int
    sealed: bool


class SegmentStart(NamedTuple):
    """The first bytes of a segment, and where they begin."""

    offset: int
    data: bytes


class Appended(NamedTuple):
    """The bytes are at ``offset`` and the attributes are changed, durably if the store's guarantees say so.

    Without bytes and without an expected offset, both numbers are the length at some moment of the call.
    """

    offset: int
    length: int  # of the segment, after the append


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was written: the segment's length or an attribute was not what was expected.

    ``length`` is the current length. ``delta`` holds the bytes from the expected offset on, up to `MAX_DELTA_BYTES`;
    it is empty if no offset was expected or these bytes are truncated. ``attributes`` holds the current values (None:
    absent) of all attributes named in the append. "Current" is a moment of the call: one for length and delta, one for
    all attributes. The two moments may differ.
    """

    length: int
    delta: bytes = b""
    attributes: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """The append was sent and its answer was lost: it is stored, or is not, or may be stored later.

    Only another append with the same ``expected_offset`` (or the same attribute comparison) settles it.
    """

    cause: BaseException


AppendResult = Appended | Conflict | UnknownOutcome


@dataclass(frozen=True, slots=True)
class Guarantees:
    """The guarantees of a backend. An object that needs more than a store guarantees raises when it is opened."""

    durable: bool  # an acknowledged append survives the loss of power
    linearizable_append: bool  # of appends that race, those succeed whose expectations held at their moment
    linearizable_read: bool  # a read sees every append that was acknowledged before it began, in every process
    push: bool  # `wait` is woken by appends of other processes, without polling
    many_processes: bool
    many_hosts: bool
    atomic_multi_append: bool = False  # `append_together`
    atomic_multi_create: bool = False  # `create_together`
    server_side_copy: bool = False  # `concat` and `copy_segments`
    fair_lock: bool = False
    largest_append: int = MAX_APPEND_BYTES


class SegmentStore(ABC):
    """Segments by name. Threads may share a store; a forked child may not (`ClosedError`).

    Every verb raises `NotFoundError` for a segment that does not exist (or was deleted), `ClosedError` after
    ``close``, and `StoreUnavailableError` when the store cannot be reached, or `StorePermissionError`, a kind of it,
    when the store's user lacks a right. An append then had no effect; ``create``, ``create_together``, ``delete``,
    ``truncate``, ``seal`` and ``copy_segments``, which may be repeated, may have had theirs.

    A backend must translate only the errors that it knows. Any other `Exception` of its verbs becomes `UnknownOutcome`,
    `StoreUnavailableError` or `StoreFullError` before it reaches the caller, unless its class says
    ``translate_errors=False``.
    """

    #: The address this store was opened with, without a password.
    url: str
    guarantees: Guarantees

    def __init_subclass__(cls, *, translate_errors: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, verb in guarding(vars(cls), UnknownOutcome, translates=translate_errors).items():
            setattr(cls, name, verb)

    @cached_property
    def counters(self) -> StoreCounters:
        """What this object was asked, and how it answered. `SegmentStore` counts it for every backend."""
        return StoreCounters()

    @abstractmethod
    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        """Create an empty segment; return whether it is new. Raise `AlreadyExistsError` for a deleted name.

        Args:
            segment: The name of the segment.
            start_offset: Its first offset, at most `MAX_START_OFFSET`. A name that was forgotten gets one that no
                offset of the earlier segment reached, so that a process which slept mistakes neither for the other.
        """

    @abstractmethod
    def delete(self, segment: str) -> None:
        """Delete the segment's bytes and attributes. Its name is not used again. Deleting twice is no error."""

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        """Delete the segment and its name, as if it had never been created.

        Use it only for a name that its creator alone creates and appends to, such as one with a random part, and for
        one whose segments never have an offset in common. For other names, only the memory of the name keeps a late
        `create` from making the segment again, empty. A deleted name takes space forever, a forgotten one does not.
        Forgetting a segment that does not exist is no error.

        By default it is the same as `delete`, and with ``expected_offset`` it does nothing.

        Args:
            segment: The name of the segment.
            expected_offset: Do nothing, in the same step, if the length is another, or the segment was deleted.
        """
        if expected_offset is None:
            with suppress(NotFoundError):
                self.delete(segment)

    @abstractmethod
    def info(self, segment: str) -> SegmentInfo:
        """Return the current facts about the segment, after every append and seal acknowledged before the call."""

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        """Return what `info` returns for each of ``segments``, perhaps of different moments.

        A segment that does not exist is left out. By default it calls `info` for each segment; a backend overrides it
        where it can ask for many in less time.
        """
        check_names(segments)
        found = {}
        for segment in segments:
            try:
                found[segment] = self.info(segment)
            except NotFoundError:
                continue
        return found

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the names of existing segments that start with ``prefix``, in order of their code points."""

    @abstractmethod
    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        """Append ``data`` and change ``attributes`` in one step, if every expectation holds; else change nothing.

        No other call sees a part of an append of any size.

        Args:
            segment: The name of the segment.
            data: At most `MAX_APPEND_BYTES`; empty to change attributes only.
            expected_offset: The expected length of the segment in bytes; None expects nothing.
            attributes: At most `MAX_ATTRIBUTE_CHANGES` changes, by the name of the attribute.

        Returns:
            `Appended`, `Conflict` if an expectation does not hold, or `UnknownOutcome` if the answer was lost.

        Raises:
            SealedError: The segment is sealed, with or without data and for any expectation.
            InvalidArgumentError: The data or the changes exceed their limit.
        """

    def append_unread(self, segment: str, data: bytes, *, expected_offset: int | None = None) -> AppendResult:
        """Append as `append` does, for bytes that no process relies on before the call returns, as in a transaction.

        A store may let others see the bytes a moment before they are durable, so that its other writers wait less. It
        may also not wake the waiters of the segment. By default it is the same as `append`.
        """
        return self.append(segment, data, expected_offset=expected_offset)

    def append_unflushed(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        """Append as `append` does, for a change that does no harm if the loss of power undoes it.

        A store may answer before the change is durable if all processes that can have seen it end when it is lost, as
        on one machine. A change that is acknowledged later, by any verb and for any process, is never durable without
        it. By default it is the same as `append`.
        """
        return self.append(segment, data, expected_offset=expected_offset, attributes=attributes)

    @abstractmethod
    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` bytes from ``offset`` on, as many as there are; empty exactly at the end.

        The result does not show the boundaries between appends.

        Raises:
            TruncatedError: ``offset`` is before the start.
            InvalidArgumentError: ``offset`` is beyond the length.
        """

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        """Return the first bytes of each of ``segments``, up to ``max_bytes`` of each, and their offsets.

        A segment that does not exist is left out. A store may leave out others too: `read` them one by one. By default
        it calls `info` and `read` for each segment; a backend overrides it where it can read many small segments in
        less time.
        """
        check_names(segments)
        found = {}
        for segment in segments:
            try:
                start = self.info(segment).start_offset
                found[segment] = SegmentStart(start, self.read(segment, start, max_bytes))
            except (NotFoundError, TruncatedError):
                continue
        return found

    @abstractmethod
    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        """Return attributes whose names start with ``prefix``, all of one moment; with ``names``, only those of them.

        Reading a few names costs the same on a segment with many other attributes.
        """

    @abstractmethod
    def truncate(self, segment: str, offset: int) -> None:
        """Delete the bytes before ``offset``.

        An offset before the start changes nothing. Raise `InvalidArgumentError` for one beyond the length.
        """

    @abstractmethod
    def seal(self, segment: str) -> SegmentInfo:
        """Refuse every later append and return the final info. Sealing twice is no error."""

    @abstractmethod
    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        """Return the segments of ``known`` that changed. Wait for one up to ``timeout`` seconds, then return none.

        A segment has changed if its length differs from the known one, or if it is sealed or deleted. Attribute changes
        and truncations alone wake no waiter. A call cannot miss an append made between the caller's last read and this
        call.

        Args:
            known: The length that the caller has seen, in bytes, by the name of the segment.
            timeout: In seconds.

        Raises:
            NotFoundError: A name was never created, or was forgotten.
        """
        # The known lengths make the answer depend on the store alone, so a lost or repeated wake-up does no harm and a
        # backend may wake more often than needed. Leases are attributes: if attribute changes woke waiters, a hundred
        # readers would wake each other with every renewal.

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        """Return a lock on the segment's name, first come, first served. It gives fairness, never safety.

        It enters as False after ``timeout`` seconds, or when it has not changed hands for ``patience`` seconds. A store
        that cannot tell may give up after ``patience`` seconds. Only where ``guarantees.fair_lock``.
        """
        raise InvalidArgumentError("this store has no fair lock; see store.guarantees", url=self.url)

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        """Create all of ``segments``, each with its first bytes, in one step, if none of them exists.

        Only where ``guarantees.atomic_multi_create``. After a lost answer, which raises `StoreUnavailableError`, the
        call may be repeated: it returns False then if the first one created them.

        Args:
            segments: The first bytes, or none, by the name of the segment. At most `MAX_CREATED` segments, and
                `MAX_CREATED_BYTES` bytes in all of them together.
            start_offsets: The first offsets of those that do not begin at 0, as for `create`.

        Returns:
            True; False if one of them exists. None is created then.

        Raises:
            AlreadyExistsError: One of them was deleted. None is created.
        """
        raise InvalidArgumentError("this store creates one segment at a time; see store.guarantees", url=self.url)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        """Make all of ``appends``, each to another segment, in one step, if all their expectations hold; else none.

        If some do not hold, return their segments with the conflicts. An error of `append` for one part is raised for
        all. The limits of `append` apply to the sum of all parts. Only where ``guarantees.atomic_multi_append``.
        """
        raise InvalidArgumentError("this store appends to one segment at a time; see store.guarantees", url=self.url)

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        """Append all bytes of the sealed ``source``, from its start on, as `append` does, inside the store.

        It is one step for any number of bytes. The source does not change. Raise `InvalidArgumentError` for a source
        that is not sealed, or is ``segment`` itself. Only where ``guarantees.server_side_copy``.
        """
        raise InvalidArgumentError("this store has no server-side copy; see store.guarantees", url=self.url)

    def concat_unread(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        """Append the source as `concat` does, for a source that no process reads any more.

        If it is appended, its bytes may be gone from the source, so that a store can move them. By default it is the
        same as `concat`.
        """
        return self.concat(segment, source, expected_offset=expected_offset, attributes=attributes)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        """Create all of these segments in one step, each sealed and with its bytes at the source's offsets.

        The bytes do not leave the store, and writes to the sources continue. Only where
        ``guarantees.server_side_copy``.

        Returns:
            True; False if all of them exist, so that a call may be repeated.

        Raises:
            AlreadyExistsError: Only some of them exist, or a name was deleted. None is created.
            TruncatedError: A ``start`` is before that of the source. None is created.
            InvalidArgumentError: An ``end`` is beyond the length of the source. None is created.
        """
        raise InvalidArgumentError("this store has no server-side copy; see store.guarantees", url=self.url)

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources and wake its waiters, which raise `ClosedError`. Closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
