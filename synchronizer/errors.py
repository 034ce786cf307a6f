"""Every error of the three packages: one root, coarse kinds that say what to do, facts as ``key=value`` at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar


class ReaderGroupError(Exception):
    """The root of all errors raised by this distribution.

    The message says what happened and what to do. ``facts`` holds the values, which `str` prints after the message.
    ``retryable`` tells whether the same call may succeed later, with nothing else changed.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        return f"{self.message}: " + " ".join(f"{key}={shown(value)}" for key, value in self.facts.items())

    def __repr__(self) -> str:
        facts = "".join(f", {key}={shown(value)}" for key, value in self.facts.items())
        return f"{type(self).__name__}({self.message!r}{facts})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Return a value as errors print it. It raises nothing, unlike a `repr`: an error would hide the first one."""
    try:
        return write(value)
    except Exception:  # an int of too many digits, or a type of the caller
        return f"<unprintable {type(value).__name__}>"


def _rebuild(kind: type[ReaderGroupError], message: str, facts: dict[str, object]) -> ReaderGroupError:
    return kind(message, **facts)


class InvalidArgumentError(ReaderGroupError, ValueError):
    """The call's arguments cannot be right. Nothing was written."""


class NotFoundError(ReaderGroupError, LookupError):
    """The object of this name does not exist, or no longer exists."""


class AlreadyExistsError(ReaderGroupError, ValueError):
    """The object to create exists in another form, or its name belonged to a deleted one."""


class ClosedError(ReaderGroupError, RuntimeError):
    """The object was closed, or belongs to the parent process that this one was forked from."""


class DeadlineExceededError(ReaderGroupError, TimeoutError):
    """The deadline passed first. The call has written nothing, unless the message says so."""

    retryable = True


class OutcomeUnknownError(ReaderGroupError):
    """A write was sent and its answer was lost. It can no longer be found out whether it was stored."""


class SealedError(ReaderGroupError):
    """The segment or stream takes no further appends."""


class TruncatedError(ReaderGroupError, LookupError):
    """The requested data was truncated. ``facts['start_offset']`` is where the remaining data starts."""

    @property
    def start_offset(self) -> int:
        value = self.facts["start_offset"]
        assert isinstance(value, int)
        return value


class StoreUnavailableError(ReaderGroupError, ConnectionError):
    """The store cannot be reached, or its answer was lost. `SegmentStore.append` did nothing; other calls may have."""

    retryable = True


class StorePermissionError(StoreUnavailableError, PermissionError):
    """The store's user lacks a right. The message names the right, or the page that lists all of them.

    `SegmentStore.append` did nothing; other calls may have. A call raises it at once, without waiting for its timeout.
    Background threads try again, so they continue when the right is granted.
    """


class StoreFullError(ReaderGroupError, OSError):
    """The disk or quota of the store is full. The call had no effect; it succeeds once there is room again."""

    retryable = True


class CorruptStoreError(ReaderGroupError):
    """The file or database is not a store of this SDK, or is damaged."""


class UnsupportedError(ReaderGroupError, ValueError):
    """The URL's scheme is unknown, its driver is not installed, or the store lacks a required guarantee."""


class CorruptStateError(ReaderGroupError):
    """An entry of a state's log is damaged or does not follow the one before it. No entry is skipped."""


class UnknownUpdateError(ReaderGroupError):
    """The log holds an update, field or state format that this release does not know. Deploy the release that does."""


class StateTooLargeError(ReaderGroupError, ValueError):
    """The updates make the state larger and leave it over its limit. Nothing was written; removals still pass."""


class HandlerError(ReaderGroupError):
    """A handler failed on its last attempt, and no dead-letter queue is set; or a callback of a reader failed.

    ``__cause__`` is the error of the handler or callback.
    """


class BrokenBarrierError(ReaderGroupError, threading.BrokenBarrierError):
    """The barrier broke: a waiting participant left or died, or `Barrier.reset` was called. Wait again to retry."""

    retryable = True


class LeaseLostError(ReaderGroupError):
    """The lease may be over, and another process may hold it. Stop the work that it protected."""
