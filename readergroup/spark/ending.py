"""Ends a streaming query at the end of sealed streams, which a Python source cannot do itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from synchronizer import Deadline
from synchronizer.arguments import check_items, check_type
from synchronizer.threads.flag import Flag

from ..client import Client

#: How often to look whether the streams are sealed.
_LOOK_SECONDS: Final = 0.5


class _Query(Protocol):
    """A streaming query of Spark or of Spark Connect."""

    @property
    def isActive(self) -> bool: ...
    def awaitTermination(self, timeout: int | None = None) -> bool | None: ...
    def processAllAvailable(self) -> None: ...
    def stop(self) -> None: ...


def stop_at_end(query: _Query, client: Client, streams: Collection[str], *, timeout: float | None = None) -> bool:
    """Wait until these streams are sealed and the query has processed all their events, then stop the query.

    Args:
        query: A running query, with any trigger. The ends of other streams that it reads are not waited for, but what
            they hold at that time is processed too, except data that waits for `minBytesPerTrigger`.
        client: A client of the store. It is borrowed.
        streams: The names of the streams, at least one.
        timeout: Seconds to wait until the streams are sealed. Default: forever.

    Returns:
        Whether the query has ended. At the timeout it keeps running.

    Raises:
        StreamingQueryException: The query failed.
        NotFoundError: One of the streams does not exist.
    """
    check_type(client, Client, "client")
    check_items(streams, Collection, "streams")
    deadline, never = Deadline(client.clock, timeout), Flag()
    while not all(client.streams.info(stream).sealed for stream in streams):
        if not query.isActive:
            query.awaitTermination()  # raises if the query failed
            return True
        if deadline.passed:
            return False
        client.clock.wait(never, deadline.remaining(_LOOK_SECONDS))
    for _ in range(2):  # the first call may return with a poll that began before the last event
        query.processAllAvailable()
    query.stop()
    return True
