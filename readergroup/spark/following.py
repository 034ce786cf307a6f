"""The streams that a query follows: those of its offset, without deleted ones, and those that join while it runs."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, NamedTuple

from synchronizer import InvalidArgumentError, NotFoundError
from synchronizer.loggers import get_logger

from ..client import Client
from ..streams.config import StreamCut
from ..streams.state import StreamState
from .offsets import Cuts
from .options import ReadOptions
from .selection import selected

logger = get_logger("readergroup.spark")

#: How often a query looks for streams that join.
_LOOK_SECONDS: Final = 1.0

_REMEDY: Final = (
    "the query no longer reads a stream of its checkpoint; use another checkpointLocation, or set failOnDataLoss to "
    "false to continue with the other streams"
)


class Followed(NamedTuple):
    """A stream that a query reads, and a cut in it."""

    state: StreamState
    cut: StreamCut


class Following:
    """Finds the streams of a query. It lives as long as the query runs."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._only: frozenset[str] | None = None
        self._next_look = -math.inf

    def present(self, client: Client, cuts: Cuts) -> dict[str, Followed]:
        """Return the streams of an offset. A stream that is gone raises; if data may be lost, it is left out."""
        if not self._options.reads_several and not all(map(self._options.reads, cuts)):
            raise InvalidArgumentError(
                "the checkpoint belongs to a query on another stream; use another checkpointLocation",
                checkpoint=",".join(cuts),
                stream=self._options.streams[0],
            )
        found: dict[str, Followed] = {}
        for name, cut in cuts.items():
            try:
                found[name] = Followed(self._state(client, cut), cut)
            except NotFoundError as error:
                self.tell(error)
        return found

    def tell(self, error: NotFoundError) -> None:
        """Report that a stream is gone: with an error or, if data may be lost, with a line in the log."""
        if not self._options.reads_several:
            raise error
        if self._options.fail_on_data_loss:
            raise NotFoundError(_REMEDY, **error.facts, reason=error.message) from error
        logger.warning("%s; the query continues with the other streams", error)

    def joining(self, client: Client, known: Collection[str], *, now: bool = False) -> list[StreamState]:
        """Return streams that exist and are not known, if it is time to look for them."""
        if not now and client.clock.monotonic() < self._next_look:
            return []
        self._next_look = client.clock.monotonic() + _LOOK_SECONDS
        options = self._options
        if not options.reads_several or (self._only is not None and self._only <= {*known}):
            return []
        found = selected(client, options, known, must_exist=options.fail_on_data_loss)
        return [each for each in found if self._only is None or each.name in self._only]

    def only(self, names: Collection[str]) -> None:
        """Let no other streams join."""
        self._only = frozenset(names)

    def _state(self, client: Client, cut: StreamCut) -> StreamState:
        if not self._options.reads(cut.stream):
            raise NotFoundError("the options name other streams", stream=cut.stream)
        state = client.streams.fetch_state(cut.stream)
        if cut.incarnation != state.incarnation:
            raise NotFoundError(
                "the stream of this checkpoint was deleted and created again; start a query with another "
                "checkpointLocation",
                stream=state.name,
            )
        return state
