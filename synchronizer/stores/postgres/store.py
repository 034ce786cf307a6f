"""A store in a PostgreSQL database: for many machines, on a server that you already run.

The store lives in a schema of its own, which the first process to open it creates. Module `schema` describes the
tables and why an append is an insertion, module `listener` how processes wake each other.

Behind PgBouncer in transaction mode, write ``pooler=transaction`` into the address. All verbs work there, but features
that need a session do not: statements are not prepared, `wait` polls, and there is no fair lock.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain, takewhile
from typing import Any, Final, TypeVar

import psycopg

from synchronizer.clock import Clock, SystemClock
from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.loggers import get_logger
from synchronizer.store import (
    ANY,
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
    UnknownOutcome,
)

from .. import checks
from ..parts import in_parts
from ..waiting import Waiters, Watch
from . import schema as postgres_schema
from .connections import Connection, Connections, failure, parse_address, translated
from .listener import Listener, PollingWatch, acquire_listener, release_listener
from .moving import Outcome, move
from .schema import Names
from .vacuum import Vacuum

_logger = get_logger(__name__)
T = TypeVar("T")

#: Names are keys of an index, and the server limits the size of an index entry.
_MAX_NAME_BYTES: Final = 2600
#: One step frees at most this many chunks: 8 MB.
_FREE_CHUNKS: Final = 128
_NAMES_PER_PAGE: Final = 1000
#: The timeout of a copy, which may take much longer than other statements.
_COPY_SECONDS: Final = 600.0
_IDLE_LOCK_SESSIONS: Final = 2
_MAX_OFFSET: Final = 2**63 - 1
#: As a limit, more than any data; with an offset added, still no overflow.
_MAX_START_BYTES: Final = 2**62
_OLDEST_SERVER: Final = 130000


def _numbered(statement: str) -> str:
    """Return the statement with $1, $2, ... as placeholders, for `Connection.plain_rows`."""
    first, *rest = statement.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


_APPEND: Final = "SELECT * FROM {schema}.append(%s::text, %s::bytea, %s::text, %s::bigint, "
#: Up to this many attributes are sent one by one, and the server makes the arrays: a tenth of the driver's time.
_FEW_ATTRIBUTES: Final = 4
_SIDES: Final = ("text", "bytea", "boolean", "bytea")  # of an attribute: name, expected value, whether any will do, new
_APPENDS: Final = [_numbered(_APPEND + "NULL, NULL, NULL, NULL)")] + [
    _numbered(_APPEND + ", ".join(f"ARRAY[{', '.join(['%s'] * count)}]::{kind}[]" for kind in _SIDES) + ")")
    for count in range(1, _FEW_ATTRIBUTES + 1)
]
_APPEND_MANY: Final = _APPEND + ", ".join(f"%s::{kind}[]" for kind in _SIDES) + ")"
_APPEND_TOGETHER: Final = (
    "SELECT * FROM {schema}.append_together(%s::text[], %s::bytea[], %s::bigint[],"
    " %s::integer[], %s::text[], %s::bytea[], %s::boolean[], %s::bytea[])"
)
# The rows of a copy. They are inserted in one order, so that two copies of the same segments cannot deadlock.
_COPIES: Final = (
    "unnest(%(sources)s::text[], %(segments)s::text[], %(starts)s::bigint[], %(ends)s::bigint[]) WITH ORDINALITY"
    ' AS k (source, segment, first, "end", i)'
)
_SOURCES: Final = (
    "SELECT k.i, s.start_offset, {length} FROM " + _COPIES + " LEFT JOIN {schema}.segment s"
    ' ON s.name = k.source COLLATE "C" AND NOT s.deleted ORDER BY k.i'
)
_MAKE_SEGMENTS: Final = (
    "INSERT INTO {schema}.segment (name, start_offset, sealed) SELECT k.segment, k.first, true FROM "
    + _COPIES
    + " ORDER BY k.segment ON CONFLICT DO NOTHING RETURNING name"
)
_KNOWN: Final = "SELECT s.name, s.deleted FROM {schema}.segment s WHERE s.name = ANY(%(segments)s::text[])"
_COPY_CHUNKS: Final = (
    'INSERT INTO {schema}.chunk SELECT t.id, GREATEST(c.start_offset, k.first), LEAST(c.end_offset, k."end"),'
    " substr(c.data, (GREATEST(c.start_offset, k.first) - c.start_offset)::integer + 1,"
    ' (LEAST(c.end_offset, k."end") - GREATEST(c.start_offset, k.first))::integer)'
    " FROM " + _COPIES + ' JOIN {schema}.segment s ON s.name = k.source COLLATE "C"'
    ' JOIN {schema}.segment t ON t.name = k.segment COLLATE "C"'
    ' JOIN {schema}.chunk c ON c.segment = s.id AND c.start_offset < k."end" AND c.end_offset > k.first'
)
# Returns whether they were created. It inserts in one order, so that two calls with the same names cannot deadlock.
_CREATE_TOGETHER: Final = (
    "WITH n AS (SELECT * FROM unnest(%(segments)s::text[], %(data)s::bytea[], %(starts)s::bigint[])"
    " AS n (name, data, first)),"
    " known AS (SELECT FROM {schema}.segment s WHERE s.name = ANY(%(segments)s::text[])),"
    " made AS (INSERT INTO {schema}.segment (name, start_offset) SELECT n.name, n.first FROM n"
    ' WHERE NOT EXISTS (SELECT FROM known) ORDER BY n.name COLLATE "C" RETURNING id, name),'
    " filled AS (INSERT INTO {schema}.chunk SELECT made.id, n.first, n.first + octet_length(n.data), n.data FROM made"
    ' JOIN n ON n.name = made.name COLLATE "C" WHERE octet_length(n.data) > 0)'
    " SELECT NOT EXISTS (SELECT FROM known)"
)
_INFOS: Final = (
    "SELECT s.name, s.start_offset, {length}, s.sealed FROM {schema}.segment s"
    " WHERE s.name = ANY(%s::text[]) AND NOT s.deleted"
)
_INFO: Final = _INFOS.replace("ANY(%s::text[])", "%s")
_NAMES: Final = (
    "SELECT name FROM {schema}.segment WHERE name >= %s AND name > %s AND NOT deleted ORDER BY name LIMIT %s::integer"
)
# Returns at least one row if the segment exists. It reads one snapshot, so the chunks match the length.
_READ: Final = """
    WITH s AS MATERIALIZED (
        SELECT s.id, s.start_offset, {length} AS length,
            (SELECT b.start_offset FROM {schema}.chunk b WHERE b.segment = s.id AND b.start_offset <= %(offset)s::bigint
                ORDER BY b.start_offset DESC LIMIT 1) AS first
        FROM {schema}.segment s WHERE s.name = %(name)s AND NOT s.deleted)
    SELECT s.start_offset, s.length, c.start_offset, c.data
    FROM s LEFT JOIN {schema}.chunk c
        ON c.segment = s.id AND c.start_offset >= s.first AND c.start_offset < %(end)s::bigint
        AND s.start_offset <= %(offset)s::bigint AND s.length > %(offset)s::bigint
    ORDER BY c.start_offset
