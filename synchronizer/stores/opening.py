"""Opens a store by its address. A backend's driver is imported only when its scheme is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from ..arguments import check_type
from ..clock import Clock, check_clock
from ..error_translation import translate_unexpected
from ..errors import InvalidArgumentError, ReaderGroupError, UnsupportedError
from ..extras import install_hint
from ..store import SegmentStore
from ..threads.loading import loading

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_EXAMPLES: Final = (
    "'sqlite:///shop.db', 'sqlite:////var/lib/shop.db', 'postgresql://user@host/db', 'nats://host:4222', 'memory://' "
    "or 'memory://shop'"
)
#: Other distributions add stores under this name: the entry's name is the scheme, its value a callable like `_Opener`.
ENTRY_POINT_GROUP: Final = "readergroup.stores"

_Opener = Callable[..., SegmentStore]  # (url, *, clock, must_exist)


def open_store(url: str, *, clock: Clock | None = None, must_exist: bool = False) -> SegmentStore:
    """Open the store at ``url``; close it when done.

    - ``memory://`` is private to the returned store, ``memory://name`` is shared in this process while it runs.
    - ``sqlite:///shop.db`` is relative to the working directory, ``sqlite:////var/lib/shop.db`` is absolute. The file
      is created if it does not exist, its directory is not.
    - ``postgresql://user@host/db`` is an address as libpq takes it. See `PostgresStore` for the options after ``?``.
    - ``nats://host:4222`` is one or several servers with JetStream. See `NatsStore`.
    - Other schemes come from distributions that add a store.

    Args:
        url: The address.
        clock: The system clock by default.
        must_exist: Create nothing, and raise `NotFoundError` if the store does not exist.

    Raises:
        InvalidArgumentError: ``url`` is not the address of a store.
        UnsupportedError: The scheme is unknown, or its driver is not installed.
        NotFoundError: With ``must_exist``, the store does not exist.
    """
    check_type(url, str, "url")
    check_clock(clock)
    scheme, separator, _ = url.partition("://")
    if not separator:
        # The error does not show it: it may contain a password, as 'host=db password=...' does.
        raise InvalidArgumentError(f"this is not the address of a store; write {_EXAMPLES}")
    opener = _BUILT_IN.get(scheme) or _added_by_another_distribution(scheme)
    try:
        return opener(url, clock=clock, must_exist=must_exist)
    except ReaderGroupError:
        raise
    except Exception as error:
        raise translate_unexpected(error, f"{scheme}://") from error


def _open_memory(url: str, *, clock: Clock | None, must_exist: bool) -> SegmentStore:
    with loading():
        from .memory import MemoryStore, named_memory

    name = _rest(url)
    _refuse_query(name)
    return MemoryStore(named_memory(name) if name else None, url=url, clock=clock)


def _open_sqlite(url: str, *, clock: Clock | None, must_exist: bool) -> SegmentStore:
    try:
        with loading():
            from .sqlite.store import SqliteStore
    except ImportError as error:
        raise UnsupportedError(
            "Python was built without SQLite; install a Python that includes it", driver="sqlite3"
        ) from error
    rest = _rest(url)
    _refuse_query(rest.rpartition("/")[2])  # in the name of a directory, a question mark is one
    if not rest.startswith("/"):
        raise InvalidArgumentError(
            "the address of a SQLite file needs three slashes before a relative path, four before an absolute path",
            url=url,
        )
    if rest in ("/", "/:memory:"):
        raise InvalidArgumentError("a SQLite address needs a file; for a store in memory, use 'memory://'", url=url)
    return SqliteStore(rest[1:], clock=clock, must_exist=must_exist)


def _open_postgres(url: str, *, clock: Clock | None, must_exist: bool) -> SegmentStore:
    try:
        with loading():
            from .postgres.store import PostgresStore
    except ImportError as error:
        raise _driver_is_missing("psycopg", "postgres") from error
    return PostgresStore(url, clock=clock, must_exist=must_exist)


def _open_nats(url: str, *, clock: Clock | None, must_exist: bool) -> SegmentStore:
    try:
        with loading():
            from .nats.store import NatsStore
    except ImportError as error:
        raise _driver_is_missing("nats-py", "nats") from error
    return NatsStore(url, clock=clock, must_exist=must_exist)


_BUILT_IN: Final[Mapping[str, _Opener]] = {
    "memory": _open_memory,
    "sqlite": _open_sqlite,
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
    "nats": _open_nats,
}


def _added_by_another_distribution(scheme: str) -> _Opener:
    with loading():
        from importlib.metadata import entry_points

    added = entry_points(group=ENTRY_POINT_GROUP)
    # The rest of the address may contain a password: no message shows it.
    if scheme not in added.names:
        name, plus, driver = scheme.partition("+")
        if plus and name in _BUILT_IN:  # as SQLAlchemy writes it
            raise InvalidArgumentError(f"the address must not name a driver; remove '+{driver}'", scheme=scheme)
        raise UnsupportedError(
            f"the scheme of the address is unknown; write {_EXAMPLES}, or install the distribution that adds it",
            scheme=scheme,
            added=sorted(added.names),
        )
    entry, *others = added.select(name=scheme)
    if others:
        raise UnsupportedError(
            "several distributions add this scheme; uninstall all but one",
            scheme=scheme,
            distributions=sorted(_distribution(each) for each in (entry, *others)),
        )
    try:
        opener: _Opener = entry.load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            "the distribution that adds this scheme cannot be loaded; install its requirements",
            scheme=scheme,
            distribution=_distribution(entry),
            entry_point=entry.value,
            error=str(error),
        ) from error
    return opener


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""


def _driver_is_missing(driver: str, extra: str) -> UnsupportedError:
    return UnsupportedError(
        f"the driver of this store is not installed; {install_hint(extra)}", driver=driver, extra=extra
    )


def _rest(url: str) -> str:
    return url.partition("://")[2]


def _refuse_query(rest: str) -> None:
    _, mark, query = rest.partition("?")
    if mark:
        raise InvalidArgumentError("the address has options that this store does not know; remove them", query=query)
