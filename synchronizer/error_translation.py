"""The boundary to a store: it translates unexpected errors into errors of this distribution, and counts.

Each backend translates the errors that it knows, where it calls its driver. This module translates the unexpected
ones, such as a `ValueError` of a driver or an `OSError` of the system. `SegmentStore` does so for the verbs
of every backend, including those of other distributions. A verb that appends then returns `UnknownOutcome`,
because it may have written. Every other verb may be repeated: it raises `StoreUnavailableError`, or `StoreFullError`
if the disk is full.

It counts the appends by how long they took, and the errors that say nothing about the stored data.

Interrupts and other exceptions that are no `Exception` pass through. So does the `TypeError` of a call with arguments
that the verb does not have.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Final

from .clock import stopwatch
from .errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    SealedError,
    StoreFullError,
    StoreUnavailableError,
    TruncatedError,
)
from .threads.background import survive

Verb = Callable[..., Any]


def guarding(
    verbs: Mapping[str, Verb], unknown: Callable[[BaseException], object], *, translates: bool
) -> dict[str, Verb]:
    """Return the verbs of a backend behind the boundary, without the names that are no verbs.

    Args:
        verbs: The members of the backend's class.
        unknown: The class of the answer of an append whose outcome is unknown.
        translates: Whether to translate unexpected errors, and not only count.
    """
    guarded = {name: _guarded(verb, translates) for name, verb in verbs.items() if name in _GUARDED}
    if translates:
        guarded |= {name: _LAZY[name](verb) for name, verb in verbs.items() if name in _LAZY}
    return guarded | {name: _appending(verb, unknown, translates) for name, verb in verbs.items() if name in _APPENDING}


def translate_unexpected(error: Exception, url: str) -> ReaderGroupError:
    """Return the error of this distribution to raise in place of one that the backend does not know."""
    facts = {"url": url, "error": repr(error)}
    result: ReaderGroupError
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        result = StoreFullError("the disk is full; free some space and repeat the call", **facts)
    elif isinstance(error, OSError):
        result = StoreUnavailableError(
            "the operating system refused an operation of the store; repeat the call later", **facts
        )
    else:
        survive(error, f"the store at {url}")
        result = StoreUnavailableError("the store failed with an unexpected error; repeat the call later", **facts)
    result.__cause__ = error
    return result


def raise_interrupt_in(error: Exception) -> None:
    """Raise the interrupt that ``error`` wraps, if there is one.

    pydantic wraps whatever is raised in a serializer written in Python, also the KeyboardInterrupt of a signal handler.
    """
    if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
        raise error.__cause__


def _guarded(verb: Verb, translates: bool = True) -> Verb:
    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(self, *args, **kwargs)
        except Exception as error:
            raised = _judge(self, error, translates)
            if raised is error:
                raise
            raise raised from error

    return call


def _appending(verb: Verb, unknown: Callable[[BaseException], object], translates: bool) -> Verb:
    """Return the verb that answers an unexpected error with what ``unknown`` makes of it, and is timed."""

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = stopwatch()
        try:
            answer = verb(self, *args, **kwargs)
        except Exception as error:
            raised = _judge(self, error, translates)
            if raised is error:
                raise
            return unknown(raised)
        if type(answer) is unknown:
            self.counters.errors[OutcomeUnknownError.__name__] += 1
        else:
            self.counters.appends.add(stopwatch() - begin)
        return answer

    return call


def _judge(store: Any, error: Exception, translates: bool) -> Exception:
    """Count the error, and return the one to raise in its place: itself, unless it is unexpected."""
    if not isinstance(error, ReaderGroupError):
        if not translates or _is_wrong_call(error):
            return error
        error = translate_unexpected(error, _url_of(store))
    if not isinstance(error, _ANSWERS):
        store.counters.errors[type(error).__name__] += 1
    return error


def _listing(verb: Verb) -> Verb:
    ask = _guarded(verb)

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Iterator[str]:
        return _guarded_names(ask(self, *args, **kwargs), _url_of(self))

    return call


def _guarded_names(names: Iterator[str], url: str) -> Iterator[str]:
    while True:
        try:
            name = next(names)
        except StopIteration:
            return
        except ReaderGroupError:
            raise
        except Exception as error:
            raise translate_unexpected(error, url) from error
        yield name


def _locking(verb: Verb) -> Verb:
    ask = _guarded(verb)

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[bool]:
        return _GuardedLock(ask(self, *args, **kwargs), _url_of(self))

    return call


class _GuardedLock(AbstractContextManager[bool]):
    """A fair lock behind the boundary. An error of the block passes through unchanged."""

    def __init__(self, lock: AbstractContextManager[bool], url: str) -> None:
        self._lock = lock
        self._url = url

    def __enter__(self) -> bool:
        try:
            return self._lock.__enter__()
        except ReaderGroupError:
            raise
        except Exception as error:
            raise translate_unexpected(error, self._url) from error

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._lock.__exit__(kind, raised, traceback)
        except ReaderGroupError:
            raise
        except Exception as error:
            if error is raised:
                raise
            raise translate_unexpected(error, self._url) from error


def _is_wrong_call(error: Exception) -> bool:
    """Return whether the verb did not begin, because it does not have these arguments."""
    traceback = error.__traceback__
    return isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None


def _url_of(store: Any) -> str:
    return str(getattr(store, "url", type(store).__name__))


#: What a store says about the stored data, or about the call.
_ANSWERS: Final = (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    SealedError,
    TruncatedError,
)
_APPENDING: Final = frozenset(
    {"append", "append_unread", "append_unflushed", "append_together", "concat", "concat_unread"}
)
_GUARDED: Final = frozenset(
    {
        "create",
        "create_together",
        "delete",
        "forget",
        "info",
        "infos",
        "attributes",
        "read",
        "read_starts",
        "truncate",
        "seal",
        "wait",
        "copy_segments",
        "close",
    }
)
_LAZY: Final[dict[str, Callable[[Verb], Verb]]] = {"list": _listing, "fair_lock": _locking}