"""
# Rows without data are those of empty segments, and of those whose first chunk is cut: these have a length.
_READ_STARTS: Final = (
    "SELECT s.name, s.start_offset, {length}, c.start_offset, c.data FROM {schema}.segment s"
    " LEFT JOIN {schema}.chunk c ON c.segment = s.id AND c.start_offset >= s.start_offset"
    " AND c.start_offset < s.start_offset + %(limit)s::bigint"
    " WHERE s.name = ANY(%(segments)s::text[]) AND NOT s.deleted ORDER BY s.id, c.start_offset"
)
_ATTRIBUTES: Final = (
    "SELECT a.name, a.value FROM {schema}.segment s LEFT JOIN {schema}.attribute a"
    " ON a.segment = s.id AND a.name >= %(prefix)s AND starts_with(a.name, %(prefix)s)"
    " WHERE s.name = %(segment)s AND NOT s.deleted"
)
_ATTRIBUTES_NAMED: Final = (
    "SELECT a.name, a.value FROM {schema}.segment s LEFT JOIN {schema}.attribute a"
    " ON a.segment = s.id AND a.name = ANY(%(names)s::text[])"
    " WHERE s.name = %(segment)s AND NOT s.deleted"
)
_CHANGED: Final = (
    "SELECT s.name, {length}, s.sealed OR s.deleted FROM {schema}.segment s WHERE s.name = ANY(%s::text[])"
)
# Without to_regclass, which may have cached that the table does not exist.
_INSPECT: Final = """
    SELECT current_setting('server_version_num'), current_setting('server_encoding'),
        current_setting('default_transaction_isolation'), current_setting('transaction_read_only')::boolean,
        current_setting('fsync')::boolean AND current_setting('full_page_writes')::boolean
            AND current_setting('synchronous_commit') <> 'off',
        EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = {channel} AND c.relname = 'store')
