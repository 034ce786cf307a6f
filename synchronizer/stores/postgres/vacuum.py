"""Frees the space of deleted chunks for new ones at once, where autovacuum would come only once a minute.

A stream with a limit of 64 MiB that takes 4 MiB/s would have 240 MiB of deleted chunks before autovacuum looks at it.
So a process that truncates or deletes a segment runs a plain VACUUM when the deleted chunks exceed the share at which
autovacuum would do it. It blocks neither reads nor writes, and gives way to another VACUUM. Large tables are left to
autovacuum: what comes in a minute is little compared with them, and a VACUUM would keep the caller waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from synchronizer.clock import Clock
from synchronizer.errors import ReaderGroupError
from synchronizer.loggers import get_logger

from .connections import Connection

_logger = get_logger(__name__)

#: A table of chunks with more bytes is left to autovacuum.
_MAX_BYTES: Final = 1 << 30
#: The server counts deleted rows in each session, and adds them to its statistics about once a second.
_PAUSE_SECONDS: Final = 1.0
#: A VACUUM is followed by a pause this many times as long: while an old transaction is open, it frees nothing.
_REST: Final = 5.0
#: Small chunks are rows of the table itself, others are rows of 2 KB in its TOAST table. Only an owner may run VACUUM.
_IS_DUE: Final = f"""
    SELECT FROM pg_class c JOIN pg_stat_all_tables t ON t.relid IN (c.oid, c.reltoastrelid)
    WHERE c.oid = '{{schema}}.chunk'::regclass AND pg_has_role(c.relowner, 'USAGE')
        AND t.n_dead_tup > 1024 + 0.05 * t.n_live_tup AND pg_table_size(c.oid) <= {_MAX_BYTES}
"""
# To cut off the end of the file, it would lock out readers for a moment.
_VACUUM: Final = "VACUUM (SKIP_LOCKED, TRUNCATE false) {schema}.chunk"


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
        self._next_at = clock.monotonic()

    def run_if_due(self) -> None:
        """Free the space of deleted chunks if there are many. Autovacuum does it if this fails."""
        begun = self._clock.monotonic()
        if begun < self._next_at:
            return
        self._next_at = begun + _PAUSE_SECONDS
        try:
            self._call(self._run)
        except ReaderGroupError as error:
            _logger.info("autovacuum is left to free the space of deleted chunks: %s", error)
        now = self._clock.monotonic()
        self._next_at = now + max(_PAUSE_SECONDS, _REST * (now - begun))

    def _run(self, connection: Connection) -> None:
        if connection.rows(self._filled(_IS_DUE)):
            connection.execute(self._filled(_VACUUM), prepare=False)
