"""What a reader group is configured with."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    model_serializer,
    model_validator,
)

from readergroup.streams.config import StreamCut, check_stream_name
from synchronizer import Map
from synchronizer.configuration import Configuration


def new_reader_id() -> str:
    """Host, process and a random part, so that no two readers have it."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:200]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


MAX_PROCESSING_SECONDS: Final = 300.0

Start = StreamCut | Literal["head", "tail"]
#: Fields that came later, which a release before knows only if they are used.
_WRITTEN_IF_USED: Final = ("automatic_checkpoint_interval_seconds", "max_outstanding_checkpoints")


def _or_never(seconds: object) -> object:
    return math.inf if seconds is None else seconds


_SecondsOrNever = Annotated[float, BeforeValidator(_or_never), Field(strict=True, gt=0)]


class ReaderGroupConfig(Configuration):
    """What a reader group reads and how it keeps time. Durations are seconds.

    ``start`` and ``end`` bound single streams; a stream that is not named there is read from its head and without end.
    """

    streams: Annotated[tuple[str, ...], Field(min_length=1)]
    start: Annotated[Mapping[str, Start], AfterValidator(Map), PlainSerializer(dict)] = Map()
    end: Annotated[Mapping[str, StreamCut], AfterValidator(Map), PlainSerializer(dict)] = Map()
    #: A reader whose lease was not renewed for so long is declared dead and its segments are given to others.
    reader_timeout_seconds: Annotated[float, Field(strict=True, gt=0, le=86_400)] = 10.0
    #: How stale a reader's view of the group may be on a store without push.
    refresh_interval_seconds: Annotated[float, Field(strict=True, gt=0, le=3_600)] = 1.0
    #: How often positions are committed: what a crash may repeat.
    position_interval_seconds: Annotated[float, Field(strict=True, gt=0, le=3_600)] = 1.0
    #: A reader that was not asked for anything for longer, since its last call returned, stops renewing its lease; so
    #: it counts as dead, and comes back when it is asked again. None, which is kept as infinity: it may take for ever.
    max_processing_seconds: _SecondsOrNever = MAX_PROCESSING_SECONDS
    #: How often a checkpoint is taken by itself, while there are readers with ``on_checkpoint``. None, which is kept as
    #: infinity: never.
    automatic_checkpoint_interval_seconds: _SecondsOrNever = 30.0
    #: So many checkpoints that were asked for may be under way together; and so many completed ones are kept.
    max_outstanding_checkpoints: Annotated[int, Field(strict=True, ge=1, le=100)] = 3

    @model_validator(mode="after")
    def _check_streams(self) -> ReaderGroupConfig:
        for stream in self.streams:
            check_stream_name(stream)
        if len(set(self.streams)) != len(self.streams):
            raise ValueError(f"a stream is named twice: {', '.join(self.streams)}")
        for bound in (self.start, self.end):
            for stream, cut in bound.items():
                if stream not in self.streams:
                    raise ValueError(f"a bound is given for {stream}, which is not among the streams")
                if isinstance(cut, StreamCut) and cut.stream != stream:
                    raise ValueError(f"the cut given for {stream} is one of {cut.stream}")
        return self

    @model_serializer(mode="wrap")
    def _leave_unused_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        for name in _WRITTEN_IF_USED:
            if getattr(self, name) == type(self).model_fields[name].default:
                del fields[name]
        return fields

    @classmethod
    def of(cls, **fields: Any) -> ReaderGroupConfig:
        """The config with these fields, of which the type checker knows nothing."""
        return cls(**fields)


def _as_stored(config: object) -> object:
    """Groups of releases in which nothing limited a reader by default keep what they were created with."""
    return {"max_processing_seconds": None, **config} if isinstance(config, Mapping) else config


def _to_store(config: ReaderGroupConfig, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
    fields: dict[str, Any] = write(config)
    if config.max_processing_seconds == math.inf:
        del fields["max_processing_seconds"]
    return fields


#: The config in a state, and in an update of it.
StoredConfig = Annotated[ReaderGroupConfig, BeforeValidator(_as_stored), WrapSerializer(_to_store)]
