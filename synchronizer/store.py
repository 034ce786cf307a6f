"""The segment store: the small interface that every backend implements and everything else is written on.

A segment is a named, append-only sequence of bytes with small named values (attributes) beside it. Offsets are
absolute byte offsets and never reused: truncation moves the start, not the offsets. Each verb is one atomic step.
A name that was deleted is never used again, so a name always means the same segment. Only a name that nobody else can
use may be forgotten.

Losing a race is an answer (`Conflict`), a missing segment is an exception (`NotFoundError`). A backend has no retry,
no cache and no timeout policy of its own beyond what its verbs say.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from .boundary import guard
from .errors import InvalidArgumentError, NotFoundError

MAX_NAME_LENGTH: Final = 1024
#: How many of the bytes that the loser of an append has not seen come with the answer.
MAX_DELTA_BYTES: Final = 64 * 1024
#: The largest `data` of one append that every backend must take.
MAX_APPEND_BYTES: Final = 16 * 1024 * 1024
#: How many attributes one append may change, in every backend.
MAX_ATTRIBUTE_CHANGES: Final = 500


class AnyValue(enum.Enum):
    """The type of `ANY`."""

    ANY = "any"


#: As `AttributeChange.expected`: whatever the attribute is now.
ANY: Final = AnyValue.ANY


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """Set an attribute to ``new`` (None removes it) if it is ``expected`` now (None: it does not exist)."""

    expected: bytes | None | Literal[AnyValue.ANY]
    new: bytes | None


@dataclass(frozen=True, slots=True)
class Append:
    """One part of `SegmentStore.append_together`: the arguments of `SegmentStore.append`."""

    segment: str
    data: bytes = b""
    expected_offset: int | None = None
    attributes: Mapping[str, AttributeChange] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """One part of `SegmentStore.copy_segments`: ``segment`` becomes what ``source`` is from ``start`` up to ``end``."""

    source: str
    segment: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a store knows of a segment. Its bytes are those from ``start_offset`` up to ``length``."""

    name: str
    start_offset: int
    length: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Appended:
    """The bytes are at ``offset`` and the attributes are changed, durably as far as the store's guarantees say.

    Where no bytes were appended and no offset was expected, both numbers are the length at some moment of the call.
    """

    offset: int
    length: int  # of the segment, after the append


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was written: the segment's length or an attribute was not what was expected.

    ``length`` is the current length. ``delta`` holds the bytes from the expected offset on, up to `MAX_DELTA_BYTES`;
    it is empty where no offset was expected or where these bytes are truncated. ``attributes`` holds the current
    values (None: absent) of all attributes named in the append. "Current" is a moment of the call: one for length and
    delta, one for all attributes, which may be another.
    """

    length: int
    delta: bytes = b""
    attributes: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """The append was sent and its answer lost: it was stored, or was not, or still may be.

    Only a further append with the same ``expected_offset`` (or the same attribute comparison) settles it.
    """

    cause: BaseException


AppendResult = Appended | Conflict | UnknownOutcome


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a backend promises. Opening something on a store that lacks what it needs is an error at opening."""

    durable: bool  # an acknowledged append survives the loss of power
    linearizable_append: bool  # of appends that race, those succeed whose expectations held at their moment
    linearizable_read: bool  # a read sees every append that was acknowledged before it began, in every process
    push: bool  # `wait` is woken by appends of other processes, without polling
    many_processes: bool
    many_hosts: bool
    atomic_multi_append: bool = False  # `append_together`
    server_side_copy: bool = False  # `concat` and `copy_segments`
    fair_lock: bool = False
    largest_append: int = MAX_APPEND_BYTES


