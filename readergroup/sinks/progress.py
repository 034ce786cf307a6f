"""The tables of a sink, and the statements that read and change them.

One row for each segment of a group says how far the segment is stored (``next_offset``) and under which assignment
(``fencing_token``). A worker that handles events of a segment at once adds a row of the second table for each event,
and moves ``next_offset`` later, when all events before it are stored.

The row of the segment is the lock. An owner that handles one event after the other takes it alone, so that two
attempts at one event cannot run at once. Owners that handle many share it; `claim` by a new owner excludes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from synchronizer import InvalidArgumentError, StoreUnavailableError
from synchronizer.arguments import check_type

from ..errors import CorruptDataError, ReaderNotInGroupError, SinkBehindError
from ..group.assigned_segments import Claimed
from ..sql.drivers import Dialect
from ..sql.scripts import Script, Statement
from .place import Place

#: The token of a row while `SqlSink.reset` runs: no owner has one as great.
BLOCKED: Final = 2**63 - 1

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}")
_KEY: Final = "group_name = :group_name AND segment = :segment AND incarnation = :incarnation"
_OTHER_KEY: Final = " AND ".join(f"other.{column} = :{column}" for column in ("group_name", "segment", "incarnation"))
_SAVEPOINT: Final = "readergroup_sink"


class Row(NamedTuple):
    """How far a segment is stored."""

    position: int
    token: int
    #: The number of the transaction that holds the row's lock, on PostgreSQL.
    transaction: int | None = None
    #: Whether events beyond the position are stored, as far as the statement that locked the row saw them.
    has_finished: bool = False
    #: The offsets of those that were asked about.
    finished: frozenset[int] = frozenset()
    #: Whether this transaction has added the row.
    is_new: bool = False


class Acknowledged(NamedTuple):
    """What the database has acknowledged of a segment to its owner."""

    token: int
    #: It has all events before this offset.
    position: int
    #: The offsets of those that it has beyond.
    beyond: set[int]

    def copy(self) -> Acknowledged:
        return self._replace(beyond={*self.beyond})

    def count(self, offsets: range) -> int:
        """Return how many of those beyond are at these offsets."""
        return sum(each in offsets for each in self.beyond)


@dataclass(frozen=True)
class Tables:
    """The two tables by their quoted names.

    Args:
        table: The first one. The other has the same name with "_finished" behind it.
        schema: Where they are. Default: where the database looks first.
    """

    table: str
    schema: str | None = None

    def __post_init__(self) -> None:
        for value, name in ((self.table, "table"), (self.schema, "schema")):
            check_type(value, str, name, or_none=name == "schema")
            if value is not None and not _NAME.fullmatch(value):
                raise InvalidArgumentError(
                    f"{name} must be a name of up to 51 letters, digits and underscores that begins with no digit",
                    **{name: value},
                )

    @property
    def progress(self) -> str:
        return self._quoted(self.table)

    @property
    def finished(self) -> str:
        return self._quoted(f"{self.table}_finished")

    def _quoted(self, table: str) -> str:
        return f'"{table}"' if self.schema is None else f'"{self.schema}"."{table}"'

    def ddl(self) -> Sequence[str]:
        """The statements that create the tables, the same on SQLite and PostgreSQL."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.progress} (\n"
            "    group_name text NOT NULL,\n"
            "    segment text NOT NULL,\n"
            "    incarnation text NOT NULL,\n"
            "    next_offset bigint NOT NULL,\n"
            "    fencing_token bigint NOT NULL,\n"
            "    PRIMARY KEY (group_name, segment, incarnation)\n"
            ")",
            f"CREATE TABLE IF NOT EXISTS {self.finished} (\n"
            "    group_name text NOT NULL,\n"
            "    segment text NOT NULL,\n"
            "    incarnation text NOT NULL,\n"
            "    event_offset bigint NOT NULL,\n"
            "    PRIMARY KEY (group_name, segment, incarnation, event_offset)\n"
            ")",
        )

    # ------------------------------------------------------------------ scripts

    def check(self, dialect: Dialect) -> Script[bool]:
        """Ask for each column. Return whether the connection really holds a transaction."""
        yield Statement(
            f"SELECT group_name, segment, incarnation, next_offset, fencing_token FROM {self.progress} WHERE 1 = 0"
        )
        yield Statement(f"SELECT group_name, segment, incarnation, event_offset FROM {self.finished} WHERE 1 = 0")
        if dialect == "sqlite":
            return True
        numbers = []
        for _ in range(2):
            found = yield Statement("SELECT txid_current()")
            numbers.append(found.rows[0][0])
        return len({*numbers}) == 1

    def claim(
        self,
        dialect: Dialect,
        place: Place,
        token: int,
        offset: int,
        *,
        lock_timeout_ms: int,
        idle_timeout_ms: int | None = None,
    ) -> Script[Claimed]:
        """Take the segment over from former owners, whose transactions end first; return what is stored of it."""
        if dialect == "postgresql":
            yield _setting("lock_timeout", lock_timeout_ms)
        row = yield from self._lock(dialect, place, "UPDATE", idle_timeout_ms)
        if row is None:
            row = yield from self._insert(dialect, place, token, offset, "UPDATE", idle_timeout_ms)
        if row.token == BLOCKED:
            raise StoreUnavailableError("the sink is being reset; if it was interrupted, call sink.reset again")
        _check_token(place, row, token)
        if row.token < token:
            yield Statement(
                f"UPDATE {self.progress} SET fencing_token = :token WHERE {_KEY}", {**place.key, "token": token}
            )
        yield self._delete_finished(place, row.position)
        found = yield Statement(f"SELECT event_offset FROM {self.finished} WHERE {_KEY}", place.key)
        return Claimed(row.position, frozenset(offset for (offset,) in found.rows))

    def begin(
        self,
        dialect: Dialect,
        place: Place,
        token: int,
        offsets: range,
        *,
        shared: bool = False,
        idle_timeout_ms: int | None = None,
    ) -> Script[Row]:
        """Lock the row, and return it with what is stored of these offsets beyond its position.

        Raise `ReaderNotInGroupError` if a newer owner has the segment.
        """
        lock = "KEY SHARE" if shared else "UPDATE"
        row = yield from self._lock(dialect, place, lock, idle_timeout_ms)
        if row is None:
            if shared:
                raise ReaderNotInGroupError("the row of the segment was deleted from the sink's table", **place.key)
            row = yield from self._insert(dialect, place, token, offsets.start, lock, idle_timeout_ms)
        _check_token(place, row, token)
        # In a statement of its own, which sees what a former owner has stored while this one waited for the lock.
        if shared or row.has_finished or row.token != token:
            found = yield Statement(
                f"SELECT event_offset FROM {self.finished} "
                f"WHERE {_KEY} AND event_offset >= :first AND event_offset < :stop",
                {**place.key, "first": offsets.start, "stop": offsets.stop},
            )
            row = row._replace(has_finished=True, finished=frozenset(each[0] for each in found.rows))
        if dialect == "sqlite":
            yield Statement(f"SAVEPOINT {_SAVEPOINT}")
        return row

    def finish(self, dialect: Dialect, place: Place, token: int, end: int, row: Row) -> Script[bool]:
        """Store that the segment is stored up to ``end``."""
        same = yield from self._check_same(dialect)
        done = yield Statement(
            f"UPDATE {self.progress} SET next_offset = :next_offset, fencing_token = :token WHERE {_KEY}{same}",
            {**place.key, "next_offset": end, "token": token, **_transaction(row)},
        )
        if not done.changed:
            raise ended_by_block()
        if row.has_finished:
            yield self._delete_finished(place, end)
        return True

    def finish_shared(self, dialect: Dialect, place: Place, offset: int, row: Row) -> Script[bool]:
        """Store that the event at ``offset`` is stored. False: another attempt has done so meanwhile."""
        same = yield from self._check_same(dialect)
        if same:
            found = yield Statement(f"SELECT 1 WHERE 1 = 1{same}", _transaction(row))
            if not found.rows:
                raise ended_by_block()
        done = yield Statement(
            f"INSERT INTO {self.finished} (group_name, segment, incarnation, event_offset) "
            "VALUES (:group_name, :segment, :incarnation, :event_offset) ON CONFLICT DO NOTHING",
            {**place.key, "event_offset": offset},
        )
        return done.changed == 1

    def settle(
        self,
        dialect: Dialect,
        places: Iterable[tuple[Place, int, int]],
        known: Mapping[Place, Acknowledged],
        idle_timeout_ms: int | None = None,
    ) -> Script[list[Place]]:
        """Move each place, with its token, to a position before which all is stored. Return those that moved.

        Raise `SinkBehindError` if the database has lost events that are ``known``.
        """
        if dialect == "postgresql" and idle_timeout_ms is not None:
            yield _setting("idle_in_transaction_session_timeout", idle_timeout_ms)
        moved = []
        for place, token, position in sorted(places):
            row = yield from self._lock(dialect, place, "NO KEY UPDATE")  # beside the transactions that share the row
            if row is None or row.token != token or row.position > position:
                continue
            yield Statement(
                f"UPDATE {self.progress} SET next_offset = :next_offset WHERE {_KEY}",
                {**place.key, "next_offset": position},
            )
            finished = yield self._delete_finished(place, position)
            lost = finished.changed < known[place].count(range(row.position, position))
            if lost or row.position < known[place].position:
                raise lost_commits(place, row.position, position)
            moved.append(place)
        return moved

    def block(self, group: str, streams: Sequence[str]) -> Script[None]:
        """Refuse all owners of the group's segments in these streams, after their transactions have ended."""
        for stream in streams:
            yield self._set_tokens(group, stream, BLOCKED)

    def unblock(self, group: str, streams: Sequence[str], places: Iterable[tuple[Place, int, int]], token: int) -> (
        Script[None]
    ):  # fmt: skip
        """Give each place its token again, and the other segments of the streams ``token``."""
        for stream in streams:
            yield self._set_tokens(group, stream, token)
        for place, own, _ in places:
            yield Statement(
                f"UPDATE {self.progress} SET fencing_token = :token WHERE {_KEY}", {**place.key, "token": own}
            )

    def move(self, group: str, streams: Sequence[str], places: Iterable[tuple[Place, int, int]], token: int) -> (
        Script[None]
    ):  # fmt: skip
        """`unblock`, and set each place to its position."""
        for stream in streams:
            yield self._set_tokens(group, stream, token)
            yield Statement(f"DELETE FROM {self.finished} WHERE {_STREAM}", _stream(group, stream))
        for place, own, position in places:
            yield Statement(
                f"INSERT INTO {self.progress} (group_name, segment, incarnation, next_offset, fencing_token) "
                "VALUES (:group_name, :segment, :incarnation, :next_offset, :token) "
                "ON CONFLICT (group_name, segment, incarnation) "
                "DO UPDATE SET next_offset = excluded.next_offset, fencing_token = excluded.fencing_token",
                {**place.key, "next_offset": position, "token": own},
            )

    def _set_tokens(self, group: str, stream: str, token: int) -> Statement:
        return Statement(
            f"UPDATE {self.progress} SET fencing_token = :token WHERE {_STREAM}",
            {"token": token, **_stream(group, stream)},
        )

    # ------------------------------------------------------------------ parts

    def _lock(
        self, dialect: Dialect, place: Place, lock: str, idle_timeout_ms: int | None = None
    ) -> Script[Row | None]:
        """Lock the row until the end of the transaction, and return it; None if there is none."""
        others = f"SELECT 1 FROM {self.finished} AS other WHERE {_OTHER_KEY} AND other.event_offset >= next_offset"
        columns, parameters = f"next_offset, fencing_token, EXISTS ({others})", dict(place.key)
        if dialect == "sqlite":
            # A write comes first: a transaction that has read cannot always become one that writes.
            yield Statement(f"UPDATE {self.progress} SET next_offset = next_offset WHERE {_KEY}", place.key)
            suffix = ""
        else:
            columns += ", txid_current()"
            if idle_timeout_ms is not None:
                columns += ", set_config('idle_in_transaction_session_timeout', :idle_timeout, true)"
                parameters["idle_timeout"] = f"{idle_timeout_ms}ms"
            suffix = f" FOR {lock}"
        found = yield Statement(f"SELECT {columns} FROM {self.progress} WHERE {_KEY}{suffix}", parameters)
        if not found.rows:
            return None
        position, token, has_finished, *transaction = found.rows[0]
        if not isinstance(position, int) or not isinstance(token, int):
            raise CorruptDataError(
                "a row of the sink's table holds no number where one was written; correct it, or call sink.reset",
                table=self.table,
                **place.key,
                next_offset=position,
                fencing_token=token,
            )
        return Row(position, token, transaction[0] if transaction else None, bool(has_finished))

    def _insert(
        self,
        dialect: Dialect,
        place: Place,
        token: int,
        offset: int,
        lock: str,
        idle_timeout_ms: int | None = None,
    ) -> Script[Row]:
        yield Statement(
            f"INSERT INTO {self.progress} (group_name, segment, incarnation, next_offset, fencing_token) "
            "VALUES (:group_name, :segment, :incarnation, :next_offset, :token) ON CONFLICT DO NOTHING",
            {**place.key, "next_offset": offset, "token": token},
        )
        row = yield from self._lock(dialect, place, lock, idle_timeout_ms)
        if row is None:  # at an isolation level that does not show what another transaction has just added
            raise StoreUnavailableError("another transaction has just added the segment's row; repeat the transaction")
        return row._replace(is_new=True)

    def _delete_finished(self, place: Place, position: int) -> Statement:
        return Statement(
            f"DELETE FROM {self.finished} WHERE {_KEY} AND event_offset < :position",
            {**place.key, "position": position},
        )

    def _check_same(self, dialect: Dialect) -> Script[str]:
        """Return a condition that holds in the transaction that `begin` ran in."""
        if dialect == "postgresql":
            return " AND txid_current() = :transaction"
        try:
            yield Statement(f"RELEASE {_SAVEPOINT}")
        except Exception as error:
            if "no such savepoint" in str(error):
                raise ended_by_block() from error
            raise
        return ""