"""
# The old start of the segment comes from the snapshot of the statement, which the function in it does not change.
_TRUNCATE: Final = (
    "SELECT t.id, t.length, s.start_offset FROM {schema}.truncate_segment(%s::text, %s::bigint) t"
    " LEFT JOIN {schema}.segment s ON s.id = t.id"
)
_TO_FREE: Final = "SELECT s.id, {length} - s.start_offset FROM {schema}.segment s WHERE deleted AND NOT freed LIMIT 100"
# Returns whether the deleted segment is gone; else more chunks are left. No process appends to it any more.
_FORGET: Final = """
    WITH s AS (SELECT id FROM {schema}.segment WHERE name = %(segment)s AND deleted),
        c AS (DELETE FROM {schema}.chunk WHERE ctid = ANY (ARRAY(
            SELECT c.ctid FROM {schema}.chunk c JOIN s ON s.id = c.segment LIMIT %(limit)s::integer)) RETURNING 1),
        g AS (DELETE FROM {schema}.segment WHERE id = (SELECT id FROM s)
            AND (SELECT count(*) FROM c) < %(limit)s::integer RETURNING 1)
    SELECT EXISTS (SELECT FROM g) OR NOT EXISTS (SELECT FROM s)
"""
# No process appends to the segment while its lock is held. What is read after it is what the last holder left.
_LOCK: Final = "SELECT pg_advisory_xact_lock({lock_key}) FROM (SELECT %(segment)s::text AS p_name) AS n"
_FORGET_AT: Final = """
    WITH s AS (SELECT s.id, s.name FROM {schema}.segment s
            WHERE s.name = %(segment)s AND NOT s.deleted AND {length} = %(offset)s::bigint),
        a AS (DELETE FROM {schema}.attribute WHERE segment = (SELECT id FROM s)),
        c AS (DELETE FROM {schema}.chunk WHERE segment = (SELECT id FROM s)),
        g AS (DELETE FROM {schema}.segment WHERE id = (SELECT id FROM s))
    SELECT {schema}.announce(s.name) FROM s
