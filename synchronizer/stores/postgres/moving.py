"""Moves the chunks of a sealed segment to the end of another one.

An update of a row leaves its large values where they are, so a move costs a row per chunk, however large the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .. import checks
from .connections import Connection

_LOCK: Final = (
    "SELECT pg_advisory_xact_lock(k.key) FROM (SELECT hashtextextended(n, {lock_seed}) AS key"
    " FROM unnest(%s::text[]) AS n ORDER BY 1) AS k"
)
_SOURCE: Final = (
    "SELECT s.id, s.sealed, s.start_offset, {length} FROM {schema}.segment s WHERE s.name = %s AND NOT s.deleted"
)
_MOVE: Final = (
    "UPDATE {schema}.chunk c SET segment = t.id, start_offset = c.start_offset + %(offset)s,"
    " end_offset = c.end_offset + %(offset)s FROM {schema}.segment t"
    " WHERE c.segment = %(source)s AND t.name = %(segment)s"
)
_ANNOUNCE: Final = "SELECT {schema}.announce(%s::text)"

_APPENDED, _CONFLICT = 0, 1

#: What `append` of module `schema` returns: outcome, length, size, delta, present attributes.
Outcome = tuple[int, int, int, bytes | None, Sequence[bytes | None] | None]


def move(
    connection: Connection,
    filled: Callable[[str], str],
    segment: str,
    source: str,
    append_nothing: Callable[[], Outcome],
) -> Outcome | None:
    """Append the source to the segment within a transaction, and return what `append` returns.

    ``append_nothing`` appends no bytes to the segment, with the conditions of the caller. Return None, with nothing
    done, for a source that is truncated.
    """
    connection.rows(filled(_LOCK), ([segment, source],))
    found = connection.rows(filled(_SOURCE), (source,))
    if found and found[0][2]:
        return None
    outcome, length, _, delta, present = append_nothing()
    if outcome in (_APPENDED, _CONFLICT):
        if not found:
            raise checks.not_found(source)
        checks.check_source(source, is_sealed=found[0][1])
    if outcome != _APPENDED:
        return outcome, length, 0, delta, present
    (source_id, _, _, size) = found[0]
    connection.execute(filled(_MOVE), {"offset": length, "source": source_id, "segment": segment})
    if size:
        connection.rows(filled(_ANNOUNCE), (segment,))
    return outcome, length + size, size, delta, present