_STREAM: Final = "group_name = :group_name AND substr(segment, 1, :length) = :stream"


def _stream(group: str, stream: str) -> Mapping[str, object]:
    return {"group_name": group, "stream": f"{stream}/", "length": len(stream) + 1}


def _setting(name: str, milliseconds: int) -> Statement:
    """Of PostgreSQL, until the end of the transaction."""
    return Statement("SELECT set_config(:name, :value, true)", {"name": name, "value": f"{milliseconds}ms"})


def _transaction(row: Row) -> Mapping[str, object]:
    return {} if row.transaction is None else {"transaction": row.transaction}


def _check_token(place: Place, row: Row, token: int) -> None:
    if row.token == BLOCKED:
        raise ReaderNotInGroupError(
            "the sink is being reset; if the process that does so has ended, call sink.reset again", **place.key
        )
    if row.token > token:
        raise ReaderNotInGroupError(
            "the sink's table has a newer owner of the segment; if the store of the group was restored from a backup, "
            "call sink.reset",
            **place.key,
            fencing_token=token,
            newer_token=row.token,
        )


def lost_commits(place: Place, stored: int | None, acknowledged: int) -> SinkBehindError:
    return SinkBehindError(
        "the database has lost what it had committed: it was restored from a backup, a standby without the last "
        "commits took over, or rows of the sink's table were deleted; continue with sink.reset(group, to=...)",
        **place.key,
        stored=stored,
        acknowledged=acknowledged,
    )


def ended_by_block() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the transaction of the sink was committed or rolled back inside its block, or its connection closed; leave "
        "that to the sink, and repair what was committed without its position"
    )
