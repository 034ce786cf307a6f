"""A reader as a service: it handles the events of a group until SIGTERM, then gives its segments back and ends.

The environment says which: READERGROUP_URL, READERGROUP_GROUP, READERGROUP_STREAMS with spaces between them, and
READERGROUP_DEAD_LETTERS, the stream of the events that fail in all attempts. Put your own work into `handle`.
"""

import os
from typing import Any

import readergroup as rg


def handle(event: rg.Event[Any]) -> None:
    print(event.segment, event.offset, event.data, flush=True)


def main() -> None:
    with rg.connect() as client:
        # The first process creates the group. The streams must exist.
        group = client.groups.create(os.environ["READERGROUP_GROUP"], streams=os.environ["READERGROUP_STREAMS"].split())
        retry = rg.RetryPolicy(dead_letters=os.environ["READERGROUP_DEAD_LETTERS"])
        group.pool(handle, serializer=rg.JsonSerializer(), retry=retry).run()  # after SIGTERM it drains, for up to 25 s


if __name__ == "__main__":
    main()
