"""Refuses callables that would be called and never run to their end: coroutines, and generators.

Calling an ``async def`` runs nothing of it. So does calling a function that yields. Where the result is thrown away,
the work is lost without an error; this module has the two checks that prevent it: one when a callable is given, and
one of what it returns, because a decorator or a lambda hides what it calls.
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
_ASYNC_ADVICE: Final = (
    "it would never be awaited; give a plain function that runs it with asyncio.run, or hands it to your loop with "
    "asyncio.run_coroutine_threadsafe(...).result()"
)


def check_callable(
    call: object, what: str, *, may_await: bool = False, may_yield: bool = False, **facts: object
) -> None:
    """Refuse ``call`` as ``what`` ("a handler") where calling it would run nothing of it, or is not possible.

    Whoever awaits what it returns allows that with ``may_await``; whoever iterates over it, with ``may_yield``.
    """
    if not callable(call):
        raise InvalidArgumentError(
            f"{what} is a plain function, or something else that can be called", found=repr(call)
        )
    if not may_await and is_async(call):
        raise InvalidArgumentError(f"{what} cannot be async: {_ASYNC_ADVICE}", found=repr(call), **facts)
    if _is(inspect.isasyncgenfunction, call) or (not may_yield and _is(inspect.isgeneratorfunction, call)):
        raise InvalidArgumentError(
            f"{what} cannot yield: calling it would run nothing of it; give a function that returns",
            found=repr(call),
            **facts,
        )


def check_returned(returned: object, what: str, *, may_yield: bool = False, **facts: object) -> None:
    """Refuse what ``what`` ("a handler") has returned, if that still has to be run: nothing has happened yet.

    Quick for what most return; a hot path need not even ask for None.
    """
    if type(returned) in _PLAIN:
        return
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns that nobody awaited it
        raise InvalidArgumentError(
            f"{what} returned an awaitable: {_ASYNC_ADVICE}", found=type(returned).__name__, **facts
        )
    if isinstance(returned, AsyncGenerator) or (not may_yield and inspect.isgenerator(returned)):
        raise InvalidArgumentError(
            f"{what} returned a generator, of which nothing has run; give a function that does the work",
            found=type(returned).__name__,
            **facts,
        )


def checked(call: Callable[P, R], what: str) -> Callable[P, R]:
    """``call``, checked now, as a function that also checks what each call returns."""
    check_callable(call, what)

    @wraps(call)
    def call_and_check(*args: P.args, **kwargs: P.kwargs) -> R:
        returned = call(*args, **kwargs)
        check_returned(returned, what)
        return returned

    return call_and_check


def is_async(call: object) -> bool:
    """Whether it is an ``async def`` in some form, as a partial, a bound method or an object that is called."""
    return _is(inspect.iscoroutinefunction, call)


def _is(kind: Callable[[Any], bool], call: Any) -> bool:
    """Whether ``call``, or what it calls first as a partial or an object, is of this kind.

    Not what a decorator wraps: a plain function may wrap an async one to run it.
    """
    while isinstance(call, partial):
        call = call.func
    return kind(call) or kind(type(call).__call__)
