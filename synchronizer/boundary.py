"""The boundary of a store: whatever goes wrong behind it comes out as an error of this distribution.

Each backend translates the errors that it knows, where it talks to its driver. What is left are those that nobody
thought of, such as a `ValueError` of a driver or an `OSError` of the system. `SegmentStore` puts this boundary before
the verbs of every backend, also of other distributions. A verb that appends answers `UnknownOutcome` then, since
nothing says whether it wrote; every other verb, which may be repeated, raises `StoreUnavailableError`.

What is no `Exception`, such as an interrupt, passes through. So does the `TypeError` of a call with arguments that the
verb does not have.
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


def guard(verbs: Mapping[str, Verb], unknown: Callable[[BaseException], object]) -> dict[str, Verb]:
    """The same verbs of a backend behind the boundary; what is not a verb is left out."""
    guarded = {name: _GUARDS[name](verb) for name, verb in verbs.items() if name in _GUARDS}
    return guarded | {name: _guarded(verb, unknown) for name, verb in verbs.items() if name in _APPENDING}


def unexpected(error: Exception, url: str) -> ReaderGroupError:
    """What is raised in place of an error that the backend does not know."""
    facts = {"url": url, "error": repr(error)}
    translated: ReaderGroupError
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        translated = StoreFullError("the disk is full; make room and repeat the call", **facts)
    elif isinstance(error, OSError):
        translated = StoreUnavailableError("the system refused what the store needs; repeat the call later", **facts)
    else:
        survive(error, f"the store at {url}")
        translated = StoreUnavailableError("the store failed in an unexpected way; repeat the call later", **facts)
    translated.__cause__ = error
    return translated


def _guarded(verb: Verb, unknown: Callable[[BaseException], object] | None = None) -> Verb:
    """The verb with its unexpected errors translated, and raised, or returned as what ``unknown`` makes of them."""

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(self, *args, **kwargs)
        except ReaderGroupError:
            raise
        except Exception as error:
            if _is_wrong_call(error):
                raise
            translated = unexpected(error, _url_of(self))
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
            raise unexpected(error, url) from error
        yield name


def _locking(verb: Verb) -> Verb:
    ask = _guarded(verb)

    @wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[bool]:
        return _GuardedLock(ask(self, *args, **kwargs), _url_of(self))

    return call


class _GuardedLock(AbstractContextManager[bool]):
    """A fair lock behind the boundary. What the block raises passes through as it is."""

    def __init__(self, lock: AbstractContextManager[bool], url: str) -> None:
        self._lock = lock
        self._url = url

    def __enter__(self) -> bool:
        try:
            return self._lock.__enter__()
        except ReaderGroupError:
            raise
        except Exception as error:
            raise unexpected(error, self._url) from error

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
            raise unexpected(error, self._url) from error


def _is_wrong_call(error: Exception) -> bool:
    """Whether the verb did not even begin, because it does not have these arguments."""
    traceback = error.__traceback__
    return isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None


def _url_of(store: Any) -> str:
    return str(getattr(store, "url", type(store).__name__))


_APPENDING: Final = frozenset({"append", "append_unread", "append_together", "concat"})
_GUARDS: Final[dict[str, Callable[[Verb], Verb]]] = {
    **dict.fromkeys(
        (
            "create",
            "delete",
            "forget",
            "info",
            "attributes",
            "read",
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