"""


class PostgresStore(SegmentStore):
    """Segments in a schema of a PostgreSQL database. Durable if the server is: see ``guarantees``.

    Names of more than 2600 bytes in UTF-8 are refused.

    Args:
        url: An address of libpq (``postgresql://…``) with all its options, such as those for TLS, and four more:
            ``schema`` (default ``readergroup``) separates stores in one database and is created if missing;
            ``pool_size`` (8) limits the connections, and waiting and each fair lock take one more;
            ``statement_timeout`` (15 seconds) limits each statement; ``pooler=transaction`` is for PgBouncer.
        clock: The clock for waits.
        must_exist: Create nothing, and raise `NotFoundError` if the schema holds no store.

    Raises:
        InvalidArgumentError: The address is wrong.
        StoreUnavailableError: The server cannot be reached, refuses the connection, or is read-only.
        StorePermissionError: The role of the address lacks a right.
        UnsupportedError: The server is older than PostgreSQL 13, a setting of it does not fit, or a newer release
            wrote the store.
        CorruptStoreError: The schema is not a store of this SDK, or is damaged.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, must_exist: bool = False) -> None:
        address = parse_address(url)
        self.url = address.url
        self._address = address
        self._names = Names(address.schema)
        self._clock = clock or SystemClock()
        self._process_id = os.getpid()
        self._closed = False
        self._statements: dict[str, str] = {}
        self._connections = Connections(address)
        try:
            is_durable = self._prepare(must_exist)
        except BaseException:
            self._connections.close()
            raise
        self.guarantees = Guarantees(
            durable=is_durable,
            linearizable_append=True,
            linearizable_read=True,
            push=address.has_sessions,
            many_processes=True,
            many_hosts=True,
            atomic_multi_append=True,
            atomic_multi_create=True,
            server_side_copy=True,
            fair_lock=address.has_sessions,
        )
        # Separate from the pool: the holder of a lock needs a connection of the pool while it holds it.
        self._lock_connections = Connections(address, places=sys.maxsize, most_idle=_IDLE_LOCK_SESSIONS)
        self._vacuum = Vacuum(partial(self._with_connection, is_append=False), self._filled, self._clock)
        self._listener: Listener | None = None
        self._waiters = Waiters(self._open_watch, self._changed, self._clock, expect=self._expect)

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        checks.check_create(segment, start_offset)
        if start_offset:
            return self.create_together({segment: b""}, start_offsets={segment: start_offset})
        _check_name(segment)
        ((outcome,),) = self._call("SELECT {schema}.create_segment(%s::text)", (segment,))
        if outcome == "deleted":
            raise checks.name_is_used_up(segment)
        return bool(outcome == "created")

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        starts = checks.check_create_together(segments, start_offsets)
        for name in segments:
            _check_name(name)
        parameters = {
            "segments": list(segments),
            "data": list(segments.values()),
            "starts": [starts[name] for name in segments],
        }

        def work(connection: Connection) -> bool | None:
            with suppress(psycopg.errors.UniqueViolation):  # another process creates one of them at this moment
                ((is_created,),) = connection.rows(self._filled(_CREATE_TOGETHER), parameters)
                if is_created:
                    return True
            known = dict(connection.rows(self._filled(_KNOWN), parameters))
            return None if checks.all_are_new(known) else False

        while (created := self._with_connection(work, is_append=False)) is None:
            pass  # the one that existed was forgotten meanwhile
        return created

    def delete(self, segment: str) -> None:
        checks.check_name(segment)
        ((is_known,),) = self._call("SELECT {schema}.delete_segment(%s::text)", (segment,))
        if not is_known:
            raise checks.not_found(segment)
        for segment_id, size in self._call(_TO_FREE, ()):
            self._free(segment_id, size)

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        checks.check_forget(segment, expected_offset)
        if expected_offset is not None:
            self._with_connection(partial(self._forget_at, segment, expected_offset), is_append=False)
            return
        ((is_known,),) = self._call("SELECT {schema}.delete_segment(%s::text)", (segment,))
        while is_known and not self._call(_FORGET, {"segment": segment, "limit": _FREE_CHUNKS})[0][0]:
            pass

    def _forget_at(self, segment: str, offset: int, connection: Connection) -> None:
        def work() -> None:
            connection.rows(self._filled(_LOCK), {"segment": segment})
            connection.rows(self._filled(_FORGET_AT), {"segment": segment, "offset": offset})

        connection.in_transaction(work)

    def info(self, segment: str) -> SegmentInfo:
        checks.check_name(segment)
        rows = self._call(_INFO, (segment,))
        if not rows:
            raise checks.not_found(segment)
        return SegmentInfo(*rows[0])

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        checks.check_infos(segments)
        return {name: SegmentInfo(name, *facts) for name, *facts in self._call(_INFOS, (list(segments),))}

    def list(self, prefix: str = "") -> Iterator[str]:
        checks.check_prefix(prefix)
        self._check_open()
        return self._names_from(prefix)

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        checks.check_append(segment, data, expected_offset, attributes)
        return self._append(segment, data, None, expected_offset, attributes or {})

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        checks.check_appends(appends)
        self._check_open()
        if not appends:
            return ()
        names = [sorted(part.attributes) for part in appends]
        columns = [_columns(own, part.attributes) for own, part in zip(names, appends, strict=True) if own]
        parameters = (
            [part.segment for part in appends],
            [part.data for part in appends],
            [_bounded(part.expected_offset) for part in appends],
            [number for number, own in enumerate(names, 1) for _ in own],
            *([value for column in columns for value in column[side]] for side in range(4)),
        )
        try:
            rows = self._call(_APPEND_TOGETHER, parameters, is_append=True)
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)
        numbers = {part.segment: number for number, part in enumerate(appends)}
        answers: dict[str, Appended | Conflict] = {}
        for name, outcome, length, delta, present in rows:
            number = numbers[name]
            answers[name] = _answer(name, outcome, length, len(appends[number].data), delta, names[number], present)
        conflicts = {name: answer for name, answer in answers.items() if isinstance(answer, Conflict)}
        return conflicts or tuple(answer for answer in answers.values() if isinstance(answer, Appended))

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        checks.check_concat(segment, source, expected_offset, attributes)
        return self._append(segment, b"", source, expected_offset, attributes or {})

    def concat_unread(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        checks.check_concat(segment, source, expected_offset, attributes)
        changes = attributes or {}
        names = sorted(changes)
        values = _columns(names, changes) if names else (None,) * len(_SIDES)
        parameters = (segment, b"", None, _bounded(expected_offset), *values)

        def work(connection: Connection) -> Outcome | None:
            def append_nothing() -> Outcome:
                (row,) = connection.rows(self._filled(_APPEND_MANY), parameters)
                return row

            return connection.in_transaction(partial(move, connection, self._filled, segment, source, append_nothing))

        try:
            moved = self._with_connection(work, is_append=True)
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)
        if moved is None:
            return self.concat(segment, source, expected_offset=expected_offset, attributes=attributes)
        outcome, length, size, delta, present = moved
        return _answer(segment, outcome, length, size, delta, names, present)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        checks.check_copies(copies)
        for each in copies:
            _check_name(each.segment)
        self._check_open()
        return self._connections.call(partial(self._copy_in_time, copies))

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        checks.check_read_call(segment, offset, max_bytes)
        end = min(offset + max(max_bytes, 1), _MAX_OFFSET)
        rows = self._call(_READ, {"name": segment, "offset": min(offset, _MAX_OFFSET), "end": end})
        if not rows:
            raise checks.not_found(segment)
        start_offset, length, *_ = rows[0]
        checks.check_read(segment, offset, max_bytes, start_offset, length)
        return _cut(segment, [row[2:] for row in rows], offset, min(end, length))

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        checks.check_read_starts(segments, max_bytes)
        found: dict[str, SegmentStart] = {}
        for part in in_parts(segments, _NAMES_PER_PAGE):
            rows = self._call(_READ_STARTS, {"segments": part, "limit": min(max_bytes, _MAX_START_BYTES)})
            for name, start, length, first, data in rows:
                before = found.get(name, SegmentStart(start, b""))
                if start + len(before.data) == (length if first is None else first):  # else the first chunk is cut
                    found[name] = SegmentStart(start, before.data + (data or b""))
        return {name: SegmentStart(start, data[:max_bytes]) for name, (start, data) in found.items()}

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        checks.check_attributes(segment, prefix, names)
        if names is None:
            rows = self._call(_ATTRIBUTES, {"segment": segment, "prefix": prefix})
        else:
            wanted = [name for name in set(names) if name.startswith(prefix)]
            rows = self._call(_ATTRIBUTES_NAMED, {"segment": segment, "names": wanted})
        if not rows:
            raise checks.not_found(segment)
        return {name: value for name, value in rows if name is not None}

    def truncate(self, segment: str, offset: int) -> None:
        checks.check_truncate(segment, offset)
        bounded = max(-1, min(offset, _MAX_OFFSET))
        ((segment_id, length, start_offset),) = self._call(_TRUNCATE, (segment, bounded))
        if segment_id is None:
            raise checks.not_found(segment)
        checks.check_within(segment, offset, length)
        self._free(segment_id, max(0, offset - start_offset))

    def seal(self, segment: str) -> SegmentInfo:
        checks.check_name(segment)
        ((start_offset, length),) = self._call("SELECT * FROM {schema}.seal_segment(%s::text)", (segment,))
        if length is None:
            raise checks.not_found(segment)
        return SegmentInfo(segment, start_offset, length, sealed=True)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        checks.check_wait(known, timeout)
        self._check_open()
        return self._waiters.wait(known, timeout)

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        checks.check_fair_lock(segment, timeout, patience)
        self._check_open()
        if not self.guarantees.fair_lock:
            return super().fair_lock(segment, timeout, patience)
        limit = min(timeout, patience, self._address.statement_timeout)
        return _FairLock(self._lock_connections, self._filled, segment, limit)

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return
        self._closed = True  # if an interrupt comes after this, `close` can be called again
        self._waiters.close()
        release_listener(self._address, self)
        self._connections.close()
        self._lock_connections.close()

    # Statements

    def _call(
        self,
        statement: str,
        parameters: Sequence[Any] | Mapping[str, Any],
        *,
        is_append: bool = False,
        ask: Callable[[Connection, str, Any], Sequence[tuple[Any, ...]]] = Connection.rows,
        seconds: float | None = None,
    ) -> Sequence[tuple[Any, ...]]:
        """Return the rows of one statement: one round trip, and one transaction of its own.

        ``seconds`` replaces the statement timeout, at the cost of a few more round trips.
        """

        def work(connection: Connection) -> Sequence[tuple[Any, ...]]:
            if seconds is None:
                return ask(connection, self._filled(statement), parameters)
            return _longer(connection, seconds, lambda: ask(connection, self._filled(statement), parameters))

        return self._with_connection(work, is_append=is_append)

    def _with_connection(self, work: Callable[[Connection], T], *, is_append: bool) -> T:
        self._check_open()

        def call(connection: Connection) -> T:
            try:
                return work(connection)
            except ReaderGroupError:
                raise
            except Exception as error:
                failed = failure(error, connection, self.url, is_append=is_append)
                if isinstance(error, psycopg.errors.QueryCanceled):  # perhaps just as it had a lock of the session
                    connection.close()
                raise failed from error

        return self._connections.call(call)

    def _filled(self, statement: str) -> str:
        try:
            return self._statements[statement]
        except KeyError:
            filled = self._statements[statement] = self._names.fill(statement)
            return filled

    def _append(
        self,
        segment: str,
        data: bytes,
        source: str | None,
        expected_offset: int | None,
        changes: Mapping[str, AttributeChange],
    ) -> AppendResult:
        names = sorted(changes)
        columns = _columns(names, changes) if names else ()
        statement = _APPEND_MANY
        is_plain = len(names) <= _FEW_ATTRIBUTES
        if is_plain:
            statement, columns = _APPENDS[len(names)], tuple(chain.from_iterable(columns))
        try:
            ((outcome, length, size, delta, present),) = self._call(
                statement,
                (segment, data, source, _bounded(expected_offset), *columns),
                is_append=True,
                ask=Connection.plain_rows if is_plain else Connection.rows,
                seconds=_COPY_SECONDS if source else None,
            )
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)
        if source and outcome == _NO_SOURCE:
            raise checks.not_found(source)
        if source:
            checks.check_source(source, is_sealed=outcome != _SOURCE_NOT_SEALED)
        return _answer(segment, outcome, length, size, delta, names, present)

    def _copy_in_time(self, copies: Sequence[SegmentCopy], connection: Connection) -> bool:
        try:
            return _longer(connection, _COPY_SECONDS, lambda: self._copy(connection, copies))
        except ReaderGroupError:
            raise
        except Exception as error:
            raise translated(error, self.url) from error

    def _copy(self, connection: Connection, copies: Sequence[SegmentCopy]) -> bool:
        """Copy within a transaction. It needs no lock: bytes of a source never change, they can only be truncated."""
        parameters = {
            "sources": [each.source for each in copies],
            "segments": [each.segment for each in copies],
            "starts": [_bounded(each.start) for each in copies],
            "ends": [_bounded(each.end) for each in copies],
        }
        made = {name for (name,) in connection.execute(self._filled(_MAKE_SEGMENTS), parameters)}
        if len(made) < len(copies):
            known = dict(connection.execute(self._filled(_KNOWN), parameters).fetchall())
            return checks.are_new(copies, {name: known[name] for name in known.keys() - made})
        self._check_sources(connection, copies, parameters)
        connection.execute(self._filled(_COPY_CHUNKS), parameters)
        self._check_sources(
            connection, copies, parameters
        )  # truncated bytes may have been freed before they were copied
        return True

    def _check_sources(
        self, connection: Connection, copies: Sequence[SegmentCopy], parameters: Mapping[str, Any]
    ) -> None:
        rows = connection.execute(self._filled(_SOURCES), parameters).fetchall()
        for each, (_, start_offset, length) in zip(copies, rows, strict=True):
            if start_offset is None:
                raise checks.not_found(each.source)
            checks.check_copy(each, start_offset, length)

    def _free(self, segment_id: int, size: int) -> None:
        """Delete unused chunks, of about ``size`` bytes, in portions, so that no transaction is long."""
        try:
            while self._call("SELECT {schema}.free_chunks(%s::bigint, %s::integer)", (segment_id, _FREE_CHUNKS))[0][0]:
                pass
        except (StoreUnavailableError, StoreFullError):
            _logger.warning("space was not freed; the next truncation of the segment frees it", exc_info=True)
        else:
            self._vacuum.run_if_due(size)

    def _names_from(self, prefix: str) -> Iterator[str]:
        last = ""
        while True:
            rows = self._call(_NAMES, (prefix, last, _NAMES_PER_PAGE))
            names = list(takewhile(lambda name: name.startswith(prefix), (name for (name,) in rows)))
            yield from names
            if len(names) < _NAMES_PER_PAGE:
                return
            last = names[-1]

    # Waiting

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        rows = self._call(_CHANGED, (list(known),))
        if len(rows) < len(known):
            raise checks.not_found(min(known.keys() - {name for name, _, _ in rows}))
        return frozenset(name for name, length, is_over in rows if is_over or length != known[name])

    def _open_watch(self) -> Watch:
        if not self.guarantees.push:
            return PollingWatch()
        if self._listener is None:
            self._listener = acquire_listener(self._address, self)
        return self._listener.subscribe()

    def _expect(self, names: Collection[str]) -> None:
        if self._listener:
            self._listener.expect(names)

    # Opening

    def _prepare(self, must_exist: bool) -> bool:
        """Create or migrate the store if needed; return whether the server is durable."""
        return self._connections.call(partial(self._prepare_on, must_exist))

    def _prepare_on(self, must_exist: bool, connection: Connection) -> bool:
        try:
            is_store, is_durable = self._inspect(connection)
            if not is_store and must_exist:
                raise NotFoundError(
                    "there is no store in this schema; correct the address, or create a store there",
                    url=self.url,
                    schema=self._address.schema,
                )
            if not is_store or self._format(connection) < postgres_schema.FORMAT:
                connection.in_transaction(partial(self._create_or_migrate, connection))
            self._format(connection)
        except ReaderGroupError:
            raise
        except Exception as error:
            raise translated(error, self.url) from error
        return is_durable

    def _inspect(self, connection: Connection) -> tuple[bool, bool]:
        """Return whether the schema holds a store, and whether the server's commits survive a power loss."""
        row = connection.execute(self._names.fill(_INSPECT)).fetchone()
        assert row
        version, encoding, isolation, is_read_only, is_durable, is_store = row
        if int(version) < _OLDEST_SERVER:
            raise UnsupportedError("the server is too old; upgrade it to PostgreSQL 13 or newer", version=version)
        if encoding != "UTF8":
            raise UnsupportedError(
                "the encoding of the database is not UTF8; create another database", encoding=encoding
            )
        if isolation != "read committed":
            raise UnsupportedError(
                "behind a pooler, default_transaction_isolation of the role must be 'read committed'; alter the role",
                isolation=isolation,
            )
        if is_read_only:
            raise StoreUnavailableError(
                "the server is read-only; add target_session_attrs=read-write and all hosts to the address",
                url=self.url,
            )
        return is_store, is_durable

    def _format(self, connection: Connection) -> int:
        row = connection.execute(self._filled("SELECT format FROM {schema}.store")).fetchone()
        if row is None:
            raise CorruptStoreError(
                "the schema is not a store of this SDK; name another schema", schema=self._address.schema
            )
        if not 1 <= row[0] <= postgres_schema.FORMAT:
            raise UnsupportedError(
                "the store has a format that this release does not know; upgrade to the release that wrote it, or name "
                "another schema",
                url=self.url,
                format=row[0],
                known=postgres_schema.FORMAT,
            )
        return int(row[0])

    def _create_or_migrate(self, connection: Connection) -> None:
        """Create or migrate the store, in a transaction. One process at a time does it; the next one finds it done."""
        connection.execute(f"SELECT pg_advisory_xact_lock({self._names.creation_lock})")
        is_store, _ = self._inspect(connection)
        if is_store:
            connection.execute(self._names.migration(self._format(connection)), prepare=False)
            return
        query = "SELECT FROM pg_namespace WHERE nspname = {channel}"
        if not connection.execute(self._filled(query)).fetchall():
            connection.execute(f"CREATE SCHEMA {self._names.schema}")
        connection.execute(self._names.creation(), prepare=False)

    def _check_open(self) -> None:
        checks.check_open(self._process_id, self._closed, self.url)


