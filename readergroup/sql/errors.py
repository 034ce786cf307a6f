"""What an error of a driver means, also inside one of SQLAlchemy or Django."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

#: Errors of PostgreSQL after which the same transaction may succeed: lost connections, a server that ends or starts, or
#: is a standby until it takes over, transactions that wait for each other, and limits.
_PASSING_STATES: Final = frozenset({
    "25006", "25P03", "25P04", "40001", "40P01", "53000", "53100", "53200", "53300", "55P03", "57014", "57P01", "57P02",
    "57P03", "57P05",
})  # fmt: skip
_PASSING_CLASSES: Final = ("08",)
_FULL: Final = 13
#: Errors of SQLite: busy, locked, full.
_PASSING_CODES: Final = frozenset({5, 6, _FULL})
#: What a server says that refuses a connection until somebody changes something. libpq passes the text on, and no code.
_REFUSED: Final = re.compile(
    r'(database|role) "[^"]*" does not exist|authentication failed for user|no password supplied'
    r"|no pg_hba\.conf entry|is not permitted to log in|permission denied for database"
)


def is_passing(error: BaseException) -> bool:
    """Return whether the same transaction may succeed later: the connection was lost, or it met another transaction."""
    return any(map(_is_passing, with_causes(error)))


def is_conflict(error: BaseException) -> bool:
    """Return whether PostgreSQL ended the transaction because of another one: a deadlock or a failed serialization."""
    return sqlstate(error) in ("40001", "40P01")


def is_full(error: BaseException) -> bool:
    """Return whether the database has no space for what was written."""
    return sqlstate(error) == "53100" or _FULL in map(_sqlite_code, with_causes(error))


def was_idle(error: BaseException) -> bool:
    """Return whether PostgreSQL ended the transaction because it got no statement for too long."""
    return sqlstate(error) == "25P03"


def sqlstate(error: BaseException) -> str | None:
    """Return the code that PostgreSQL gave the error, if it did."""
    return next((state for each in with_causes(error) if (state := _sqlstate(each)) is not None), None)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and below it the one that it stands for, down to that of the driver."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        # SQLAlchemy keeps the driver's error in `orig`, Django as the cause. Others may have anything in `orig`.
        original: object = None
        with suppress(Exception):
            original = getattr(found, "orig", None)
        found = original if isinstance(original, BaseException) else found.__cause__


def _sqlstate(error: BaseException) -> str | None:
    given = error.args[0] if error.args else None
    if _driver(error) == "pg8000" and isinstance(given, dict):  # the fields of the server's answer
        return given.get("C")
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _sqlite_code(error: BaseException) -> int | None:
    """Return the primary code that SQLite gave the error, if it did."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _driver(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return True
    if getattr(error, "connection_invalidated", False):
        return True
    driver = _driver(error)
    if (code := _sqlite_code(error)) is not None:
        return code in _PASSING_CODES
    if (state := _sqlstate(error)) is not None:
        return state in _PASSING_STATES or str(state).startswith(_PASSING_CLASSES)
    names = {each.__name__ for each in type(error).__mro__}
    if driver in ("psycopg_pool", "sqlalchemy"):
        return bool(names & {"PoolTimeout", "TimeoutError"})
    return (
        driver in ("psycopg", "psycopg2", "pg8000", "asyncpg")
        and bool(names & {"OperationalError", "InterfaceError"})
        and not _REFUSED.search(str(error))
    )
