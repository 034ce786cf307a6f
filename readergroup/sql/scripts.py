"""SQL as generators, so that what is the same for databases that block and asynchronous ones is written once.

A coroutine that runs on a database that blocks awaits nothing, so `now` runs it to its end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator, Mapping
from contextlib import suppress
from enum import Enum
from inspect import isawaitable
from typing import Any, Final, NamedTuple, TypeVar

from synchronizer import InvalidArgumentError

R = TypeVar("R")


class Statement(NamedTuple):
    """SQL with parameters as ``:name``. It has no other colons, and no percent signs."""

    sql: str
    parameters: Mapping[str, object] = {}


class Result(NamedTuple):
    rows: list[tuple[Any, ...]]
    #: How many rows were changed.
    changed: int


class Control(Enum):
    """What a script does with its transaction."""

    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"


NOTHING: Final = Result([], 0)

#: Statements one after the other: a generator that yields each and is sent its result.
Script = Generator[Statement | Control, Result, R]


def in_transaction(script: Script[R]) -> Script[R]:
    """Return the script with a transaction around it."""
    yield Control.BEGIN
    try:
        returned = yield from script
        yield Control.COMMIT
        return returned
    except GeneratorExit:
        raise
    except BaseException:
        with suppress(Exception):
            yield Control.ROLLBACK
        raise


async def settled(value: R | Awaitable[R]) -> R:
    """Return the value, and wait for it if it belongs to an event loop."""
    return await value if value is not None and isawaitable(value) else value


def now(coroutine: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        returned: R = ended.value
        return returned
    finally:
        coroutine.close()
    raise InvalidArgumentError("the call waits for an event loop; use its asynchronous form")
