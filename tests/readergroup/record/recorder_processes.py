"""What the recording processes of these tests do."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import readergroup as rg
from tests.readergroup.reader_processes import GROUP


def record(connection: Connection, url: str, _: str, __: Path, lag_interval_seconds: float) -> None:
    """Record until told to end."""
    with rg.connect(url) as client:
        with client.groups.get(GROUP).record_notifications(lag_interval_seconds=lag_interval_seconds):
            connection.send("ready")
            connection.recv()
    connection.send("done")
