"""Every error of the three packages: one root, coarse kinds that say what to do, facts as ``key=value`` at the end."""

from __future__ import annotations

import threading
from typing import ClassVar


class ReaderGroupError(Exception):
    """The root of all errors raised by this distribution.

    The message says what happened and what to do; ``facts`` holds the values it happened with and is printed after
    the message. ``retryable`` tells whether the same call may succeed later without anything else being changed.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        return f"{self.message}: " + " ".join(f"{key}={value!r}" for key, value in self.facts.items())

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[ReaderGroupError], message: str, facts: dict[str, object]) -> ReaderGroupError:
    return kind(message, **facts)


class InvalidArgumentError(ReaderGroupError, ValueError):
    """The call's arguments cannot be right. Nothing was written."""


class NotFoundError(ReaderGroupError, LookupError):
    """What was named does not exist, or exists no longer."""


class AlreadyExistsError(ReaderGroupError, ValueError):
    """What was to be created exists, in another shape."""


class ClosedError(ReaderGroupError, RuntimeError):
    """The object was closed, or belongs to the process that this one was forked from."""


class DeadlineExceededError(ReaderGroupError, TimeoutError):
    """The deadline came first. Nothing that the call was to write has been written, unless the message says so."""

    retryable = True


class OutcomeUnknownError(ReaderGroupError):
    """A write was sent and its answer lost, and whether it was stored can no longer be found out."""


class SealedError(ReaderGroupError):
    """The segment or stream takes no further appends."""


class TruncatedError(ReaderGroupError, LookupError):
    """The data asked for was truncated away. ``facts['start_offset']`` is where the remaining data starts."""

    @property
    def start_offset(self) -> int:
        value = self.facts["start_offset"]
        assert isinstance(value, int)
        return value


class StoreUnavailableError(ReaderGroupError, ConnectionError):
    """The store cannot be reached or does not answer now. The call had no effect."""

    retryable = True


class StoreFullError(ReaderGroupError, OSError):
    """The disk or quota of the store is full. The call had no effect; it succeeds when there is room again."""

    retryable = True


class CorruptStoreError(ReaderGroupError):
    """The file or database is not a store of this SDK, or is damaged."""


class UnsupportedError(ReaderGroupError, ValueError):
    """The URL's scheme is unknown, its driver is not installed, or the store lacks a guarantee that is needed."""


class CorruptStateError(ReaderGroupError):
    """An entry of a state's log is damaged or does not follow the one before it. Nothing is skipped."""


class UnknownUpdateError(ReaderGroupError):
    """The log holds an update, field or state format that this release does not know: deploy the one that does."""


class StateTooLargeError(ReaderGroupError, ValueError):
    """The updates would make a state that is over its limit larger. Nothing was written; removals still pass."""


class HandlerError(ReaderGroupError):
    """A handler failed for the last time and there is nowhere to set the event aside. ``__cause__`` is its error."""


class BrokenBarrierError(ReaderGroupError, threading.BrokenBarrierError):
    """Not all came together: one who waited at the barrier went, or died. Those who wait again begin anew."""

    retryable = True


class LeaseLostError(ReaderGroupError):
    """The lease may be over: somebody else may hold it by now. Stop what it protected."""
