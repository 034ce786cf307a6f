"""Store the revenue in a database, as one of the workers of a reader group. It ends with the sealed stream."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

import readergroup as rg


def main(url: str, database: str) -> None:
    with rg.connect(url) as client, closing(sqlite3.connect(database)) as reported:
        reported.execute(
            "CREATE TABLE IF NOT EXISTS revenue (shop TEXT, minute TEXT, amount INT, UNIQUE (shop, minute))"
        )
        with client.groups.get("report").reader(serializer=rg.JsonSerializer()) as reader:
            for event in reader:
                # A worker that was killed reads some events again: the same row replaces itself.
                reported.execute("REPLACE INTO revenue VALUES (:shop, :minute, :amount)", event.data)
                reported.commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
