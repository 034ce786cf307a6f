"""The format ``readergroup-notifications`` of Spark: the record of a group's notifications."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from notifications import Notification
from synchronizer import (
    InvalidArgumentError,
    NotFoundError,
    Revision,
    SegmentStore,
    TruncatedError,
)
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Flag

from ..record.arrow import SCHEMA, record_batches
from ..record.entries import RecordRange
from ..record.record import NotificationRecord, entries
from ..streams.data.boundaries import next_boundary
from .connection import backoff_of, client_of, exempt_from_collections
from .offsets import VERSION, check_version
from .options import NotificationOptions, notification_options

logger = get_logger("readergroup.spark")

#: The most bytes that one task reads, in a few seconds.
PART_BYTES: Final = 4 * 1024 * 1024
#: How long a poll that finds nothing takes.
_IDLE_SECONDS: Final = 0.1


class NotificationSource(DataSource):
    """Notifications as DataFrames. Spark creates one source for each ``load()``, in a process of its own."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        exempt_from_collections("the source")

    @classmethod
    def name(cls) -> str:
        return "readergroup-notifications"

    def schema(self) -> StructType:
        self._notification_options(streaming=None)
        return from_arrow_schema(SCHEMA)

    def reader(self, schema: StructType) -> NotificationReader:
        return NotificationReader(schema, self._notification_options(streaming=False))

    def streamReader(self, schema: StructType) -> NotificationStreamReader:
        return NotificationStreamReader(schema, self._notification_options(streaming=True))

    def _notification_options(self, *, streaming: bool | None) -> NotificationOptions:
        return notification_options(self.options, streaming=streaming)


class NotificationPartition(InputPartition):
    """The notifications that one task reads."""

    def __init__(self, within: RecordRange) -> None:
        super().__init__(within)
        self.within = within


class _Reading:
    """The common part of both kinds of reads. Tasks get copies of it, so it has no connection of its own."""

    def __init__(self, schema: StructType, options: NotificationOptions) -> None:
        if schema.names != SCHEMA.names:
            raise InvalidArgumentError("the schema of notifications is fixed; remove .schema(...), and use select")
        self._schema = to_arrow_schema(schema, timezone="UTC")  # names the items of lists differently
        self._options = options

    @property
    def record(self) -> NotificationRecord:
        return client_of(self._options.url).groups.get(self._options.group).notification_record

    def parts(self, within: RecordRange) -> Iterator[NotificationPartition]:
        store = client_of(self._options.url).store
        at = within.start
        while at < within.end:
            try:
                end = next_boundary(store, within.segment, at + PART_BYTES, known=at, end=within.end)
            except TruncatedError as error:
                self.told(error)
                at = error.start_offset
                continue
            yield NotificationPartition(within.model_copy(update={"start": at, "end": end}))
            at = end

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        if not isinstance(partition, NotificationPartition):  # Spark makes such a partition of a plan without any
            return
        client, within = client_of(self._options.url), partition.within
        while within.start < within.end:
            try:
                found = backoff_of(client).retry(partial(_all, client.store, within))
            except TruncatedError as error:
                self.told(error)
                within = within.model_copy(update={"start": error.start_offset})
                continue
            yield from (batch.cast(self._schema) for batch in record_batches(found))
            return

    def told(self, error: TruncatedError) -> None:
        """Report lost notifications."""
        if self._options.fail_on_data_loss:
            raise TruncatedError(
                "retention deleted notifications before they were read; set failOnDataLoss to false to continue "
                "after them, or record with a longer retention",
                **error.facts,
            ) from error
        logger.warning("%s; reading continues after it", error)


def _all(store: SegmentStore, within: RecordRange) -> list[tuple[int, Notification]]:
    return list(entries(store, within))


class NotificationReader(DataSourceReader):
    """Reads the notifications that are recorded when the first action is planned."""

    def __init__(self, schema: StructType, options: NotificationOptions) -> None:
        self._reading = _Reading(schema, options)

    def partitions(self) -> list[InputPartition]:
        found = self._reading.record.range()
        return [] if found is None else [*self._reading.parts(found)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return self._reading.read(partition)


class NotificationStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads notifications in batches, as they are recorded. Its offset is a place in the record."""

    def __init__(self, schema: StructType, options: NotificationOptions) -> None:
        self._options = options
        self._reading = _Reading(schema, options)
        self._end: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        found = self._reading.record.range()
        if found is None:  # nothing is recorded yet
            return self._offset(None, 0)
        starting = self._options.starting
        if isinstance(starting, Revision):
            store = client_of(self._options.url).store
            first = (offset for offset, each in entries(store, found) if each.revision >= starting)
            return self._offset(found.life, next(first, found.end))
        return self._offset(found.life, found.start if starting == "earliest" else found.end)

    def prepareForTriggerAvailableNow(self) -> None:
        found = self._reading.record.range()
        self._end = self._offset(None, 0) if found is None else self._offset(found.life, found.end)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._end is not None:
            return self._end if self._end["life"] is not None else start
        client = client_of(self._options.url)
        found = self._present(start)
        if found is None:
            client.clock.wait(Flag(), _IDLE_SECONDS)
            return start
        if (start["life"], start["offset"]) == (found.life, found.end):
            backoff_of(client).retry(lambda: client.store.wait({found.segment: found.end}, _IDLE_SECONDS))
            return start
        return self._offset(found.life, found.end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = self._present(start)
        if found is None or end["life"] is None:
            return []
        self._check(end, found)
        first, last = start["offset"] if start["life"] is not None else 0, end["offset"]
        if start["life"] is not None and first < found.start:
            self._reading.told(TruncatedError("notifications were deleted", at=first, start_offset=found.start))
        return [*self._reading.parts(found.model_copy(update={"start": max(first, found.start), "end": last}))]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return self._reading.read(partition)

    def _present(self, offset: Mapping[str, Any]) -> RecordRange | None:
        """Return the present range; None if nothing is recorded yet. Raise if the offset is of another record."""
        check_version(offset, VERSION)
        if offset["group"] != self._options.group:
            raise InvalidArgumentError(
                "the checkpoint belongs to a query on another group; use another checkpointLocation",
                checkpoint=offset["group"],
                group=self._options.group,
            )
        found = self._reading.record.range()
        self._check(offset, found)
        return found

    def _check(self, offset: Mapping[str, Any], found: RecordRange | None) -> None:
        if offset["life"] is not None and (found is None or found.life != offset["life"]):
            raise NotFoundError(
                "the group of this checkpoint was deleted; start a query with another checkpointLocation",
                group=self._options.group,
            )

    def _offset(self, life: str | None, offset: int) -> dict[str, Any]:
        return {"v": VERSION, "group": self._options.group, "life": life, "offset": offset}
