"""Connections to a PostgreSQL server: address parsing, connection settings, the pool, and error translation."""

from __future__ import annotations

import inspect
import itertools
import re
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import generators, pq
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result
from psycopg.pq.abc import PGresult

from synchronizer.call_limits import call_limit
from synchronizer.clock import Deadline, SystemClock
from synchronizer.error_translation import translate_unexpected
from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
)
from synchronizer.threads.background import survive
from synchronizer.threads.flag import Flag

from ..forking import own

T = TypeVar("T")
#: The values that `Connection.plain_rows` can send.
Plain = str | bytes | int | bool | None

_DEFAULT_SCHEMA: Final = "readergroup"
_SCHEMA_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
#: Settings of libpq unless the address overrides them: give up on a host that does not answer.
_LIBPQ_DEFAULTS: Final = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "client_encoding": "utf8",
    "fallback_application_name": "readergroup",
}
_SECRETS: Final = frozenset({"password", "sslpassword", "oauth_client_secret"})
_TOO_MANY_CONNECTIONS: Final = (
    "the server has no free connection; raise its max_connections or the limit of the role, lower pool_size, or use a "
    "connection pooler"
)
_MISSING_RIGHT: Final = "the role of the address lacks a right; grant it as described in docs/operations.md"
#: What servers and PgBouncer say when they refuse a connection. libpq passes on no code, and other languages no words.
_REFUSALS: Final[Sequence[tuple[re.Pattern[str], type[StoreUnavailableError], str]]] = (
    (
        re.compile("too many (clients|connections)|connection slots are reserved|no more connections allowed"),
        StoreUnavailableError,
        _TOO_MANY_CONNECTIONS,
    ),
    (re.compile("permission denied for database"), StorePermissionError, _MISSING_RIGHT),
)
#: The client waits this much longer than the server's timeout before it cuts the connection.
_GRACE_SECONDS: Final = 5.0
_MAX_IDLE_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.25
_BOOLEANS: Final = (b"\0", b"\1")
_BIGINT: Final = struct.Struct("!q")
# These waits are for a server, which a test's clock cannot move.
_CLOCK: Final = SystemClock()


class Address(NamedTuple):
    """A parsed address. ``conninfo`` may hold a password, ``url`` does not."""

    url: str
    conninfo: tuple[tuple[str, str], ...]
    schema: str = _DEFAULT_SCHEMA
    pooler: str = "session"
    pool_size: int = 8
    statement_timeout: float = 15.0

    @property
    def has_sessions(self) -> bool:
        """Whether a connection is one session of the server, from the first statement to the last."""
        return self.pooler == "session"


_OWN_OPTIONS: Final = ("schema", "pooler", "pool_size", "statement_timeout")


def parse_address(url: str) -> Address:
    """Parse ``postgresql://user:password@host:port/database?schema=...``. Options of libpq are passed on."""
    _, _, rest = url.partition("://")
    location, _, query = rest.partition("?")
    if "@" in location.partition("@")[2] or "@" in query.partition("=")[0]:
        # libpq would take part of the password for a host or an option, and name it in errors.
        raise InvalidArgumentError("the address has more than one @; write special characters of a password as %xx")
    options = dict(parse_qsl(query, keep_blank_values=True))
    own: dict[str, str] = {name: options.pop(name) for name in _OWN_OPTIONS if name in options}
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()} | {"ssl"}
    unknown = sorted(options.keys() - known)
    if unknown and "@" in query and "@" not in location:
        raise InvalidArgumentError("the address has its @ after a ?; write special characters of a password as %xx")
    if unknown:
        raise InvalidArgumentError(
            "the address has options that neither this store nor libpq knows; correct them",
            unknown=unknown,
            known=sorted({*_OWN_OPTIONS, *known} - _SECRETS),
        )
    try:
        for_libpq = f"postgresql://{location}?{urlencode(options, quote_via=quote)}"
        conninfo = {**_LIBPQ_DEFAULTS, **{name: str(value) for name, value in conninfo_to_dict(for_libpq).items()}}
    except psycopg.Error:
        # The message of libpq may quote part of the password.
        raise InvalidArgumentError(
            "libpq cannot read the address; write special characters of a password as %xx", url=_shown(location, query)
        ) from None
    return Address(_shown(location, query), tuple(sorted(conninfo.items())), **_checked(own))


