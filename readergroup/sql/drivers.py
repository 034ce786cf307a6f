"""Drivers and frameworks are recognised by their loaded modules, and never imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final, Literal

from synchronizer import InvalidArgumentError, UnsupportedError

Dialect = Literal["sqlite", "postgresql"]

_PARAMETER: Final = re.compile(r":(\w+)")
#: What the modules of drivers are called, without those below them.
_DRIVERS: Final[Mapping[str, Dialect]] = {
    "sqlite3": "sqlite",
    "_sqlite3": "sqlite",
    "aiosqlite": "sqlite",
    "pysqlite3": "sqlite",
    "sqlcipher3": "sqlite",
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pg8000": "postgresql",
}
#: The names of these databases in SQLAlchemy (``dialect.name``) and in Django (``vendor``).
_DIALECTS: Final[Mapping[str, Dialect]] = {"sqlite": "sqlite", "postgresql": "postgresql"}


def is_instance(value: object, module: str, *names: str) -> bool:
    """Return whether it is of one of these classes of a module, which is loaded if there is such an object."""
    found = sys.modules.get(module)
    classes = tuple(each for name in names if isinstance(each := getattr(found, name, None), type))
    return isinstance(value, classes)


def driver_of(native: Any) -> str:
    """Return the driver's top module, also of a subclass that the application has made."""
    for each in type(native).__mro__:
        name = each.__module__.partition(".")[0]
        if name in _DRIVERS:
            return name
    return type(native).__module__.partition(".")[0]


def dialect_of(native: Any) -> Dialect:
    """Return the dialect of a driver's connection. Raise `UnsupportedError` if the driver is not known."""
    driver = driver_of(native)
    if driver not in _DRIVERS:
        raise _unsupported(driver)
    return _DRIVERS[driver]


def known_dialect(name: str) -> Dialect:
    if name not in _DIALECTS:
        raise _unsupported(name)
    return _DIALECTS[name]


def _unsupported(found: str) -> UnsupportedError:
    return UnsupportedError("the database must be SQLite or PostgreSQL", found=found)


def paramstyle(native: Any) -> str:
    driver = driver_of(native)
    if _DRIVERS[driver] == "sqlite":
        return "named"
    if driver in ("psycopg", "psycopg2"):
        return "pyformat"
    module: ModuleType | None = sys.modules.get(type(native).__module__) or sys.modules.get(driver)
    return str(getattr(module, "paramstyle", "format"))


def translated(sql: str, parameters: Mapping[str, object], style: str) -> tuple[str, Any]:
    """Return the statement as the driver takes it."""
    if style == "named":
        return sql, dict(parameters)
    if style == "pyformat":
        return _PARAMETER.sub(r"%(\1)s", sql), dict(parameters)
    values = [parameters[name] for name in _PARAMETER.findall(sql)]
    return _PARAMETER.sub("%s" if style == "format" else "?", sql), values


def has_transaction(native: Any) -> bool:
    """Return whether a driver's connection is in a transaction, as far as it says."""
    for name in ("in_transaction", "_in_transaction"):  # the second is pg8000's
        if hasattr(native, name):
            return bool(getattr(native, name))
    return int(getattr(getattr(native, "info", None), "transaction_status", 0)) != 0  # of libpq: 0 is idle


def commits_each_statement(native: Any) -> bool:
    """Return whether a driver's connection is in autocommit mode, and in no transaction."""
    autocommit = getattr(native, "autocommit", None)
    if not isinstance(autocommit, bool):
        autocommit = getattr(native, "isolation_level", "") is None  # of sqlite3
    return autocommit and not has_transaction(native)


def was_closed(native: Any) -> bool:
    """Return whether the application has closed a driver's connection, as far as it says. False if it was lost."""
    driver = driver_of(native)
    if _DRIVERS.get(driver) == "sqlite":
        try:
            _ = native.total_changes
        except Exception:
            return True
        return False
    if driver == "pg8000":
        return getattr(native, "_usock", native) is None
    closed = getattr(native, "closed", False)
    return closed == 1 if driver == "psycopg2" else bool(closed) and not getattr(native, "broken", False)


def django_connection(alias: str, *, instead: str = "an engine, a pool, or a function that connects") -> Any:
    module = sys.modules.get("django.db")
    if module is None:
        raise InvalidArgumentError(
            f"a text is the alias of a Django connection, and Django is not set up in this process; pass {instead}",
            found=alias.partition("://")[0],  # no passwords
        )
    try:
        return module.connections[alias]
    except Exception as error:
        raise InvalidArgumentError(f"Django has no connection of this alias; pass {instead}", alias=alias) from error