_SEALED, _SOURCE_NOT_SEALED, _NO_SOURCE = 2, 4, 5


def _answer(
    segment: str,
    outcome: int,
    length: int,
    size: int,
    delta: bytes | None,
    names: Sequence[str],
    present: Sequence[bytes | None] | None,
) -> Appended | Conflict:
    if outcome == 0:
        return Appended(length - size, length)
    if outcome == 1:
        return Conflict(length, delta or b"", dict(zip(names, present or (), strict=True)))
    raise checks.sealed(segment, length) if outcome == _SEALED else checks.not_found(segment)


def _columns(names: Sequence[str], changes: Mapping[str, AttributeChange]) -> tuple[Any, ...]:
    """Return the attributes as the SQL functions take them: one array for each of `_SIDES`."""
    chosen = [changes[name] for name in names]
    return (
        names,
        [None if change.expected is ANY else change.expected for change in chosen],
        [change.expected is ANY for change in chosen],
        [change.new for change in chosen],
    )


def _bounded(offset: int | None) -> int | None:
    """Return the offset, limited to the largest bigint, which no segment reaches."""
    return None if offset is None else min(offset, _MAX_OFFSET)


def _cut(segment: str, chunks: Sequence[tuple[int, bytes]], offset: int, end: int) -> bytes:
    """Return the bytes from ``offset`` up to ``end`` out of the chunks that hold them."""
    if offset == end:
        return b""
    parts = [data for _, data in chunks if data is not None]
    if parts:
        surplus = chunks[-1][0] + len(parts[-1]) - end
        if surplus > 0:
            parts[-1] = parts[-1][:-surplus]
        parts[0] = parts[0][offset - chunks[0][0] :]
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != end - offset:
        raise CorruptStoreError(
            "bytes of a segment are missing; restore the database from a backup",
            segment=segment,
            offset=offset,
            expected=end - offset,
            found=len(data),
        )
    return data


