"""`SqlSink`: effects of events, position and fencing token in one transaction of the application's database."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from synchronizer import InvalidArgumentError, ReaderGroupError
from synchronizer.arguments import check_duration, check_type, type_name
from synchronizer.callables import is_async

from ..errors import EventStoredError
from ..group.assigned_segments import Claimed
from ..sql.connections import Connection, autocommit, run
from ..sql.databases import open_database
from ..sql.drivers import Dialect
from ..sql.errors import is_passing
from ..sql.scripts import Control, Script, Statement, in_transaction, now, settled
from ..streams.config import stream_of
from ..streams.event import Event, EventBatch
from ..telemetry.counters import GroupCounters
from .place import Place
from .progress import Acknowledged, Row, Tables, ended_by_block, lost_commits

DEFAULT_TABLE: Final = "readergroup_progress"
#: How long a takeover waits for transactions of the former owner before it tries again.
_LOCK_TIMEOUT_MS: Final = 2000
#: The longest time that PostgreSQL accepts, 24 days.
_MAX_IDLE_TIMEOUT_SECONDS: Final = (2**31 - 1) / 1000
#: How many jumps of each segment are remembered.
_MOST_JUMPS: Final = 1000


class ResettableGroup(Protocol):
    """The parts of a reader group that `SqlSink.reset` uses."""

    name: str
    synchronizer: Any

    def reset(self, to: Any, *, timeout: float | None = None) -> Any: ...


class SqlSink:
    """Stores the effect of each event once, in SQLite or PostgreSQL. Threads may share it.

    Each transaction also stores the position behind the event, or the batch, and the fencing token. So a repeated event
    is recognised, and a former owner of the segment is refused.

    Args:
        engine_or_connect: A SQLAlchemy ``Engine`` or ``AsyncEngine``, a psycopg connection or pool, plain or
            asynchronous, the alias of a Django connection, or a function that returns a new connection of a driver.
            Connections must not be in autocommit mode; sqlite3 may have ``isolation_level=None``.
        table: The table of the positions. The sink also has one with "_finished" behind this name.
        schema: Where both tables are. Default: where the database looks first.
        create_table: Create the tables when they are missing. Otherwise that is an error; ``readergroup sink ddl``
            prints how to create them.
        idle_timeout_seconds: PostgreSQL ends a transaction of the sink in which it gets no statement for this time, so
            that a stopped process does not hold up its successor for longer. None: as the server says.

    Raises:
        InvalidArgumentError: An argument is of no use.
        UnsupportedError: The database is neither SQLite nor PostgreSQL.
    """

    def __init__(
        self,
        engine_or_connect: Any,
        table: str = DEFAULT_TABLE,
        *,
        schema: str | None = None,
        create_table: bool = True,
        idle_timeout_seconds: float | None = 60.0,
    ) -> None:
        check_type(create_table, bool, "create_table")
        check_duration(idle_timeout_seconds, "idle_timeout_seconds", above_zero=True, finite=True, or_none=True)
        self._given = (engine_or_connect, table, schema, create_table, idle_timeout_seconds)
        self.tables = Tables(table, schema)
        self.database = open_database(engine_or_connect)
        if idle_timeout_seconds is not None:
            idle_timeout_seconds = min(idle_timeout_seconds, _MAX_IDLE_TIMEOUT_SECONDS)
        self.idle_timeout_ms = None if idle_timeout_seconds is None else max(1, round(idle_timeout_seconds * 1000))
        self._creates = create_table
        self._prepared_in: int | None = None
        self._lock = threading.Lock()
        #: What the database has acknowledged of each segment, which it may lose later.
        self._acknowledged: dict[Place, Acknowledged] = {}
        #: Events that were jumped over, by segment: the token under which that was, and their offsets.
        self._jumps: dict[Place, tuple[int, deque[range]]] = {}
        #: The open transactions, by the thread or task that has entered each, and by its segment.
        self._open: WeakValueDictionary[tuple[int, Place], SinkTransaction] = WeakValueDictionary()
        #: Those of the clients whose readers use this sink, by group.
        self.counters: dict[str, GroupCounters] = {}

    @property
    def is_async(self) -> bool:
        """Whether its transactions are entered by ``async with``."""
        return self.database.is_async

    def transaction(self, event: Event[Any] | EventBatch[Any]) -> SinkTransaction:
        """Return a context manager that stores all or nothing of its block, with the position behind the event.

        Use ``with``, or ``async with`` where the database is asynchronous. Entering returns the connection, in the form
        in which the application knows it. Run the statements on it, and leave the commit to the sink. Enter the
        transactions of one segment one after the other, in the order of its events.

        Args:
            event: An event of a reader, or a batch.

        Raises:
            EventStoredError: The database has the event. The block does not run. Suppress the error, and go on.
            ReaderNotInGroupError: A newer owner has the segment, or the sink is being reset. The block does not run.
            InvalidArgumentError: The event was not read by a reader of a group, comes too late, or the batch is stored
                in part; or the connection is in autocommit mode; or the block ended the transaction by itself; or this
                thread or task is in another transaction of the segment, such as that of a handler.
        """
        return SinkTransaction(self, event)

    def reset(self, group: ResettableGroup, to: Any, *, timeout: float | None = None) -> None:
        """Reset the group and the sink to another place. The events behind it are stored again.

        From the beginning of the call to its end no event is stored, and none of an earlier owner after it. If the call
        is interrupted, the sink refuses all events of these streams until another call completes.

        Args:
            group: The group.
            to: As of `ReaderGroup.reset`.
            timeout: As of `ReaderGroup.reset`.

        Raises:
            InvalidArgumentError: ``to`` is no place in the group's streams, or the database is asynchronous: use
                `reset_async`; or the call is made inside a transaction of the group.
        """
        self.check_blocks()
        _check_group(group)
        if is_async(group.reset):
            raise InvalidArgumentError(
                "the group is one of readergroup.aio, whose calls are awaited; pass a group of readergroup.connect, or "
                "call await sink.reset_async(group, to) on a sink with an asynchronous database",
                group=group.name,
            )
        now(self._reset(group, to, timeout))

    async def reset_async(self, group: Any, to: Any, *, timeout: float | None = None) -> None:
        """`reset`, for a group of `readergroup.aio` and an asynchronous database."""
        self.check_asynchronous()
        _check_group(group)
        await self._reset(group, to, timeout)

    async def _reset(self, group: Any, to: Any, timeout: float | None) -> None:
        perform, caller = self.database.perform, self.database.caller
        if any(who == caller and place.group == group.name for who, place in list(self._open)):
            raise InvalidArgumentError(
                "a reset waits for the transactions of the group; leave the one that this thread or task has entered",
                group=group.name,
            )
        state = await settled(group.synchronizer.fetch_updates(timeout=timeout))
        streams = _streams(state, to)
        await perform(lambda dialect: self._blocking(dialect, group.name, streams))
        try:
            await settled(group.reset(to, timeout=timeout))
        except InvalidArgumentError:  # nothing was reset
            places, token = _places(group, streams)
            await perform(lambda _: in_transaction(self.tables.unblock(group.name, streams, places, token)))
            raise
        await settled(group.synchronizer.fetch_updates(timeout=timeout))
        places, token = _places(group, streams)
        await perform(lambda _: in_transaction(self.tables.move(group.name, streams, places, token)))

    def _blocking(self, dialect: Dialect, group: str, streams: Sequence[str]) -> Script[None]:
        yield from self.prepared(dialect)
        yield from in_transaction(self.tables.block(group, streams))

    def close(self) -> None:
        """Close the connection that the sink has opened for this thread. It closes nothing that it was given."""
        self.database.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._given

    def __repr__(self) -> str:
        return f"SqlSink({type(self._given[0]).__name__}, table={self.tables.table!r})"

    # ------------------------------------------------------------------ for readers and pools

    def claiming(self, dialect: Dialect, place: Place, token: int, offset: int) -> Script[Claimed]:
        """Take the segment over from former owners, and return what is stored of it."""
        yield from self.prepared(dialect)
        claim = self.tables.claim(
            dialect, place, token, offset, lock_timeout_ms=_LOCK_TIMEOUT_MS, idle_timeout_ms=self.idle_timeout_ms
        )
        claimed = yield from in_transaction(claim)
        with self._lock:
            self._acknowledged[place] = Acknowledged(token, claimed.position, set(claimed.beyond))
        return claimed

    def settling(self, dialect: Dialect, places: Sequence[tuple[Place, int, int]]) -> Script[list[Place]]:
        """Move each place, with its token, to a position before which all is stored. Return those that moved."""
        with self._lock:
            known = {place: self._known(place, token).copy() for place, token, _ in places}
        moved = yield from in_transaction(self.tables.settle(dialect, places, known, self.idle_timeout_ms))
        for place, token, position in places:
            if place in moved:
                self.note_stored(place, token, position)
        return moved

    def check_blocks(self) -> None:
        if self.is_async:
            raise InvalidArgumentError(
                "the database of the sink is asynchronous: enter transactions with async with, and use async def "
                "handlers and reset_async"
            )

    def check_asynchronous(self) -> None:
        if not self.is_async:
            raise InvalidArgumentError(
                "the database of the sink blocks, which would stop the event loop: use an AsyncEngine, or an "
                "asynchronous connection or pool of psycopg"
            )

    # ------------------------------------------------------------------ for transactions

    def prepared(self, dialect: Dialect) -> Script[None]:
        """Check the connection and the tables, and create these if they are missing. Once in each process."""
        if self._prepared_in == os.getpid():
            return
        try:
            is_transaction = yield from in_transaction(self.tables.check(dialect))
        except Exception as error:
            if is_passing(error) or isinstance(error, ReaderGroupError):
                raise
            if not self._creates:
                raise InvalidArgumentError(
                    "the sink's tables are missing or have another form; 'readergroup sink ddl' prints how to create "
                    "them",
                    table=self.tables.table,
                    error=str(error),
                ) from error
            is_transaction = yield from self._create(dialect)
        if not is_transaction:
            raise autocommit()
        self._prepared_in = os.getpid()

    def _create(self, dialect: Dialect) -> Script[bool]:
        failure: Exception | None = None
        try:
            yield from in_transaction(_each(self.tables.ddl()))
        except Exception as error:  # another process may have created them at the same time
            failure = error
        try:
            return (yield from in_transaction(self.tables.check(dialect)))
        except Exception as error:
            if is_passing(error):
                raise
            raise InvalidArgumentError(
                "the sink's tables cannot be created, or have the form of another release; 'readergroup sink ddl' "
                "prints the form that this release needs",
                table=self.tables.table,
                error=str(failure or error),
            ) from (failure or error)

    def enter(self, key: tuple[int, Place], transaction: SinkTransaction) -> None:
        """Note that the transaction is open, until `leave`. Refuse one inside another of the same segment."""
        if key in self._open:
            raise InvalidArgumentError(
                "this thread or task has entered a transaction of the segment; leave it before the next, and in a "
                "handler use the connection that it is given",
                segment=key[1].segment,
            )
        self._open[key] = transaction

    def leave(self, key: tuple[int, Place], transaction: SinkTransaction) -> None:
        if self._open.get(key) is transaction:
            self._open.pop(key, None)

    def note_stored(self, place: Place, token: int, position: int) -> None:
        """Remember that the database has all before this position."""
        with self._lock:
            beyond = self._known(place, token).beyond
            self._acknowledged[place] = Acknowledged(token, position, {each for each in beyond if each >= position})

    def note_finished(self, place: Place, token: int, offset: int) -> None:
        """Remember that the database has the event at this offset, beyond the position."""
        with self._lock:
            known = self._acknowledged[place] = self._known(place, token)
            known.beyond.add(offset)

    def acknowledged(self, place: Place, token: int) -> int | None:
        """Return the position that the database has acknowledged to this owner, if it has."""
        with self._lock:
            known = self._acknowledged.get(place)
        return known.position if known is not None and known.token == token else None

    def _known(self, place: Place, token: int) -> Acknowledged:
        known = self._acknowledged.get(place)
        return known if known is not None and known.token == token else Acknowledged(token, 0, set())

    def note_jump(self, place: Place, token: int, jumped: range) -> None:
        """Remember that no transaction was entered for the events at these offsets."""
        with self._lock:
            known, jumps = self._jumps.get(place, (0, deque(maxlen=_MOST_JUMPS)))
            if known != token:
                jumps = deque(maxlen=_MOST_JUMPS)
            jumps.append(jumped)
            self._jumps[place] = (token, jumps)

    def was_jumped(self, place: Place, token: int, offset: int) -> bool:
        with self._lock:
            known, jumps = self._jumps.get(place, (0, ()))
            return known == token and any(offset in jump for jump in jumps)


class SinkTransaction:
    """One transaction of a sink, for one event or one batch. It is entered once.

    Args:
        sink: The sink.
        what: The event or batch.
        shared: Other events of the segment may have transactions at the same time. `SqlSink.settle` moves the position.
        takes_rest: If the batch is stored in part, ``what`` becomes the rest of it.
    """

    def __init__(
        self, sink: SqlSink, what: Event[Any] | EventBatch[Any], *, shared: bool = False, takes_rest: bool = False
    ) -> None:
        if isinstance(what, Event):
            self._start, self._end, incarnation = what.offset, what.next_offset, what.pointer.incarnation
        elif isinstance(what, EventBatch):
            if not len(what):
                raise InvalidArgumentError("the batch is empty; skip it")
            self._start, self._end, incarnation = what.offsets[0], what.end, what.incarnation
        else:
            raise InvalidArgumentError("event must be an Event or an EventBatch", found=type(what).__name__)
        if not what.group:
            raise InvalidArgumentError(
                "the sink needs events that a reader of a group has read: others have no owner", event=repr(what)
            )
        #: The event, or the events of the batch that are to be stored.
        self.what: Event[Any] | EventBatch[Any] = what
        self._sink = sink
        self._place = Place(what.group, what.segment, incarnation)
        self._token = what.fencing_token
        self._shared = shared
        self._takes_rest = takes_rest
        self._row: Row | None = None
        self._connection: Connection | None = None
        self._key: tuple[int, Place] | None = None
        #: Whether its connection was lost.
        self.lost = False

    def __enter__(self) -> Any:
        self._sink.check_blocks()
        self._check_new()
        try:
            return now(self.begin())
        except BaseException:  # perhaps an interrupt before its first step, or after the last one
            now(self.rollback())
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            now(self.commit() if kind is None else self.rollback())
        except BaseException:  # as above
            now(self.rollback())
            raise

    async def __aenter__(self) -> Any:
        self._sink.check_asynchronous()
        return await self.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await (self.commit() if kind is None else self.rollback())

    # ------------------------------------------------------------------ its steps, which `now` runs without a loop

    def _check_new(self) -> None:
        if self._row is not None or self._connection is not None:
            raise InvalidArgumentError("a transaction is entered once; call sink.transaction again")

    async def begin(self) -> Any:
        """Return the connection, as the application knows it."""
        self._check_new()
        self._key = self._sink.database.caller, self._place
        try:
            self._sink.enter(self._key, self)
            self._connection = connection = await self._sink.database.lend()
            await run(connection, self._beginning(connection.dialect))
        except BaseException as error:
            await self.rollback(failed=is_passing(error))
            raise
        return connection.native

    async def commit(self) -> None:
        connection = self._connection
        if connection is None:
            raise InvalidArgumentError("the transaction is not entered, or was left; call sink.transaction again")
        try:
            if connection.was_closed:
                raise ended_by_block()
            await run(connection, self._finishing(connection.dialect))
        except BaseException as error:
            await self.rollback(failed=is_passing(error))
            raise
        self._connection = None
        self._leave()
        if self._shared:
            self._sink.note_finished(self._place, self._token, self._start)
        else:
            self._sink.note_stored(self._place, self._token, self._end)
        self._count()
        await self._sink.database.give_back(connection)

    async def rollback(self, *, failed: bool = False) -> None:
        """End the transaction without an effect. Raises no error of the database.

        With ``failed`` the connection may be lost, which not every driver tells.
        """
        connection, self._connection = self._connection, None
        self._leave()
        if connection is None:
            return
        was_closed, is_lost = False, True
        try:
            with suppress(Exception):
                was_closed = connection.was_closed
                self.lost = connection.broken
                await settled(connection.rollback())
                is_lost = connection.broken
        finally:
            self.lost = (self.lost or is_lost) and not was_closed
            await self._sink.database.give_back(connection, failed=failed or is_lost)

    def _leave(self) -> None:
        if self._key is not None:
            self._sink.leave(self._key, self)
        self._key = None  # not before: an interrupted call is repeated

    def _count(self) -> None:
        counters = self._sink.counters.get(self._place.group)
        if counters is not None:
            counters.sink_transactions += 1

    def _beginning(self, dialect: Dialect) -> Script[None]:
        sink, place = self._sink, self._place
        yield from sink.prepared(dialect)
        acknowledged = sink.acknowledged(place, self._token)  # another thread may move it later
        yield Control.BEGIN
        row = yield from sink.tables.begin(
            dialect,
            place,
            self._token,
            range(self._start, self._end),
            shared=self._shared,
            idle_timeout_ms=sink.idle_timeout_ms,
        )
        if acknowledged is not None and (row.is_new or row.position < acknowledged):
            raise lost_commits(place, None if row.is_new else row.position, acknowledged)
        if self._end <= row.position:
            if not self._shared and sink.was_jumped(place, self._token, self._start):
                raise InvalidArgumentError(
                    "a later event of the segment was stored before this one; enter the transactions of a segment in "
                    "the order of its events, or let a pool handle many at once",
                    segment=place.segment,
                    offset=self._start,
                    stored=row.position,
                )
            raise EventStoredError("the database has the event, or all of the batch; skip it", **self._facts(row))
        offsets = self.what.offsets if isinstance(self.what, EventBatch) else (self._start,)
        if self._start < row.position not in offsets:
            raise InvalidArgumentError(
                "the stored position is inside an event: the row of the segment was changed, or belongs to other data",
                **self._facts(row),
            )
        if row.finished.issuperset(offset for offset in offsets if offset >= row.position):
            if not self._shared:
                yield from sink.tables.finish(dialect, place, self._token, self._end, row)
                yield Control.COMMIT
            raise EventStoredError("the database has the event, or all of the batch; skip it", **self._facts(row))
        if isinstance(self.what, EventBatch) and (self._start < row.position or row.finished):
            if not self._takes_rest:
                raise InvalidArgumentError(
                    "the batch is stored in part; open the reader with group.reader(sink=sink), so that it continues "
                    "where the database does, or enter a transaction for each event",
                    **self._facts(row),
                )
            self.what = self.what.without(row.finished, start=row.position)
        self._row = row

    def _finishing(self, dialect: Dialect) -> Script[None]:
        row, tables = self._row, self._sink.tables
        assert row is not None
        try:
            if self._shared:
                done = yield from tables.finish_shared(dialect, self._place, self._start, row)
            else:
                done = yield from tables.finish(dialect, self._place, self._token, self._end, row)
        except Exception as error:
            if not isinstance(error, ReaderGroupError) and not is_passing(error):
                error.add_note("Nothing was stored. Did the block catch an error of the database? Use a savepoint.")
            raise
        if not done:
            raise EventStoredError("another attempt has stored the event meanwhile", **self._facts(row))
        yield Control.COMMIT
        jumped = range(0 if row.is_new else row.position, self._start)
        if jumped and not self._shared:
            self._sink.note_jump(self._place, self._token, jumped)

    def _facts(self, row: Row) -> Mapping[str, object]:
        return {"segment": self._place.segment, "offset": self._start, "end": self._end, "stored": row.position}


def _check_group(group: object) -> None:
    if not hasattr(group, "reset"):
        raise InvalidArgumentError("group must be a ReaderGroup", found=type_name(group))


def _each(statements: Sequence[str]) -> Script[None]:
    for sql in statements:
        yield Statement(sql)


def _streams(state: Any, to: Any) -> Sequence[str]:
    """The streams that a reset to this place moves."""
    cuts = getattr(to, "cuts", to)
    return sorted(set(state.streams) & set(cuts) if isinstance(cuts, Mapping) else state.streams)


def _places(group: Any, streams: Sequence[str]) -> tuple[list[tuple[Place, int, int]], int]:
    """The segments of the streams, with the tokens and positions of the group's state, and a token below later ones."""
    state, revision = group.synchronizer.snapshot_of_state
    return [
        (
            Place(group.name, segment, state.streams[stream_of(segment)].incarnation),
            revision.token if found.token is None else found.token,
            found.offset,
        )
        for segment, found in state.segments.items()
        if stream_of(segment) in streams
    ], revision.token


def _rebuild(
    engine_or_connect: Any, table: str, schema: str | None, create_table: bool, idle_timeout_seconds: float | None
) -> SqlSink:
    return SqlSink(
        engine_or_connect,
        table,
        schema=schema,
        create_table=create_table,
        idle_timeout_seconds=idle_timeout_seconds,
    )
