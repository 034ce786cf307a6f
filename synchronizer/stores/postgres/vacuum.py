"""Frees the space of deleted chunks for new ones at once, where autovacuum would come only once a minute.

A stream with a limit of 64 MiB that takes 4 MiB/s would have 240 MiB of deleted chunks before autovacuum looks at it.
So a process that truncates or deletes segments runs a plain VACUUM as soon as it has deleted a small part of the table.
It counts the bytes itself, because the statistics of the server are up to a second late: they show a deletion after the
truncation that could have freed its space, or after the VACUUM that did. They are for what other processes deleted, and
for small chunks, whose rows need more space than their bytes.

VACUUM blocks neither reads nor writes. It reads only pages that have changed, so its time is in proportion to what was
deleted. While an old transaction is open it frees nothing: the table grows, and with it the part that is deleted before
the next VACUUM. It waits for another one, which began too early to see what was just deleted; after a second the server
cancels an autovacuum that is in the way. Large tables are left to autovacuum: what comes in a minute is little compared
with them, and a VACUUM would keep the caller waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from synchronizer.clock import Clock
from synchronizer.errors import ReaderGroupError
from synchronizer.loggers import get_logger

from .connections import Connection

_logger = get_logger(__name__)

#: A table of chunks with more bytes is left to autovacuum.
_MAX_BYTES: Final = 1 << 30
#: A process runs VACUUM after it has deleted this part of the table, and a megabyte. For less than 2 % of the pages,
#: VACUUM does not clean the indexes.
_PART: Final = 1 / 32
_PART_BYTES: Final = 1 << 20
#: It looks at the statistics of the server after each such part, and otherwise at most this often.
_LOOK_SECONDS: Final = 1.0
#: No look that the clock alone brings comes sooner after a VACUUM than this many times its duration. After one that
#: failed, by a timeout perhaps, there is no other look.
_REST: Final = 5.0
#: Small chunks are rows of the table itself, others are rows of 2 KB in its TOAST table. Only an owner may run VACUUM.
_LOOK: Final = """
    SELECT pg_table_size(c.oid), pg_has_role(c.relowner, 'USAGE'), EXISTS (
        SELECT FROM unnest(ARRAY[c.oid, c.reltoastrelid]) AS t
        WHERE pg_stat_get_dead_tuples(t) > 1024 + 0.05 * pg_stat_get_live_tuples(t))
    FROM pg_class c WHERE c.oid = '{schema}.chunk'::regclass
"""
# To cut off the end of the file, it would lock out readers for a moment.
_VACUUM: Final = "VACUUM (TRUNCATE false) {schema}.chunk"


class Vacuum:
    """Runs VACUUM on the chunks of a store when many were deleted. Threads may share it.

    Args:
        call: Calls a function with a connection outside any transaction, and translates its errors.
        filled: Fills in the placeholders of a statement.
        clock: The clock for the pauses.
    """

    def __init__(
        self, call: Callable[[Callable[[Connection], None]], None], filled: Callable[[str], str], clock: Clock
    ) -> None:
        self._call = call
        self._filled = filled
        self._clock = clock
        self._deleted_bytes = 0
        self._part_bytes = _PART_BYTES
        self._next_look_at = clock.monotonic()

    def run_if_due(self, deleted_bytes: int) -> None:
        """Free the space of deleted chunks if there are many. Autovacuum does it if this fails.

        Args:
            deleted_bytes: The bytes in chunks that this process has just deleted.
        """
        self._deleted_bytes += deleted_bytes
        begun = self._clock.monotonic()
        if self._deleted_bytes < self._part_bytes and begun < self._next_look_at:
            return
        self._next_look_at = begun + _LOOK_SECONDS
        try:
            self._call(self._run)
        except ReaderGroupError as error:
            _logger.info("autovacuum is left to free the space of deleted chunks: %s", error)
            self._part_bytes = sys.maxsize
        now = self._clock.monotonic()
        self._next_look_at = now + max(_LOOK_SECONDS, _REST * (now - begun))

    def _run(self, connection: Connection) -> None:
        ((size, is_owner, has_dead_rows),) = connection.rows(self._filled(_LOOK))
        self._part_bytes = _PART_BYTES + int(_PART * size)
        if not has_dead_rows and self._deleted_bytes < self._part_bytes:
            return
        self._deleted_bytes = 0
        if is_owner and size <= _MAX_BYTES:
            connection.execute(self._filled(_VACUUM), prepare=False)