def _check_name(segment: str) -> None:
    checks.check_name(segment)
    if len(segment) * 4 > _MAX_NAME_BYTES and len(segment.encode()) > _MAX_NAME_BYTES:
        raise InvalidArgumentError("the name is too long for an index of the server; shorten it", name=segment)


def _longer(connection: Connection, seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, run in a transaction whose statements may take ``seconds``."""
    usual, milliseconds = connection.call_timeout, int(seconds * 1000)
    try:
        connection.call_timeout, connection.takes_long = seconds + usual, True
        return connection.in_transaction(
            work,
            f"statement_timeout = {milliseconds}",
            f"lock_timeout = {milliseconds}",
            f"idle_in_transaction_session_timeout = {milliseconds}",
        )
    finally:
        connection.call_timeout, connection.takes_long = usual, False


class _FairLock(AbstractContextManager[bool]):
    """An advisory lock of a session on the server. It ends with the session.

    It may be exited twice, and before its entry is complete, so an interrupted thread always releases the lock.
    """

    def __init__(self, connections: Connections, filled: Callable[[str], str], segment: str, timeout: float) -> None:
        self._connections = connections
        self._filled = filled
        self._segment = segment
        self._timeout = timeout
        self._loan = connections.loan()
        #: The connection that has the lock, or may have it after an interrupt.
        self._locked: Connection | None = None

    def __enter__(self) -> bool:
        try:
            connection = self._connections.take(self._loan)
            self._locked = connection
            if self._lock(connection):
                return True
            self._locked = None
        except BaseException as error:
            self._end()
            if isinstance(error, Exception):
                raise translated(error, self._connections.address.url) from error
            raise
        self._end()
        return False

    def __exit__(self, *exc_info: object) -> None:
        if self._locked is not None:
            # A separate statement: all appends under the lock are committed, so the next holder sees them.
            with suppress(Exception):
                self._locked.plain_rows(self._filled("SELECT pg_advisory_unlock({fair_key})"), (self._segment,))
                self._locked = None
        self._end()

    def _lock(self, connection: Connection) -> bool:
        try:
            if self._timeout <= 0:
                statement = self._filled("SELECT pg_try_advisory_lock({fair_key})")
                ((is_locked,),) = connection.plain_rows(statement, (self._segment,))
                return bool(is_locked)
            milliseconds = max(1, int(self._timeout * 1000))
            if connection.lock_milliseconds != milliseconds:
                connection.execute(f"SET lock_timeout = {milliseconds}")
                connection.lock_milliseconds = milliseconds
            connection.plain_rows(self._filled("SELECT pg_advisory_lock({fair_key})"), (self._segment,))
        except psycopg.errors.LockNotAvailable:
            connection.release_exclusive_locks()
            return False
        except psycopg.errors.QueryCanceled:
            connection.close()
            return False
        return True

    def _end(self) -> None:
        try:
            if self._locked is not None:
                self._locked.close()  # which releases the lock
            self._connections.look_at(self._loan)
        finally:
            self._loan.end()
            self._connections.go_on()