def _shown(location: str, query: str) -> str:
    """Return the address without secrets."""
    credentials, at, place = location.rpartition("@")
    user = credentials.partition(":")[0]
    public = [pair for pair in query.split("&") if pair and pair.partition("=")[0] not in _SECRETS]
    return f"postgresql://{user}{at}{place}" + ("?" + "&".join(public) if public else "")


def _checked(own: Mapping[str, str]) -> dict[str, Any]:
    checked: dict[str, Any] = dict(own)
    if not _SCHEMA_NAME.fullmatch(own.get("schema", _DEFAULT_SCHEMA)):
        raise InvalidArgumentError(
            "the name of a schema must begin with a letter, consist of letters, digits, _ and -, and have at "
            "most 63 characters",
            schema=own["schema"],
        )
    if own.get("pooler", "session") not in ("session", "transaction"):
        raise InvalidArgumentError("pooler must be 'session' or 'transaction'", pooler=own["pooler"])
    for name, kind, least in (("pool_size", int, 1), ("statement_timeout", float, 0.001)):
        if name in own:
            try:
                checked[name] = kind(own[name])
            except ValueError:
                checked[name] = 0
            if not least <= checked[name] < 1e6:
                raise InvalidArgumentError(f"{name} must be a number >= {least}", **{name: own[name]})
    return checked


def _has_parts_of_plain_rows() -> bool:
    """Return whether this release of psycopg has the internals that `Connection.plain_rows` uses."""
    try:
        return (
            list(inspect.signature(generators.execute).parameters) == ["pgconn"]
            and list(inspect.signature(psycopg.Connection._deallocate).parameters) == ["self", "name"]
            and list(inspect.signature(psycopg.Connection.wait).parameters)[:2] == ["self", "gen"]
            and all(callable(getattr(pq.PGconn, f"send_{name}")) for name in ("prepare", "query_params"))
            and callable(pq.PGconn.send_query_prepared)
            and all(callable(getattr(Transformer, name)) for name in ("set_pgresult", "load_rows"))
        )
    except (AttributeError, TypeError, ValueError):
        return False


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection with a timeout on every call, also when the server stops without closing it."""

    #: If False, `plain_rows` uses the documented API, which is slower.
    has_plain_rows: ClassVar[bool] = _has_parts_of_plain_rows()
    call_timeout: float = 0.0
    #: Whether the current call may take its time, whatever deadline its caller has.
    takes_long: bool = False
    idle_since: float = 0.0
    #: The session's ``lock_timeout``, as far as a fair lock has set it.
    lock_milliseconds: int = 0
    #: Whether the current call's statement went to the server, or may have.
    has_sent: bool = False
    _poll: select.poll | None = None
    _cursor: psycopg.Cursor[tuple[Any, ...]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain_names: dict[str, bytes] = {}  # of prepared statements, by statement
        # A name is never reused: after an interrupt the server may know a name that this object does not.
        self._numbers = itertools.count()
        if self.has_plain_rows:
            self._plain_reader = Transformer(self)

    def rows(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement, in the binary format. All calls share one cursor: creating one is slow."""
        if self._cursor is None:
            self._cursor = self.cursor(binary=True)
        self.has_sent = True
        rows = self._cursor.execute(statement, parameters).fetchall()
        if len(rows) > 1:
            self._cursor = None  # it would keep the rows until the next call
        return rows

    def plain_rows(self, statement: str, values: Iterable[Plain]) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement with the placeholders $1, $2 and so on; an integer is a bigint.

        It is much faster than `rows`: the driver spends its time on choosing types and statements by the values.
        """
        if not self.has_plain_rows:
            return self._documented_rows(statement, list(values))
        sent = [_binary(value) for value in values]
        formats = [pq.Format.BINARY] * len(sent)
        if self.prepare_threshold is None:
            self.has_sent = True
            self.pgconn.send_query_params(statement.encode(), sent, None, formats, pq.Format.BINARY)
        else:
            name = self._plain_name(statement)
            self.has_sent = True
            self.pgconn.send_query_prepared(name, sent, formats, pq.Format.BINARY)
        result = self._plain_result(pq.ExecStatus.TUPLES_OK)
        self._plain_reader.set_pgresult(result)
        return self._plain_reader.load_rows(0, result.ntuples, tuple)

    def _documented_rows(self, statement: str, values: Sequence[Plain]) -> Sequence[tuple[Any, ...]]:
        self.has_sent = True
        return psycopg.RawCursor(self).execute(statement.encode(), values, binary=True).fetchall()

    def _plain_name(self, statement: str) -> bytes:
        name = self._plain_names.get(statement)
        if name is None:
            name = b"readergroup_%d" % next(self._numbers)
            self.pgconn.send_prepare(name, statement.encode())
            self._plain_result(pq.ExecStatus.COMMAND_OK)
            self._plain_names[statement] = name
        return name

    def _deallocate(self, name: bytes | None) -> PQGen[None]:
        if name is None:  # psycopg drops all prepared statements, as after a rollback
            self._plain_names.clear()
        return super()._deallocate(name)

    def _plain_result(self, expected: pq.ExecStatus) -> PGresult:
        results: Sequence[PGresult] = self.wait(generators.execute(self.pgconn))
        for result in results:  # there is a second one if the statement succeeded and its commit failed
            if result.status != expected:
                raise error_from_result(result)
        if len(results) != 1:
            raise psycopg.InternalError(f"the server returned {len(results)} results for one statement")
        return results[0]

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        if not self.call_timeout:
            return super().wait(gen, *args, **kwargs)
        timeout = self.call_timeout if self.takes_long else call_limit.seconds(self.call_timeout)
        return super().wait(_bounded(gen, Deadline(_CLOCK, timeout)), *args, **kwargs)

    def in_transaction(self, work: Callable[[], T], *settings: str) -> T:
        """Return the result of ``work``, run in one transaction with these settings.

        The driver's `transaction` loses count of its nesting after an interrupt, which makes the connection unusable.
        """
        try:
            self.execute("; ".join(("BEGIN", *(f"SET LOCAL {each}" for each in settings))), prepare=False)
            result = work()
            self.execute("COMMIT", prepare=False)
            return result
        except Exception:
            with suppress(psycopg.Error):
                self.execute("ROLLBACK", prepare=False)
            raise

    def release_exclusive_locks(self) -> None:
        """Release the exclusive advisory locks of the session, after a statement that waited for one and timed out.

        If the server grants such a lock just as the ``lock_timeout`` passes, the statement fails and the session keeps
        the lock. Locks of a transaction end with it, and cannot be kept in this way.
        """
        self.execute(_RELEASE_EXCLUSIVE_LOCKS)

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and in no transaction."""
        return self.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE

    @property
    def is_stale(self) -> bool:
        """Whether the server has sent data since the last call: most likely it has closed the session."""
        try:
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self.pgconn.socket, select.POLLIN)
            return bool(self._poll.poll(0))
        except (psycopg.Error, OSError):  # the socket is closed
            return True


