"""The interfaces of export and import, independent of the format."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple, Protocol

import readergroup as rg

from ..streams.data.block import Headers


class ImportedRecord(NamedTuple):
    """An event to import."""

    data: bytes
    routing_key: str | None
    headers: Headers | None
    event_time: datetime | None = None


class Sink(Protocol):
    """The target of an export."""

    def write(self, batch: rg.EventBatch[bytes]) -> None: ...


class Records(Protocol):
    """The records of an import. An invalid record raises `ValueError`."""

    #: The name of a record, and the number of bytes read so far.
    unit: str
    position: int

    def __iter__(self) -> Iterator[ImportedRecord]: ...
