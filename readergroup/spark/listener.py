"""Reports how far the streaming queries of a session are, and how far behind their streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from synchronizer import InvalidArgumentError
from synchronizer.callables import checked
from synchronizer.loggers import get_logger

from ..streams.config import SegmentId, StreamCut
from .offsets import cuts_of

logger = get_logger("readergroup.spark")


class QueryProgress(BaseModel):
    """The position of a query in its streams after a batch."""

    model_config = ConfigDict(frozen=True)

    #: The id of the query, the same after each restart from one checkpoint; ``run_id`` is that of this run.
    query_id: str
    run_id: str
    name: str | None
    batch_id: int
    #: How many events the batch had.
    events: int
    #: The query has read all events before these cuts, which are by the name of the stream.
    cuts: Mapping[str, StreamCut]
    #: The unread bytes of each segment, as known when the batch was planned.
    lag: Mapping[SegmentId, int]
    #: How many rows the query dropped in this batch because they were older than its watermark. A query with several
    #: sources reports them with the first one that reads streams.
    rows_dropped_by_watermark: int = 0

    @property
    def cut(self) -> StreamCut:
        """The cut, if the query reads one stream. For several, use ``cuts``."""
        if len(self.cuts) != 1:
            raise InvalidArgumentError("the query does not read one stream; use cuts", streams=list(self.cuts))
        return next(iter(self.cuts.values()))

    @property
    def lag_bytes(self) -> int:
        return sum(self.lag.values())


class ProgressListener(StreamingQueryListener):
    """Passes the progress of queries that read streams to a callback, or logs it.

    Logs a warning for each batch in which a watermark dropped rows.

    Args:
        callback: Called in the driver after each batch, in one thread. Its errors are logged. Default: log at INFO.

    Examples:
        >>> spark.streams.addListener(ProgressListener(print))
    """

    def __init__(self, callback: Callable[[QueryProgress], object] | None = None) -> None:
        self._callback = checked(callback or _log, "callback", "progress")

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for progress in progress_of(event.progress):
            if progress.rows_dropped_by_watermark:
                logger.warning(
                    "query %s dropped %d rows in batch %d, because they were older than its watermark; if they must "
                    "count, use a longer delay",
                    *(progress.name or progress.query_id, progress.rows_dropped_by_watermark, progress.batch_id),
                )
            try:
                self._callback(progress)
            except Exception:
                logger.exception("the callback of the progress listener failed: query=%s", progress.query_id)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: there is no progress yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: the last progress still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing: Spark reports it."""


def progress_of(progress: StreamingQueryProgress) -> Iterator[QueryProgress]:
    """Iterate over the progress of each source of the query that reads streams."""
    dropped = sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
    for source in progress.sources:
        end, latest = _parsed(source.endOffset), _parsed(source.latestOffset)
        if not end.keys() & {"offsets", "cuts"} or "lengths" not in latest:
            continue  # not a stream
        cuts = cuts_of(end)
        offsets = {segment: offset for cut in cuts.values() for segment, offset in cut.offsets.items()}
        yield QueryProgress(
            query_id=str(progress.id),
            run_id=str(progress.runId),
            name=progress.name,
            batch_id=progress.batchId,
            events=source.numInputRows,
            cuts=cuts,
            lag={segment: max(0, length - offsets.get(segment, 0)) for segment, length in latest["lengths"].items()},
            rows_dropped_by_watermark=dropped,
        )
        dropped = 0  # it is that of the query


def _parsed(offset: str | None) -> Mapping[str, Any]:
    try:
        parsed = json.loads(offset or "")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _log(progress: QueryProgress) -> None:
    logger.info(
        "query %s read %d events of %s in batch %d; %d bytes remain",
        progress.name or progress.query_id,
        progress.events,
        ", ".join(progress.cuts),
        progress.batch_id,
        progress.lag_bytes,
    )
