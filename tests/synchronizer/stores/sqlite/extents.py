"""What has to hold between the tables of a SQLite file."""

from __future__ import annotations

import sqlite3
from collections import Counter

from synchronizer.stores.sqlite.extents import Reference


def check_extents(connection: sqlite3.Connection) -> None:
    """Every blob is referred to, every reference has its blob, and those to a shared one are as many as counted."""
    found: Counter[int] = Counter()
    shared: set[int] = set()
    for key, value in connection.execute("SELECT key, data FROM extent WHERE typeof(data) = 'integer'"):
        reference = Reference.decode(key, value)
        found[reference.blob] += 1
        if reference.is_shared:
            shared.add(reference.blob)
    assert found.keys() == {blob for (blob,) in connection.execute("SELECT id FROM blob")}
    counted = dict(connection.execute("SELECT blob, count FROM sharing").fetchall())
    assert counted == {blob: found[blob] - 1 for blob in shared}
    assert all(blob in shared for blob, count in found.items() if count > 1)
