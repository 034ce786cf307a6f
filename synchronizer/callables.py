"""Refuses callables that do not run when they are called: coroutine functions and generator functions.

Calling an ``async def``, or a function that yields, runs none of its body. If the caller discards the result, the work
is lost without an error. Two checks prevent that: one when a callable is passed in, and one of each value that it
returns, because a decorator or a lambda hides the function that it calls.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

from .errors import InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN: Final = frozenset((type(None), bool, int, float, str, bytes, list, tuple, dict))
_RUNS_IT: Final = (
    "runs it with asyncio.run, or passes it to your loop with asyncio.run_coroutine_threadsafe(...).result()"
)
_ASYNC_ADVICE: Final = f"nothing would await it; pass a plain function that {_RUNS_IT}"
_AWAITABLE_ADVICE: Final = f"an async function awaits it itself, a plain one {_RUNS_IT}"


class NotHandledError(BaseException):
    """A handler was not called, or not to its end, and that was no attempt: what called it ends with ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def check_callable(
    call: object,
    what: str,
    *,
    may_await: bool = False,
    may_yield: bool = False,
    takes: str | None = None,
    advice: str = _ASYNC_ADVICE,
    **facts: object,
) -> None:
    """Raise `InvalidArgumentError` if ``call`` cannot be called, or if calling it would not run its body.

    Args:
        call: The object to check.
        what: Its role, for the error, such as "a handler".
        may_await: Accept an ``async def``: the caller awaits the result.
        may_yield: Accept a generator function: the caller iterates over the result.
        takes: The arguments that it is called with, as those of `check_takes`. Default: not checked.
        advice: What to do instead of an ``async def``, for the error.
        **facts: Values for the error.
    """
    if not callable(call):
        raise InvalidArgumentError(f"{what} must be a function or another callable", found=repr(call))
    if not may_await and is_async(call):
        raise InvalidArgumentError(f"{what} must not be async: {advice}", found=repr(call), **facts)
    if _is(inspect.isasyncgenfunction, call) or (not may_yield and _is(inspect.isgeneratorfunction, call)):
        raise InvalidArgumentError(
            f"{what} must not be a generator function, because nothing would run its body; pass a function that "
            "returns",
            found=repr(call),
            **facts,
        )
    if takes is not None:
        check_takes(call, what, takes, advice="", **facts)


def check_takes(
    call: Callable[..., object], name: str, arguments: str, /, *, advice: str = "", **facts: object
) -> None:
    """Raise `InvalidArgumentError` if ``call`` cannot take the positional arguments that it is called with.

    It looks at the callable itself, not behind decorators: one may add arguments of its own. A callable that does not
    tell its parameters is accepted.

    Args:
        call: The callable.
        name: The argument that it was passed as, or its role, for the error, such as "handle" or "a listener".
        arguments: The names of these arguments with commas between them, such as "event, connection", or "".
        advice: What else to do about it, for the error.
        **facts: Values for the error.
    """
    try:
        signature = inspect.signature(call, follow_wrapped=False)
    except Exception:  # it is of C, or has annotations of names that do not exist
        return
    try:
        signature.bind(*filter(None, arguments.split(",")))
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name} is called as {name.removeprefix('a ')}({arguments}): {error}; change its parameters{advice}",
            found=repr(call),
            **facts,
        ) from error


def check_returned(
    returned: object, what: str, *, may_yield: bool = False, advice: str = _AWAITABLE_ADVICE, **facts: object
) -> None:
    """Raise `InvalidArgumentError` if ``returned`` is an awaitable or a generator: nothing of it has run yet.

    The check is fast for common types. A hot path can skip it for None.

    Args:
        returned: The returned value.
        what: The callable that returned it, for the error, such as "a handler".
        may_yield: Accept a generator: the caller iterates over it.
        advice: What to do with an awaitable, for the error.
        **facts: Values for the error.
    """
    if type(returned) in _PLAIN:
        return
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns that it was never awaited
        raise InvalidArgumentError(
            f"{what} returned an awaitable, which nothing would await: {advice}",
            found=type(returned).__name__,
            **facts,
        )
    if isinstance(returned, AsyncGenerator) or (not may_yield and inspect.isgenerator(returned)):
        raise InvalidArgumentError(
            f"{what} returned a generator, whose body nothing would run; pass a function that does the work",
            found=type(returned).__name__,
            **facts,
        )


def checked(call: Callable[P, R], what: str, arguments: str) -> Callable[P, R]:
    """Check ``call``, and return a function that calls it and checks each returned value.

    ``what`` is its name, for the error, and ``arguments`` are those of `check_takes`.
    """
    check_callable(call, what, takes=arguments)

    @wraps(call)
    def call_and_check(*args: P.args, **kwargs: P.kwargs) -> R:
        returned = call(*args, **kwargs)
        check_returned(returned, what)
        return returned

    return call_and_check


def is_async(call: object) -> bool:
    """Return whether ``call`` is an ``async def`` in any form, also as a partial, bound method or callable object."""
    return _is(inspect.iscoroutinefunction, call)


def _is(kind: Callable[[Any], bool], call: Any) -> bool:
    """Return whether ``call``, the function of a partial, or the ``__call__`` of an object, is of this kind.

    It does not look behind decorators: a plain function may wrap an async one to run it.
    """
    while isinstance(call, partial):
        call = call.func
    return kind(call) or kind(type(call).__call__)
