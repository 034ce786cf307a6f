"""From an address to a store. A backend's driver is imported only when its scheme is asked for."""

from __future__ import annotations

import os

from ..clock import Clock
from ..errors import InvalidArgumentError, NotFoundError, UnsupportedError
from ..store import SegmentStore

_EXAMPLES = "'sqlite:///shop.db', 'sqlite:////var/lib/shop.db', 'memory://' or 'memory://shop'"


def open_store(url: str, *, clock: Clock | None = None, must_exist: bool = False) -> SegmentStore:
    """The store at ``url``; close it when done.

    ``memory://`` is private to the store that is returned, ``memory://name`` shared in this process for as long as
    it runs. ``sqlite:///shop.db`` is relative to the working directory, ``sqlite:////var/lib/shop.db`` absolute; the
    file is created if it does not exist, its directory is not. With ``must_exist`` nothing is created: a file that is
    not there raises `NotFoundError`.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidArgumentError(f"not an address of a store; write {_EXAMPLES}", url=url)
    if scheme == "memory":
        return _open_memory(url, rest, clock)
    if scheme == "sqlite":
        return _open_sqlite(rest, clock, must_exist)
    # What follows the scheme may hold a password.
    raise UnsupportedError(f"the address has an unknown scheme; write {_EXAMPLES}", scheme=scheme)


def _open_memory(url: str, name: str, clock: Clock | None) -> SegmentStore:
    from .memory import MemoryStore, named_memory

    _refuse_query(name)
    return MemoryStore(named_memory(name) if name else None, url=url, clock=clock)


def _open_sqlite(rest: str, clock: Clock | None, must_exist: bool) -> SegmentStore:
    try:
        from .sqlite import SqliteStore
    except ImportError as error:
        raise UnsupportedError(
            "the driver of this store is missing: take a Python that was built with SQLite", driver="sqlite3"
        ) from error
    _refuse_query(rest)
    if not rest.startswith("/"):
        raise InvalidArgumentError(
            "the address of a SQLite file has three slashes before a relative path and four before an absolute one",
            url=f"sqlite://{rest}",
        )
    if rest in ("/", "/:memory:"):
        raise InvalidArgumentError(
            "SQLite needs a file here; for a store in memory write 'memory://'", url=f"sqlite://{rest}"
        )
    path = rest[1:]
    if must_exist and not os.path.exists(path):
        raise NotFoundError("there is no SQLite file at this path; correct it", path=os.path.abspath(path))
    return SqliteStore(path, clock=clock)


def _refuse_query(rest: str) -> None:
    _, mark, query = rest.partition("?")
    if mark:
        raise InvalidArgumentError("the address has options that this store does not know; leave them out", query=query)
