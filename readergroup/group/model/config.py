"""The configuration of a reader group."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticSerializationError

from readergroup.streams.config import StreamCut, check_stream_name
from synchronizer import Map
from synchronizer.arguments import holds_items
from synchronizer.configuration import Configuration
from synchronizer.error_translation import raise_interrupt_in


def new_reader_id() -> str:
    """Return host, process and a random part, so that no two readers have the same id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:200]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def are_names(streams: object) -> TypeGuard[Collection[str]]:
    """Return whether ``streams`` may be the names of several streams."""
    return holds_items(streams, Collection) and all(isinstance(each, str) for each in streams)


MAX_PROCESSING_SECONDS: Final = 300.0


def _check_start(start: object) -> object:
    """Return a start in the form in which it is stored: a cut, 'head', 'tail', or a time as text, in UTC."""
    if isinstance(start, (StreamCut, Mapping)) or (isinstance(start, str) and start in ("head", "tail")):
        return start
    try:
        time = start if isinstance(start, datetime) else datetime.fromisoformat(start)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError("must be 'head', 'tail', a time or a cut") from None
    if time.tzinfo is None:
        raise ValueError("a time needs a timezone, such as that of datetime.now(UTC)")
    return time.astimezone(UTC).isoformat()


#: A time stands for the first event written since then.
Start = Annotated[StreamCut | str, BeforeValidator(_check_start)]
Retention = Literal["NONE", "MANUAL", "AT_LAST_CHECKPOINT", "AT_LAST_COMMIT"]
Balance = Literal["count", "load"]


def _or_never(seconds: object) -> object:
    return math.inf if seconds is None else seconds


_SecondsOrNever = Annotated[float, BeforeValidator(_or_never), Field(strict=True, gt=0)]


class ReaderGroupConfig(Configuration):
    """What a reader group reads, and its intervals and limits. Durations are seconds.

    ``start`` and ``end`` bound single streams. A stream without bounds is read from its head and without end. A start
    that is no mapping holds for all streams: ``start="tail"``, or a time.
    """

    streams: Annotated[tuple[str, ...], Field(min_length=1)]
    start: Annotated[Mapping[str, Start], AfterValidator(Map), PlainSerializer(dict)] = Map()
    end: Annotated[Mapping[str, StreamCut], AfterValidator(Map), PlainSerializer(dict)] = Map()
    #: A reader whose lease was not renewed for this long is declared dead, and other readers get its segments.
    reader_timeout_seconds: Annotated[float, Field(strict=True, gt=0, le=86_400)] = 10.0
    #: How stale a reader's view of the group may be on a store without push.
    refresh_interval_seconds: Annotated[float, Field(strict=True, gt=0, le=3_600)] = 1.0
    #: How often positions are committed. A crash may repeat the events of this interval.
    position_interval_seconds: Annotated[float, Field(strict=True, gt=0, le=3_600)] = 1.0
    #: A reader stops renewing its lease this long after its last call returned, or its iteration handed out an event.
    #: After `reader_timeout_seconds` more it counts as dead, and joins again at its next call. None, stored as
    #: infinity: no limit.
    max_processing_seconds: _SecondsOrNever = MAX_PROCESSING_SECONDS
    #: How often the group takes an automatic checkpoint, while it has readers with ``on_checkpoint``. None, stored as
    #: infinity: never.
    automatic_checkpoint_interval_seconds: _SecondsOrNever = 30.0
    #: At most this many requested checkpoints are outstanding at a time, and this many completed ones are kept.
    max_outstanding_checkpoints: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    #: Whether the group subscribes to its streams, so that a `RetentionPolicy` with ``consumed_by`` keeps their events
    #: for it, and from where on: "MANUAL" from the cuts of `ReaderGroup.update_retention_cuts`, "AT_LAST_CHECKPOINT"
    #: from the last checkpoint, "AT_LAST_COMMIT" from the committed positions. Never events behind these positions.
    #: With "AT_LAST_CHECKPOINT" a group takes automatic checkpoints also without ``on_checkpoint``.
    retention: Retention = "NONE"
    #: What readers get equal shares of: "count" of segments, or "load", which is bytes per second and lag. With "load"
    #: a segment with most of the load gets a reader of its own.
    balance: Balance = "count"

    @model_serializer(mode="wrap")
    def _without_default(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the defaults of later fields out, so that earlier releases read the group."""
        try:
            fields: dict[str, Any] = serialize(self)
        except PydanticSerializationError as error:
            raise_interrupt_in(error)  # pydantic loses it on the way out of this function
            raise
        for field, default in (("retention", "NONE"), ("balance", "count")):
            if fields.get(field) == default:
                del fields[field]
        return fields

    @model_validator(mode="before")
    @classmethod
    def _spread_start(cls, fields: Any) -> Any:
        """Give a start that is meant for all streams to each of them."""
        if isinstance(fields, Mapping) and isinstance(start := fields.get("start"), (str, datetime)):
            streams = fields.get("streams")
            return {**fields, "start": dict.fromkeys(streams if are_names(streams) else (), start)}
        return fields

    @field_validator("streams", mode="before")
    @classmethod
    def _check_list(cls, streams: object) -> object:
        if not holds_items(streams, Collection):
            example = streams if isinstance(streams, str) else "shop/orders"
            raise ValueError(f"must be a list of names, such as [{example!r}]")
        return streams

    @model_validator(mode="after")
    def _check_streams(self) -> ReaderGroupConfig:
        for stream in self.streams:
            check_stream_name(stream)
        if len(set(self.streams)) != len(self.streams):
            raise ValueError(f"each stream must be named once: {', '.join(self.streams)}")
        for bound in (self.start, self.end):
            for stream, cut in bound.items():
                if stream not in self.streams:
                    raise ValueError(f"a bound is given for {stream}, which is not one of the streams")
                if isinstance(cut, StreamCut) and cut.stream != stream:
                    raise ValueError(f"the cut for {stream} is a cut of {cut.stream}")
        return self

    @classmethod
    def of(cls, **fields: Any) -> ReaderGroupConfig:
        """Return the config with these fields, unseen by the type checker."""
        return cls(**fields)
