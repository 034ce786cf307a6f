"""Makes the methods of a facade from those of the object behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, NoReturn, ParamSpec, Self, TypeVar, cast

from synchronizer import InvalidArgumentError

from ..forms import refuses_plain
from .calls import Calls

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

#: How many items an iteration takes in one hop between threads, at most.
ITEMS_AT_ONCE: Final = 1000


class Facade(Generic[W]):
    """The asyncio face of an object. It has the names of the object; what blocks is awaited."""

    def __init__(self, wrapped: W, calls: Calls) -> None:
        self._wrapped = wrapped
        self._calls = calls

    def __repr__(self) -> str:
        return f"aio.{self._wrapped!r}"


@refuses_plain
class ClosableFacade(Facade[W]):
    """A facade that is an async context manager, which closes it."""

    async def close(self) -> None:
        """Close it. Closing twice is no error."""
        await self._calls.end(self._wrapped.close, waits=True)  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def awaited(
    method: Callable[Concatenate[Any, P], R], *, waits: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Return the method that runs ``method`` of the wrapped object in a thread.

    Args:
        method: A method of the wrapped object's class.
        waits: Whether it waits for other processes or tasks.
    """
    name = method.__name__
    defaults = method.__kwdefaults__ or {}

    @wraps(method)
    async def call(self: Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = getattr(self._wrapped, name)
        if "timeout" in defaults:
            kwargs.setdefault("timeout", defaults["timeout"])  # may be replaced, if the call must wait for a thread
        return cast(R, await self._calls.run(partial(bound, *args, **kwargs), waits=waits))

    return call


def iterated(
    method: Callable[Concatenate[Any, P], Iterator[T]], *, at_once: int = ITEMS_AT_ONCE
) -> Callable[Concatenate[Any, P], Items[T]]:
    """Return the method that iterates, with ``async for``, over what ``method`` of the wrapped object returns.

    Args:
        method: A method of the wrapped object's class.
        at_once: How many items come in one hop between threads.
    """
    name = method.__name__

    @wraps(method)
    def call(self: Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> Items[T]:
        return Items(partial(getattr(self._wrapped, name), *args, **kwargs), self._calls, at_once)

    return call


class Plain(Generic[R]):
    """An attribute of the wrapped object that never blocks. ``member`` only tells type checkers its type."""

    def __init__(self, member: Callable[[Any], R]) -> None:
        self._name = ""

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    def __get__(self, facade: Facade[Any] | None, owner: type[object]) -> R:
        if facade is None:
            return cast(R, self)
        return cast(R, getattr(facade.__dict__["_wrapped"], self._name))


class AwaitedProperty(Generic[R]):
    """A property of the wrapped object that asks the store: awaiting it gives its value.

    ``member`` only tells type checkers its type.
    """

    def __init__(self, member: Callable[[Any], R]) -> None:
        self._name = ""

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    def __get__(self, facade: Facade[Any] | None, owner: type[object]) -> Awaitable[R]:
        if facade is None:
            return cast("Awaitable[R]", self)
        wrapped, calls = facade.__dict__["_wrapped"], facade.__dict__["_calls"]
        return cast("Awaitable[R]", Later(partial(calls.run, partial(getattr, wrapped, self._name))))


class Later(Generic[R]):
    """An awaitable that begins when it is awaited."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, R]]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, Any, R]:
        return self._call().__await__()


@refuses_plain
class Block(Generic[R]):
    """An object that is opened when the ``async with`` block begins, and closed at its end."""

    def __init__(self, open: Callable[[], Coroutine[Any, Any, R]]) -> None:
        self._open = open
        self._opened: R | None = None
        self._is_entered = False

    async def __aenter__(self) -> R:
        if self._is_entered:
            raise InvalidArgumentError("another task is in the block; open an object of its own for each task")
        self._is_entered = True
        try:
            self._opened = opened = await self._open()
            return cast(R, await opened.__aenter__())  # type: ignore[attr-defined]
        except BaseException:
            self._is_entered = False
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._opened, self._is_entered = self._opened, None, False
        if opened is None:
            raise InvalidArgumentError("the block was not entered")
        await opened.__aexit__(kind, error, traceback)  # type: ignore[attr-defined]


class Opening(Block[R]):
    """An object that is opened when it is awaited, or when its ``async with`` block begins, which also closes it."""

    def __await__(self) -> Generator[Any, Any, R]:
        return self._open().__await__()

    if not TYPE_CHECKING:  # type checkers find what is missing

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"an Opening has no {name!r}; await it, or use 'async with', to get the object that it opens"
            )

        def _refuse_to_iterate(self) -> NoReturn:
            raise TypeError("open it first: await it, or use 'async with'; then use 'async for' over what it opens")

        __iter__ = __aiter__ = _refuse_to_iterate


class Items(Generic[T]):
    """Iterates over what blocks, many items in one hop between threads. A cancelled step loses no item."""

    def __init__(self, iterate: Callable[[], Iterator[T]], calls: Calls, at_once: int = ITEMS_AT_ONCE) -> None:
        self._iterate = iterate
        self._calls = calls
        self._at_once = at_once
        self._iterator: Iterator[T] | None = None
        self._items: deque[T] = deque()
        self._error: Exception | None = None
        self._is_over = False
        self._taking: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_over:
                raise StopAsyncIteration
            if self._taking is None:
                self._taking = self._calls.begin(self._take)
            taking = self._taking
            await asyncio.wait([taking])
            self._taking = None
            taking.result()
        return self._items.popleft()

    def _take(self) -> None:
        """Take the next items; runs in a thread, while the loop leaves the items alone."""
        try:
            if self._iterator is None:
                self._iterator = iter(self._iterate())
            for _ in range(self._at_once):
                self._items.append(next(self._iterator))
        except StopIteration:
            self._is_over = True
        except Exception as error:
            self._error = error
