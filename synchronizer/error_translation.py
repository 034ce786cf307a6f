"""Translates the unexpected errors of a store into errors of this distribution.

Each backend translates the errors that it knows, where it calls its driver. This module translates the unexpected
ones, such as a `ValueError` of a driver or an `OSError` of the system. `SegmentStore` does so for the verbs
of every backend, including those of other distributions. A verb that appends then returns `UnknownOutcome`,
because it may have written. Every other verb may be repeated: it raises `StoreUnavailableError`, or `StoreFullError`
if the disk is full.

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

from .errors import ReaderGroupError, StoreFullError, StoreUnavailableError
from .threads.background import survive

Verb = Callable[..., Any]


def translating(verbs: Mapping[str, Verb], unknown: Callable[[BaseException], object]) -> dict[str, Verb]:
    """Return the verbs of a backend with their unexpected errors translated, without the names that are no verbs."""
    guarded = {name: _GUARDS[name](verb) for name, verb in verbs.items() if name in _GUARDS}
    return guarded | {name: _guarded(verb, unknown) for name, verb in verbs.items() if name in _APPENDING}


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


def _guarded(verb: Verb, unknown: Callable[[BaseException], object] | None = None) -> Verb:
    """Return the verb with unexpected errors translated: it raises them, or returns what ``unknown`` makes of them."""

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(self, *args, **kwargs)
        except ReaderGroupError:
            raise
        except Exception as error:
            if _is_wrong_call(error):
                raise
            translated = translate_unexpected(error, _url_of(self))
            if unknown is None:
                raise translated from error
            return unknown(translated)

    return call


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


_APPENDING: Final = frozenset(
    {"append", "append_unread", "append_unflushed", "append_together", "concat", "concat_unread"}
)
_GUARDS: Final[dict[str, Callable[[Verb], Verb]]] = {
    **dict.fromkeys(
        (
            "create",
            "create_together",
            "delete",
            "forget",
            "info",
            "attributes",
            "read",
            "read_starts",
            "truncate",
            "seal",
            "wait",
            "copy_segments",
            "close",
        ),
        _guarded,
    ),
    "list": _listing,
    "fair_lock": _locking,
}
