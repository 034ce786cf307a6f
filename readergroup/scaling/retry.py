"""What is done with an event whose handler fails: it is tried again, and set aside in the end."""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, field_validator

from synchronizer import Retries

from ..streams.config import check_stream_name
from ..streams.event import EventPointer


class RetryPolicy(Retries):
    """How often a handler is called for an event before that is set aside, and where. Durations are seconds.

    Without ``dead_letters``, the name of a stream, nothing is set aside.
    """

    dead_letters: str | None = None

    @field_validator("dead_letters")
    @classmethod
    def _check_dead_letters(cls, stream: str | None) -> str | None:
        return None if stream is None else check_stream_name(stream)


def _from_base64(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


class DeadLetter(BaseModel):
    """An event that was set aside after its handler had failed for the last time.

    It lies in the stream of dead letters as JSON, for `PydanticSerializer(DeadLetter)`, with the routing key and the
    headers of the event.
    """

    # JSON, because people look at dead letters with general tools such as `readergroup read`, often after the program
    # that wrote the event has changed. Base64 takes a third more, so an event of more than about 6 MiB does not fit:
    # the pool then stops with `HandlerError` and does not lose the event.
    model_config = ConfigDict(frozen=True)

    #: The event's bytes as they were written; base64 in JSON.
    data: Annotated[bytes, BeforeValidator(_from_base64), PlainSerializer(_to_base64, when_used="json")]
    pointer: EventPointer
    #: The type and text of what the last attempt raised.
    error: str
    attempts: int