_RELEASE_EXCLUSIVE_LOCKS: Final = (
    "SELECT pg_advisory_unlock((classid::bigint << 32) | objid::bigint) FROM pg_locks WHERE locktype = 'advisory'"
    " AND objsubid = 1 AND mode = 'ExclusiveLock' AND granted AND pid = pg_backend_pid()"
)


def _binary(value: Plain) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return _BOOLEANS[value] if isinstance(value, bool) else _BIGINT.pack(value)


def _bounded(gen: PQGen[T], deadline: Deadline) -> PQGen[T]:
    """Do the same steps until the deadline. After it the connection is in the middle of a call, and unusable."""
    try:
        step = next(gen)
        while True:
            ready = yield step
            if not ready and deadline.passed:
                raise psycopg.OperationalError("the server did not answer in time")
            step = gen.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Loan:
    """One thread's loan of a connection of the pool, and its place in the queue for one.

    An interrupt may come at any point of a Python function, also at its start. So ``end`` is a call in C: once it was
    called, the connection is idle and the place free. Calling it again changes nothing.
    """

    __slots__ = ("end", "has_place")

    def __init__(self, loans: dict[Loan, Connection | None], idle: deque[Connection]) -> None:
        self.has_place: Flag | None = None  # of a loan that had to wait for its place
        self.end: Final = partial(idle.extend, filter(None, map(loans.pop, (self,), (None,))))


