"""What is exported and imported, in whatever format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ..streams.data.block import Headers
from ..streams.event import EventBatch


class Record(NamedTuple):
    """An event as it is imported."""

    data: bytes
    routing_key: str | None
    headers: Headers | None


class Sink(Protocol):
    """Where events are exported to."""

    def write(self, batch: EventBatch[bytes]) -> None: ...


class Records(Protocol):
    """What is imported. A record that is none raises `ValueError`."""

    #: What a record is called, and how many bytes were read so far.
    unit: str
    position: int

    def __iter__(self) -> Iterator[Record]: ...
