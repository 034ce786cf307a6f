"""`Outbox`: events that exist if and only if a transaction of the user's database commits."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Generic, TypeVar, overload

from pydantic import BaseModel, ConfigDict

from synchronizer import InvalidArgumentError, LeaderElection, ReaderGroupError, StateSynchronizer
from synchronizer.arguments import check_duration

from ..client import Client
from ..streams.config import check_stream_name
from ..streams.data.block import Headers
from ..streams.data.write_batch import check_key, check_size, checked_headers
from ..streams.serializers import Serializer, checked_dumps, serializer_or_bytes
from .notifier import OutboxNotifier
from .relay import OutboxRelay
from .session import Session, in_transaction, is_database_error, opener, unavailable
from .state import OUTBOX_UPDATES, OutboxState
from .table import DEFAULT_TABLE, OutboxTable, StreamRows, table_trouble

T = TypeVar("T")
R = TypeVar("R")


class OutboxStreamLag(BaseModel):
    """The committed events of one stream that wait in an outbox."""

    model_config = ConfigDict(frozen=True)

    events: int
    #: How long ago the oldest of them was written, by the clock of the database.
    seconds: float
    #: Why they wait, if a relay or a notifier has found them stuck.
    stuck: str | None


class OutboxLag(BaseModel):
    """The committed events that wait in an outbox."""

    model_config = ConfigDict(frozen=True)

    streams: Mapping[str, OutboxStreamLag]
    #: The process whose relay moves the events; None if there is none.
    relay: str | None

    @property
    def events(self) -> int:
        return sum(lag.events for lag in self.streams.values())

    @property
    def seconds(self) -> float:
        """The age of the oldest event."""
        return max((lag.seconds for lag in self.streams.values()), default=0.0)


class Outbox(Generic[T]):
    """Events that exist if and only if a transaction of your database commits. Threads may share it.

    `write` inserts an event into a table of your database, inside your transaction. A relay, in this process or
    another, moves the committed events to their streams, each once. The events of a routing key keep the order of the
    commits. The store of the client may be the same database server, or any other store.

    Args:
        client: Gives access to the store of the streams. It is borrowed.
        engine_or_connect: How to open connections of the outbox's own to the database with the table: a synchronous
            engine of SQLAlchemy, a pool of psycopg, the alias of a database of Django, or a function without
            arguments that returns a new connection of psycopg, psycopg2 or sqlite3.
        serializer: Turns values into bytes. Default: events are bytes.
        table: The name of the table, perhaps with a schema. Default: ``readergroup_outbox``.
        stuck_after_seconds: `stuck_notifier` reports events that are older. Default: 60.

    Raises:
        InvalidArgumentError: ``engine_or_connect`` is of another kind.
        UnsupportedError: It is asynchronous.
    """

    @overload
    def __init__(
        self: Outbox[bytes],
        client: Client,
        engine_or_connect: object,
        *,
        table: str = DEFAULT_TABLE,
        stuck_after_seconds: float = 60.0,
    ) -> None: ...
    @overload
    def __init__(
        self,
        client: Client,
        engine_or_connect: object,
        *,
        serializer: Serializer[T],
        table: str = DEFAULT_TABLE,
        stuck_after_seconds: float = 60.0,
    ) -> None: ...
    def __init__(
        self,
        client: Client,
        engine_or_connect: object,
        *,
        serializer: Serializer[Any] | None = None,
        table: str = DEFAULT_TABLE,
        stuck_after_seconds: float = 60.0,
    ) -> None:
        if not isinstance(client, Client):
            found = client if isinstance(client, type) else type(client)
            raise InvalidArgumentError(
                "an outbox takes a client of readergroup.connect, also in an asyncio application",
                found=f"{found.__module__}.{found.__qualname__}",
            )
        check_duration(stuck_after_seconds, "stuck_after_seconds", above_zero=True, finite=True)
        self._client = client
        self._connect = opener(engine_or_connect)
        self._dumps = checked_dumps(serializer_or_bytes(serializer))
        self._table = OutboxTable(table)
        self._stuck_after_seconds = stuck_after_seconds
        self._notifier: OutboxNotifier | None = None

    def write(
        self,
        connection: object,
        stream: str,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        """Write one event in the transaction of ``connection``. It enters the stream after the commit, if that comes.

        On PostgreSQL, other transactions that write an event of the same routing key to the same stream wait until this
        one ends, as for a row that both update. So write events last, and those of several keys in one order.

        Args:
            connection: The connection that your transaction runs on: of SQLAlchemy (or its session), psycopg, psycopg2,
                sqlite3 or Django. It is borrowed: the call neither commits nor closes it.
            stream: The stream, ``scope/name``. It need not exist yet.
            event: A value that the serializer takes, at most 8 MiB with its headers.
            routing_key: Selects the segment; at most 4096 characters. Default: none; the event goes to any segment.
            headers: Stored with the event.

        Raises:
            InvalidArgumentError: A value is wrong, or the connection is in autocommit mode and in no transaction.
            NotFoundError: The outbox table does not exist.
            UnsupportedError: The connection is of an unknown kind, or the table of another version.
        """
        writing = in_transaction(connection)
        check_stream_name(stream)
        if routing_key is not None:
            _check_text(routing_key, stream)
        headers = checked_headers(headers)
        data = self._dumps(event)
        check_size([data], headers, stream)
        try:
            self._table.insert(writing, stream, routing_key, data, headers)
        except Exception as error:  # other errors of the database are the user's: they tell whether to retry
            if trouble := table_trouble(error, self._table.name):
                raise trouble from error
            raise

    def relay(self, *, lease_seconds: float = 10.0) -> OutboxRelay:
        """Start to move committed events to their streams, in the background, until the relay is closed.

        Use it as a context manager. Closing the client closes it too. Run one in each process, or in a few: one at a
        time works.

        Args:
            lease_seconds: Another relay takes over when this one has not renewed its lease for so long. The first of
                all present relays sets the value for all. Default: 10.

        Raises:
            NotFoundError: The outbox table does not exist.
            StoreUnavailableError: The database does not answer.
            DeadlineExceededError: The store of the streams does not answer.
        """
        check_duration(lease_seconds, "lease_seconds", above_zero=True, finite=True)
        outbox_id = self._in_session(self._table.outbox_id)
        candidate = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        election = self._election(outbox_id, candidate, lease_seconds)
        relay = self._client._keep(
            OutboxRelay(self._client.streams, self._table, self._connect, election, self._state(outbox_id), outbox_id)
        )
        try:
            relay.start()
        except BaseException:  # interrupted, without a caller that could close it
            relay.close()
            raise
        return relay

    def lag(self) -> OutboxLag:
        """Return how many committed events wait in the outbox, and how old they are, by stream.

        Raises:
            NotFoundError: The outbox table does not exist.
            StoreUnavailableError: The database does not answer.
            DeadlineExceededError: The store of the streams does not answer.
        """
        outbox_id = self._in_session(self._table.outbox_id)
        with closing(self._state(outbox_id)) as state:
            stuck = state.fetch_updates().stuck
        with closing(self._election(outbox_id, "-", 10.0)) as election:
            relay = election.leader()
        return OutboxLag(
            streams={
                each.stream: OutboxStreamLag(events=each.events, seconds=each.seconds, stuck=stuck.get(each.stream))
                for each in self._rows()
            },
            relay=relay,
        )

    @property
    def stuck_notifier(self) -> OutboxNotifier:
        """Notifies listeners of streams whose events are stuck in the outbox, and of those that move again."""
        if self._notifier is None:
            state = self._state(self._in_session(self._table.outbox_id))
            self._notifier = self._client._keep(
                OutboxNotifier(
                    state,
                    source=self._table.name,
                    lag=self._rows,
                    stuck_after_seconds=self._stuck_after_seconds,
                )
            )
        return self._notifier

    def create_table(self) -> None:
        """Create the table of the outbox unless it exists. It needs the right to create tables."""
        self._in_session(self._table.create)

    def ddl(self, dialect: str) -> Sequence[str]:
        """Return the statements that `create_table` runs, for a migration. ``dialect`` is postgresql or sqlite."""
        return self._table.ddl(dialect)

    def _rows(self) -> Sequence[StreamRows]:
        return self._in_session(self._table.lag)

    def _election(self, outbox_id: bytes, candidate: str, lease_seconds: float) -> LeaderElection:
        return self._client.leader_election(
            f"outbox/{outbox_id.hex()}", candidate, member_timeout_seconds=lease_seconds
        )

    def _state(self, outbox_id: bytes) -> StateSynchronizer[OutboxState]:
        name = f"outbox/{outbox_id.hex()}"
        return self._client.synchronizer(name, initial=OutboxState(), updates=OUTBOX_UPDATES)

    def _in_session(self, work: Callable[[Session], R]) -> R:
        """Return the result of ``work`` on a connection of the outbox's own."""
        try:
            with closing(self._connect()) as session:
                return work(session)
        except ReaderGroupError:
            raise
        except Exception as error:
            trouble = table_trouble(error, self._table.name)
            if trouble is None and not is_database_error(error):
                raise
            raise trouble or unavailable(error) from error


def _check_text(routing_key: str, stream: str) -> None:
    """Refuse a routing key that the column of a database cannot hold."""
    check_key(routing_key, stream)
    if "\0" in routing_key or any("\ud800" <= character <= "\udfff" for character in routing_key):
        raise InvalidArgumentError(
            "a routing key in an outbox must be text that a database can store, without NUL", stream=stream
        )