class Connections:
    """A pool of connections that the threads of one store share. One thread at a time uses a connection.

    `psycopg_pool` reconnects after an outage only when its backoff is over, checks dead connections with a backoff as
    well, and does not report the reason. Here a call tries at once and reports why it failed. This pool needs no
    threads either.
    """

    def __init__(self, address: Address, *, places: int | None = None, most_idle: int | None = None) -> None:
        """Create a pool of at most ``places`` loans (default: the address's) and ``most_idle`` idle connections."""
        self.address = address
        self._places = address.pool_size if places is None else places
        self._most_idle = self._places if most_idle is None else most_idle
        self._idle: deque[Connection] = deque()
        self._closed = False
        #: The connection of each loan, once it has one. In order of arrival: the first loans have the places.
        self._loans: dict[Loan, Connection | None] = {}

    def call(self, work: Callable[[Connection], T]) -> T:
        """Call ``work`` with a connection outside any transaction, and return its result."""
        loan = self.loan()
        try:
            return work(self.take(loan))
        finally:
            try:
                self.look_at(loan)
            finally:
                loan.end()
                self.go_on()

    def loan(self) -> Loan:
        """Return a loan for one connection: `take` it, then in any case `look_at` it, `end` the loan, and `go_on`."""
        return Loan(self._loans, self._idle)

    def take(self, loan: Loan) -> Connection:
        """Return a connection outside any transaction. Call it in the ``try`` whose ``finally`` ends the loan."""
        self._loans[loan] = None
        if len(self._loans) > self._places:
            self._wait_for_place(loan)
        with suppress(IndexError):  # none is idle
            while True:
                # One call in C from the deque to the dictionary, so that no interrupt in between loses a connection.
                self._loans.update(zip((loan,), iter(self._idle.pop, None), strict=False))
                connection = self._loans[loan]
                assert connection is not None
                if connection.is_idle and not connection.is_stale:
                    connection.has_sent = False
                    return connection
                connection.close()
        connection = self._loans[loan] = self.connect()
        return connection

    def look_at(self, loan: Loan) -> None:
        """Close the connection if it cannot be reused. Never raises, because the call already has its result."""
        try:
            connection = self._loans.get(loan)
            if connection is None:
                return
            if self._closed or not connection.is_idle or len(self._idle) >= self._most_idle:
                connection.close()
                self._loans[loan] = None
            else:
                connection.idle_since = _CLOCK.monotonic()
                self._close_unused(connection.idle_since)
        except Exception as error:
            survive(error, f"the connections to {self.address.url}")

    def _wait_for_place(self, loan: Loan) -> None:
        deadline = Deadline(_CLOCK, call_limit.seconds(self.address.statement_timeout + _GRACE_SECONDS))
        loan.has_place = Flag()
        while not self._has_place(loan):
            if deadline.passed:
                raise StoreUnavailableError(
                    "all connections of this store are in use; raise 'pool_size' in the address, unless the server "
                    "does not answer",
                    url=self.address.url,
                    pool_size=self.address.pool_size,
                )
            # Poll: a thread interrupted right after the end of its loan has woken no other.
            _CLOCK.wait(loan.has_place, deadline.remaining(_LOOK_SECONDS))

    def _has_place(self, loan: Loan) -> bool:
        return loan in islice(self._loans, self._places)

    def go_on(self) -> None:
        """Wake the loans that got a place because another ended. After `close`, close the returned connection."""
        if len(self._loans) >= self._places:
            for loan in list(islice(self._loans, self._places)):
                if loan.has_place is not None:
                    loan.has_place.set()
        if self._closed:
            self.close()

    def connect(self) -> Connection:
        """Return a new connection with its session settings."""
        options = dict(self.address.conninfo)
        try:
            connection = Connection.connect(**options, autocommit=True, prepare_threshold=None)  # type: ignore[arg-type]
        except (psycopg.Error, OSError) as error:
            raise _not_connected(error, self.address.url) from None
        except Exception as error:
            raise translate_unexpected(error, self.address.url) from error
        try:
            own(connection)
            connection.call_timeout = self.address.statement_timeout + _GRACE_SECONDS
            if self.address.has_sessions:
                connection.execute("; ".join(self._settings()))
                connection.prepare_threshold = 0
        except BaseException as error:
            connection.close()
            if isinstance(error, Exception):
                raise translated(error, self.address.url) from error
            raise
        return connection

    def close(self) -> None:
        self._closed = True
        for connection in list(self._idle):
            connection.close()  # it is still in the list: after an interrupt, the next `close` finds it
            with suppress(ValueError):  # a call has taken it, and will see that it is closed
                self._idle.remove(connection)

    def _settings(self) -> Sequence[str]:
        milliseconds = max(1, int(self.address.statement_timeout * 1000))
        return (
            f"SET statement_timeout = {milliseconds}",
            f"SET lock_timeout = {milliseconds}",
            f"SET idle_in_transaction_session_timeout = {2 * milliseconds}",
            # Each statement of a function must see all earlier commits.
            "SET default_transaction_isolation = 'read committed'",
            # All statements are look-ups by key: replanning gains nothing.
            "SET plan_cache_mode = force_generic_plan",
            "SET enable_seqscan = off",
            "SET jit = off",
        )

    def _close_unused(self, now: float) -> None:
        with suppress(IndexError):
            if now - self._idle[0].idle_since > _MAX_IDLE_SECONDS:  # the first one has been idle the longest
                self._idle.popleft().close()


