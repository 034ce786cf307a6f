"""A reader as a service: it reads a group until SIGTERM, then gives its segments back and ends.

The environment says which: READERGROUP_URL, READERGROUP_GROUP, and READERGROUP_STREAMS with spaces between them. Put
your own work into `handle`.
"""

import os
import signal
import socket
from typing import Any

import readergroup as rg


def handle(event: rg.Event[Any]) -> None:
    print(event.segment, event.offset, event.data, flush=True)


def main() -> None:
    with rg.connect() as client:
        # Whoever is first makes the group. Its streams must be there.
        group = client.groups.create(os.environ["READERGROUP_GROUP"], streams=os.environ["READERGROUP_STREAMS"].split())
        # The name of the pod. A container that is restarted in it takes its segments over at once.
        reader = group.reader(socket.gethostname(), serializer=rg.JsonSerializer())
        signal.signal(signal.SIGTERM, lambda *_: reader.stop())
        with reader:
            for event in reader:
                handle(event)


if __name__ == "__main__":
    main()
