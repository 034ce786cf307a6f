"""The positions of a streaming query in a reader group, so that what looks at groups sees the query, too."""

from __future__ import annotations

import logging

from synchronizer import InvalidArgumentError, ReaderGroupError

from ..client import Client
from ..streams.config import StreamCut
from ..streams.state import StreamState
from .retention import moved_to_data

logger = logging.getLogger("readergroup.spark")


class PublishedPositions:
    """Puts a group where a query stands. The group has no readers, so nobody else moves it.

    Raises for a group that there is not, that does not read the stream, or has readers; later on, what fails is logged.
    """

    def __init__(self, client: Client, group: str, stream: str) -> None:
        self._client = client
        self._group = client.groups.get(group)
        self._stream = stream
        self._published: StreamCut | None = None
        if stream not in self._group.state.config.streams:
            raise InvalidArgumentError(
                "the group does not read this stream; name one that was created for it", group=group, stream=stream
            )
        if self._readers():
            raise InvalidArgumentError(
                "the group has readers, which know where they stand; name a group for this query alone",
                group=group,
                readers=sorted(self._readers()),
            )

    def publish(self, state: StreamState, cut: StreamCut) -> None:
        """All before the cut is processed."""
        if cut == self._published:
            return
        try:
            if self._readers():
                logger.warning("group %s has readers: the query does not publish its positions there", self._group.name)
            else:
                self._group.reset({self._stream: moved_to_data(self._client, state, cut)})
        except ReaderGroupError as error:
            logger.warning("the positions of the query were not published: %s", error)
        self._published = cut

    def _readers(self) -> list[str]:
        return list(self._group.synchronizer.fetch_updates().readers)