class SegmentStore(ABC):
    """Segments by name. Threads may share a store; a forked child may not (`ClosedError`).

    Every verb raises `NotFoundError` for a segment that does not exist (or was deleted), `ClosedError` after
    ``close``, and `StoreUnavailableError` when the store cannot be reached: then an append had no effect; ``create``,
    ``delete``, ``truncate``, ``seal`` and ``copy_segments``, which may be repeated, may have had theirs. A backend has
    to translate only the errors that it knows: what else its verbs raise becomes `UnknownOutcome` or
    `StoreUnavailableError` before it reaches the caller, unless its class says ``translate_errors=False``.
    """

    #: The address this store was opened with, without a password.
    url: str
    guarantees: Guarantees

    def __init_subclass__(cls, *, translate_errors: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if translate_errors:
            for name, verb in guard(vars(cls), UnknownOutcome).items():
                setattr(cls, name, verb)

    @abstractmethod
    def create(self, segment: str) -> bool:
        """Create an empty segment and return True; False if it exists. A deleted name raises `AlreadyExistsError`."""

    @abstractmethod
    def delete(self, segment: str) -> None:
        """Delete the segment's bytes and attributes. Its name is not used again. Deleting twice is no error."""

    def forget(self, segment: str) -> None:
        """Delete the segment and its name: the store then knows it as little as one that was never created.

        Only for a name that its creator alone ever creates and appends to, such as one with a random part: nothing
        but memory of the name would keep a late `create` from making the segment again, empty. A deleted name takes
        room for ever, a forgotten one does not. Forgetting what does not exist is no error. By default the same as
        `delete`.
        """
        try:
            self.delete(segment)
        except NotFoundError:
            return

    @abstractmethod
    def info(self, segment: str) -> SegmentInfo:
        """What the store knows of the segment now, after every append and seal that was acknowledged before."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """The names of existing segments that start with ``prefix``, in order of their code points."""

    @abstractmethod
    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        """Append ``data`` and change ``attributes`` in one step, if every expectation holds; else nothing.

        ``data`` may be empty, to change attributes only. A sealed segment raises `SealedError`, with or without
        data, whatever else was expected. No other call sees a part of an append, however large. ``data`` over
        `MAX_APPEND_BYTES` and more than `MAX_ATTRIBUTE_CHANGES` raise `InvalidArgumentError`.
        """

    def append_unread(self, segment: str, data: bytes, *, expected_offset: int | None = None) -> AppendResult:
        """As `append`, for bytes that nobody relies on before this is acknowledged, such as those of a transaction.

        A store may let others see them a moment before they are durable, and so hold up its other writers for less;
        and whoever waits for the segment may not hear of them. By default it is the same as `append`.
        """
        return self.append(segment, data, expected_offset=expected_offset)

    @abstractmethod
    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        """At most ``max_bytes`` bytes from ``offset`` on, as many as are there; empty exactly at the end.

        Where appends began and ended, and how many they were, cannot be seen in what a read returns. An offset before
        the start raises `TruncatedError`, one beyond the length `InvalidArgumentError`.
        """

    @abstractmethod
    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        """The attributes whose names start with ``prefix``, all of one moment; with ``names``, only those of them.

        A few names cost no more than they do on a segment that has no others.
        """

    @abstractmethod
    def truncate(self, segment: str, offset: int) -> None:
        """Give up the bytes before ``offset``. One before the start changes nothing; one beyond the length raises."""

    @abstractmethod
    def seal(self, segment: str) -> SegmentInfo:
        """Refuse every later append and return the final info. Sealing twice is no error."""

    @abstractmethod
    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        """Those segments of ``known`` that changed; waits for one up to ``timeout`` seconds, then returns none.

        ``known`` maps each name to the length the caller has seen. A segment has changed if its length is another,
        or if it is sealed or deleted. Attribute changes and truncations alone wake nobody. A call cannot miss an
        append made between the caller's last read and this call. A name that never was, or was forgotten, raises
        `NotFoundError`.
        """
        # The known lengths make the answer depend on the store alone, so a lost or repeated wake-up does no harm and a
        # backend may wake more often than needed. Leases are attributes: if attribute changes woke waiters, a hundred
        # readers would wake each other with every renewal.

    def fair_lock(self, segment: str, timeout: float) -> AbstractContextManager[bool]:
        """Hold a lock on the segment's name, first come first served; False if ``timeout`` seconds did not suffice.

        Politeness between contenders, never safety. Only where ``guarantees.fair_lock``.
        """
        raise InvalidArgumentError("this store has no fair lock; see store.guarantees", url=self.url)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        """Make all of ``appends``, each to another segment, in one step, if every expectation of each holds; else none.

        Where some did not hold, the answer maps their segments to conflicts. What `append` raises for one part is
        raised for the whole. The limits of `append` are those of all parts in sum. Only where
        ``guarantees.atomic_multi_append``.
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

        However many they are, it is one step. The source stays as it is. One that is not sealed, or is ``segment``
        itself, raises `InvalidArgumentError`. Only where ``guarantees.server_side_copy``.
        """
        raise InvalidArgumentError("this store does not copy inside itself; see store.guarantees", url=self.url)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        """Make all of these segments in one step, each sealed and with its bytes at the source's offsets; then True.

        However many bytes they are, they do not leave the store, and the sources are written meanwhile as ever. False
        if all of them exist, so that a call may be repeated; where only some do, and for a name that was deleted, it
        raises `AlreadyExistsError`. A ``start`` before that of the source raises `TruncatedError`, an ``end`` beyond
        its length `InvalidArgumentError`: then none is made. Only where ``guarantees.server_side_copy``.
        """
        raise InvalidArgumentError("this store does not copy inside itself; see store.guarantees", url=self.url)

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds and wake its waiters, who raise `ClosedError`. Closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