def failure(error: Exception, connection: Connection, url: str, *, is_append: bool) -> ReaderGroupError:
    """Return the error to raise for ``error``. Only here is decided whether the outcome of an append is known."""
    if is_append and not is_settled(connection, error):
        return unknown(error, url)
    return translated(error, url)


def is_settled(connection: Connection, error: Exception) -> bool:
    """Return whether the failed statement certainly had no effect.

    The server may end the session after the statement is complete: before, during or after its commit.
    """
    if not connection.has_sent:
        return True
    if connection.closed or not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return False
    is_end_of_session = error.diag.severity_nonlocalized in ("FATAL", "PANIC") or error.sqlstate.startswith("08")
    return not is_end_of_session and error.sqlstate != "40003"


def _not_connected(error: Exception, url: str) -> StoreUnavailableError:
    """Return the error to raise for a connection that could not be opened."""
    text = _text(error)
    for words, kind, message in _REFUSALS:
        if words.search(text):
            return kind(message, url=url, postgres=text)
    return StoreUnavailableError(
        "the server is unreachable or refused the connection; check the address and the server",
        url=url,
        postgres=text,
    )


def unknown(error: Exception, url: str) -> OutcomeUnknownError:
    unknown = OutcomeUnknownError(
        "the connection was lost before the answer; repeat the call to see whether the write is stored",
        url=url,
        postgres=_text(error),
    )
    unknown.__cause__ = error
    return unknown


def translated(error: Exception, url: str) -> ReaderGroupError:
    """Return the error to raise for an error of the driver. All such errors are classified here."""
    if isinstance(error, ReaderGroupError):
        return error
    if not isinstance(error, psycopg.Error):
        return translate_unexpected(error, url)
    facts = {"url": url, "postgres": _text(error)}
    code = error.sqlstate or ""
    kind: type[ReaderGroupError] = StoreUnavailableError
    match code[:2], code:
        case "53", "53100":
            kind, message = StoreFullError, "the disk of the server is full and nothing was written; free some space"
        case "53", "53300":
            message = _TOO_MANY_CONNECTIONS
        case "25", "25006":
            message = "the server is read-only; add target_session_attrs=read-write and all hosts to the address"
        case "42", "42501":
            kind, message = StorePermissionError, _MISSING_RIGHT
            facts["postgres"] = f"{code}: {error.diag.message_primary}"  # without the statement, which may be a page
        case "42" | "3F", _:
            kind, message = (
                CorruptStoreError,
                "the schema is not a store of this SDK, or is damaged; name another schema",
            )
        case "XX", "XX001" | "XX002":
            kind, message = CorruptStoreError, "the database is damaged; restore it from a backup"
        case "54", _:
            kind, message = InvalidArgumentError, "the data is too large for the server"
        case "57" | "55", "57014" | "55P03":
            message = "the server did not finish the statement in time, and nothing was written"
        case _:
            message = "the server cannot be used now; try again"
    translated = kind(message, **facts)
    translated.__cause__ = error
    return translated


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    code = getattr(error, "sqlstate", None)
    return f"{code}: {text}" if code else text
