"""One round of a relay on one stream: take rows, put them into the stream, delete them."""

from __future__ import annotations

from typing import Final

from ..telemetry.counters import OutboxCounters
from .publishing import Publisher, checksum
from .session import Session, is_locked
from .table import OutboxTable

#: The most rows, and about the most bytes, that a round takes of a stream.
_MAX_ROWS: Final = 5000
_MAX_BYTES: Final = 4 * 1024 * 1024
#: The relay stops putting rows into a stream while this many wait to be deleted, as behind a long SQLite transaction.
_MAX_UNDELETED: Final = 20_000


class StreamMover:
    """Moves the rows of one stream, for one relay as long as it has its fencing token. For one thread.

    The rows that a publisher begins with are deleted before others are taken, and a row that is in the stream is never
    taken again. So each is in the stream once, wherever this stops.
    """

    def __init__(self, table: OutboxTable, publisher: Publisher, counters: OutboxCounters) -> None:
        self._table = table
        self._publisher = publisher
        self._counters = counters
        self._stream = publisher.stream

    def move(self, session: Session) -> int:
        """Move the first rows of the stream; return how many were moved."""
        moved = self._move(session)
        if not self._publisher.has_begun:  # it was scaled, sealed or deleted, or another relay has taken over
            moved += self._move(session)
        return moved

    def _move(self, session: Session) -> int:
        publisher = self._publisher
        if not publisher.has_begun:
            self._begin(session)
        rows = self._table.rows(session, self._stream, publisher.undeleted, _MAX_ROWS, _MAX_BYTES)
        moved = publisher.publish(rows)
        if moved and (seconds := rows[0].seconds) is not None:
            self._counters.delays.add(seconds)
        if publisher.has_begun:  # else the next move sees what is stored, and deletes it
            self._delete(session)
        return len(moved)

    def _begin(self, session: Session) -> None:
        """Begin with the stream, and delete the rows that an earlier relay has put into it."""
        stored = self._publisher.begin()
        try:
            if stored:
                rows = self._table.named_rows(session, self._stream, stored)
                known = [row.id for row in rows if checksum(row) == stored[row.id]]
                self._table.delete(session, self._stream, known)
            self._publisher.deleted()
        except BaseException:
            self._publisher.end()
            raise

    def _delete(self, session: Session) -> None:
        """Delete the rows that are in the stream; do it later if another connection writes to a SQLite database."""
        undeleted = self._publisher.undeleted
        try:
            if undeleted:
                self._table.delete(session, self._stream, undeleted)
                self._publisher.deleted()
        except Exception as error:
            if not is_locked(error) or len(undeleted) > _MAX_UNDELETED:
                raise
