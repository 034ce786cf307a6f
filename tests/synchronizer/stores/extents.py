"""What has to hold between the tables of a SQLite file."""

from __future__ import annotations

import sqlite3
from collections import Counter


def check_extents(connection: sqlite3.Connection) -> None:
    """Every blob is referred to, every reference has its blob, and each blob's references are as many as counted."""
    found = Counter(blob for (blob,) in connection.execute("SELECT data FROM extent WHERE typeof(data) = 'integer'"))
    blobs = {blob for (blob,) in connection.execute("SELECT id FROM blob")}
    further = dict(connection.execute("SELECT blob, count FROM further").fetchall())
    assert found.keys() == blobs
    assert further == {blob: count - 1 for blob, count in found.items() if count > 1}
